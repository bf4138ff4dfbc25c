"""The target `deepgemm`: DeepGEMM's MQA-logits kernels, each commit built from source, measured at kernel level.

Sources of what is asserted here: deepseek-ai/DeepGEMM setup.py, csrc/apis/attention.hpp, csrc/jit_kernels/impls/.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsabisect.errors import EnvironmentFault, StoreError
from dsabisect.model import Case, Device, PathSpec, Stage
from dsabisect.targets import BuildRequest, BuildStep, Part, Read

NAME = "deepgemm"
TITLE = "DeepGEMM: paged and ragged MQA-logits kernels, built from source (CUDA)"
PROBE = "dsabisect.candidate.probes.deepgemm"

PAGED = PathSpec(name="paged", title="fp8_paged_mqa_logits, native and expanded layouts")
RAGGED = PathSpec(name="ragged", title="fp8_mqa_logits over contiguous keys")
PATHS = (PAGED, RAGGED)
DEFAULT_PATHS = ("paged", "ragged")
# Shared headers are everywhere, so that no narrower set is safe; the submodules' pins lie under third-party.
RELEVANT = ("deep_gemm", "csrc", "setup.py", "third-party", ".gitmodules")
PARTS: tuple[Part, ...] = ()
CHECKOUT: tuple[str, ...] = ()  # 4 MB in all, and setup.py of later commits imports from scripts/
SUBMODULES = ("third-party/cutlass", "third-party/fmt")
JIT_SOURCES: tuple[str, ...] = ()
DEPENDENCY_CACHES: tuple[str, ...] = ()

LAYOUTS = {"paged": ("native", "expanded"), "ragged": ("ragged",)}
HEADS = {"sm90": (32, 64), "sm100": (8, 16, 32, 64)}
DRAFTS = {"sm90": (1, 2), "sm100": None}  # None: any; commits that take fewer say so themselves, and are absent there
ONLY = (("page", 64), ("graph", "eager"), ("deep_gemm", "present"))
JIT_INCLUDES = ("cutlass", "cute")
BUILD_SECONDS, IMPORT_SECONDS = 1800.0, 180.0
IMPORT = """
import os, sys
here = os.path.realpath(os.getcwd())
sys.path.insert(0, here)
import torch
import deep_gemm
extension = sys.modules.get("deep_gemm._C") or sys.modules.get("deep_gemm_cpp")
for module in (deep_gemm, extension):
    file = os.path.realpath(module.__file__) if module else "no extension module"
    if not file.startswith(here + os.sep):
        sys.exit(f"ImportError: deep_gemm comes from {file}, not from the build in {here}")
device = sys.argv[1]
if device.startswith("cuda"):
    torch.cuda.set_device(device)
    print("SMs:", deep_gemm.get_num_sms())
print("deep_gemm:", os.path.relpath(extension.__file__, here))
"""


def supports(path: PathSpec, case: Case, device: Device) -> str | None:
    """None when the cell can run, else why it cannot."""
    if device.kind != "cuda":
        return f"DeepGEMM's kernels need an NVIDIA GPU, not {device.name}"
    if device.arch not in HEADS:
        return f"DeepGEMM has MQA kernels for {' and '.join(HEADS)} only, not {device.arch}"
    if case.stage is not Stage.LOGITS:
        return f"kernel level: path {path.name} takes logits cases, not {case.stage.value}"
    facets = case.facets
    layout = facets.get("layout", LAYOUTS[path.name][0])
    if layout not in LAYOUTS[path.name]:
        return f"path {path.name} takes layout {' or '.join(LAYOUTS[path.name])}, not {layout}"
    if facets.get("arch", device.arch) != device.arch:
        return f"the case is for {facets['arch']}, the device is {device.arch}"
    for name, only in ONLY:
        if facets.get(name, only) != only:
            return f"at kernel level {name} is {only}, not {facets[name]}"
    return _kernel_limits(facets.get("heads", 64), facets.get("next_n", 1), layout, facets.get("lens"), device.arch)


def _kernel_limits(heads: int | str, next_n: int | str, layout: int | str, lens: object, arch: str) -> str | None:
    if heads not in HEADS[arch]:
        return f"{arch} kernels take {' or '.join(map(str, HEADS[arch]))} heads, not {heads}"
    drafts = DRAFTS[arch]
    if layout == "native" and drafts is not None and next_n not in drafts:
        return f"{arch} kernels take next_n {' or '.join(map(str, drafts))}, not {next_n} (asserted in C++)"
    if layout == "expanded" and lens == "full":
        return "one row a token: the lengths are causal by nature"
    return None


def pins(read: Read) -> Mapping[str, str]:
    """Submodule path → url, as .gitmodules lists them. Their shas are no files: the relevant tree holds them."""
    found: dict[str, str] = {}
    listed = (read(".gitmodules") or b"").decode(errors="replace")
    for section in re.split(r"^\[submodule", listed, flags=re.MULTILINE)[1:]:
        values = dict(re.findall(r"^\s*(path|url)\s*=\s*(\S+)", section, re.MULTILINE))
        if "path" in values:
            found[values["path"]] = values.get("url", "")
    return found


def environment(checkout: Path, device: Device) -> Mapping[str, str]:
    """Nothing beyond the allow-list: CUDA_HOME and PATH pass, the JIT cache is private to each build."""
    return {}


def prepare(request: BuildRequest) -> Sequence[BuildStep]:
    """Put CUTLASS and fmt where setup.py and the JIT compiler look; build the extension in place; import it.

    Old commits build a top-level ``deep_gemm_cpp``, later ones ``deep_gemm/_C``: the same command for both.

    Raises:
        EnvironmentFault: a submodule's ``include`` folder is not to be had.
    """
    checkout = request.checkout
    try:
        for path in SUBMODULES:
            if _pinned(checkout, path):
                _place(checkout, path, request.submodules.get(path))
        _link_jit_includes(checkout)
    except OSError as error:
        raise StoreError(
            f"cannot prepare the checkout: {error.strerror or error}", where=str(checkout), remedy="Make room, --resume"
        ) from error
    env = _build_env(request)
    build = (request.interpreter, "setup.py", "build_ext", "--inplace")
    smoke = (request.interpreter, "-c", IMPORT, request.device.name)
    return (
        BuildStep(argv=build, title="build the extension", env=env, seconds=BUILD_SECONDS),
        BuildStep(argv=smoke, title="import what was built", env=env, seconds=IMPORT_SECONDS),
    )


def gate_switch(path: PathSpec) -> str:
    """DeepGEMM has no switch for a kernel: a gate would be an arch test in C++."""
    return ""


# ---- the checkout ------------------------------------------------------------------------------------------


def _build_env(request: BuildRequest) -> dict[str, str]:
    return {
        "DG_FORCE_BUILD": "1",  # never download a wheel
        "DG_USE_LOCAL_VERSION": "0",  # no git call for the version
        "DG_SKIP_CUDA_BUILD": "0",
        "GIT_CEILING_DIRECTORIES": str(request.checkout.parent),  # the oldest setup.py asks git regardless
        "PYTHONSAFEPATH": "",  # later ones import scripts.generate_pyi from beside setup.py
        "MAX_JOBS": "4",
        **request.build_env,
    }


def _pinned(checkout: Path, path: str) -> bool:
    listed = checkout / ".gitmodules"
    wanted = rf"^\s*path\s*=\s*{re.escape(path)}\s*$"
    return listed.is_file() and re.search(wanted, listed.read_text(), re.MULTILINE) is not None


def _place(checkout: Path, path: str, given: Path | None) -> None:
    """Make ``checkout/path/include`` exist: it does already, or ``given`` (the repository, or its include) has it."""
    target = checkout / path / "include"
    if target.is_dir() and any(target.iterdir()):
        return
    name = path.rpartition("/")[2]
    for source in (given / "include", given) if given else ():
        if (source / name).is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir() and not target.is_symlink():
                target.rmdir()
            target.symlink_to(source.absolute())
            return
    raise EnvironmentFault(
        f"submodule {path} has no include folder",
        where=str(given or checkout / path),
        remedy=f"Give one: --submodule {path}=PATH (a clone, or a folder with include/{name})",
    )


def _link_jit_includes(checkout: Path) -> None:
    """deep_gemm/include/{cutlass,cute}: the only include folder that the JIT compiler is given."""
    for name in JIT_INCLUDES:
        link = checkout / "deep_gemm" / "include" / name
        source = checkout / "third-party" / "cutlass" / "include" / name
        if source.is_dir() and link.parent.is_dir() and not os.path.lexists(link):
            link.symlink_to(os.path.relpath(source, link.parent), target_is_directory=True)
