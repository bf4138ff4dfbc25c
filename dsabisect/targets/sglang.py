"""The target `sglang`: the DSA indexer and its metadata backend, run without the rest of sglang.

Nothing is built: the modules are Python, their kernels compile on first use. Sources of what is asserted here:
sgl-project/sglang python/sglang/srt/layers/attention/dsa/dsa_indexer.py and dsa_backend.py (nsa_* before 2026-05-20).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from dsabisect.model import Case, Device, PathSpec, Stage
from dsabisect.targets import BuildRequest, BuildStep, GateSource, Part, Read

NAME = "sglang"
TITLE = "sglang: the DSA indexer (DeepSeek-V3.2, GLM-5.x) and its metadata backend"
PROBE = "dsabisect.candidate.probes.sglang"

FUSION_SWITCH = "SGLANG_DISABLE_DSA_INDEXER_FUSION"
SPLIT = PathSpec(
    name="split", title="separate projections, Hadamard, ue8m0 query scales", env={FUSION_SWITCH: "1"},
)  # fmt: skip
FUSED = PathSpec(name="fused", title="fused Q and K kernels, no Hadamard (CUDA)", env={FUSION_SWITCH: "0"})
EXPANDED = PathSpec(
    name="expanded", title="speculative verify, one row a draft token", env={FUSION_SWITCH: "1"},
    settings={"layout": "expanded"},
)  # fmt: skip
NATIVE = PathSpec(
    name="native", title="speculative verify, all draft tokens of a sequence at once", env={FUSION_SWITCH: "1"},
    settings={"layout": "native"},
)  # fmt: skip
_ATTENTION, _JIT, _KERNELS = "python/sglang/srt/layers/attention", "python/sglang/jit_kernel", "python/sglang/kernels"
ENVIRON, PYPROJECT = "python/sglang/srt/environ.py", "python/pyproject.toml"
_BACKEND = (
    f"{_ATTENTION}/dsa", f"{_ATTENTION}/nsa", f"{_ATTENTION}/dsa_backend.py", f"{_ATTENTION}/nsa_backend.py",
)  # fmt: skip
_METADATA_KERNELS = (f"{_KERNELS}/ops/attention/dsa_metadata.py", f"{_ATTENTION}/triton_ops/dsa_metadata.py")
METADATA = PathSpec(
    name="metadata", title="lengths for deep_gemm's scheduler, capture then replay", settings={"metadata": True},
    outputs=("lens",), relevant=(*_BACKEND, *_METADATA_KERNELS, ENVIRON, PYPROJECT),
)  # fmt: skip
DEFAULT = PathSpec(name="default", title="what the commit selects by itself", default_selection=True)
PATHS = (SPLIT, FUSED, EXPANDED, NATIVE, METADATA, DEFAULT)
DEFAULT_PATHS = ("split", "fused", "expanded", "native", "metadata", "default")

RELEVANT = (
    *_BACKEND, f"{_JIT}/dsa", f"{_JIT}/dsv32", f"{_JIT}/dsv4", f"{_JIT}/csrc/deepseek_v32", f"{_JIT}/csrc/deepseek_v4",
    f"{_JIT}/csrc/dsa", f"{_JIT}/csrc/nsa", f"{_JIT}/csrc/fast-hadamard-transform", f"{_JIT}/hadamard.py",
    f"{_JIT}/fused_store_index_cache.py", f"{_JIT}/utils.py", f"{_JIT}/utils", f"{_JIT}/include/sgl_kernel",
    f"{_KERNELS}/ops/attention/dsa", *_METADATA_KERNELS, ENVIRON, PYPROJECT,
)  # fmt: skip
CHECKOUT = (*_BACKEND, _JIT, f"{_KERNELS}/ops/attention", f"{_ATTENTION}/triton_ops", ENVIRON, PYPROJECT)
SUBMODULES: tuple[str, ...] = ()
# deep_gemm is the installed wheel at every commit; its cache is keyed by its own sources
DEPENDENCY_CACHES = ("DG_JIT_CACHE_DIR", "DG_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "SGL_DG_CACHE_DIR")
# most commits leave the kernels alone: they share what was compiled
JIT_SOURCES = tuple(p for p in RELEVANT if p.startswith((_JIT, _KERNELS)))

PINNED = ("sgl-kernel", "sglang-kernel", "sgl-deep-gemm", "deep-gemm", "flashinfer_python", "flashinfer_cubin", "torch",
          "apache-tvm-ffi")  # fmt: skip
NATIVE_DRAFTS = {"sm90": (1, 2)}  # asserted by deep_gemm's kernel; other architectures take any
HEADS = (32, 64)


def supports(path: PathSpec, case: Case, device: Device) -> str | None:
    """None when the cell can run, else why it cannot."""
    if device.kind not in ("cpu", "cuda"):
        return f"the DSA indexer runs on a CPU (emulated deep_gemm) or an NVIDIA GPU, not on {device.name}"
    wanted = Stage.METADATA if path.name == "metadata" else Stage.END_TO_END
    if case.stage is not wanted:
        return f"path {path.name} takes {wanted.value} cases, not {case.stage.value}"
    if path.name == "metadata":
        on_gpu = "the metadata logic is measured with --device cpu; its arch is pretended"
        return None if device.kind == "cpu" else on_gpu
    return _indexer_limits(path, case, device)


def _indexer_limits(path: PathSpec, case: Case, device: Device) -> str | None:
    facets = case.facets
    if path.name == "fused" and device.kind == "cpu":
        return "the fused kernels are CUDA code compiled on first use: they need a GPU"
    if device.kind == "cuda" and device.arch not in ("sm90", "sm100"):
        return f"deep_gemm has MQA kernels for sm90 and sm100 only, not {device.arch}"
    for name, only in (("arch", device.arch), ("deep_gemm", "present"), ("graph", "eager"), ("page", 64)):
        if facets.get(name, only) != only:
            return f"end to end {name} is {only} here, not {facets[name]}"
    if facets["heads"] not in HEADS:
        return f"deep_gemm takes {' or '.join(map(str, HEADS))} heads, not {facets['heads']}"
    if path.name in ("native", "expanded"):
        return _layout_limits(path, case, device)
    if facets["mode"] == "draft_extend":
        return "draft_extend differs from target_verify in its metadata only: see path metadata"
    return None


def _layout_limits(path: PathSpec, case: Case, device: Device) -> str | None:
    next_n = int(case.facets.get("next_n", 0))
    if case.facets["mode"] != "target_verify" or next_n < 2:
        return f"layouts differ in target_verify only: path {path.name} has nothing of its own in {case.facets['mode']}"
    allowed = NATIVE_DRAFTS.get(device.arch)
    if path.name == "native" and allowed and next_n not in allowed:
        taken = " or ".join(map(str, allowed))
        return f"{device.arch} kernels take next_n {taken}, not {next_n} (asserted in deep_gemm)"
    return None


# ---- environ.py: most commits touch it, few of them a flag that the indexer reads ----------------------------

MENTIONED = re.compile(rb"\benvs\.(\w+)")


@lru_cache(maxsize=4096)
def _mentioned(content: bytes) -> frozenset[str]:
    return frozenset(name.decode() for name in MENTIONED.findall(content))


@lru_cache(maxsize=1024)
def _statements(content: bytes) -> tuple[tuple[str, str], ...] | None:
    """(flag, text) of the top level and of classes, comments and white space aside; None when it does not parse.

    flag: what the statement defines when it defines a flag, else "".
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return None
    lines = content.split(b"\n")
    bodies = (one.body if isinstance(one, ast.ClassDef) else [one] for one in tree.body)
    return tuple((_flag_of(one), _text_of(one, lines)) for body in bodies for one in body)


def _flag_of(statement: ast.stmt) -> str:
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    return target.id if isinstance(target, ast.Name) and target.id.isupper() else ""


def _text_of(statement: ast.stmt, lines: Sequence[bytes]) -> str:
    """Source of a statement, white space made alike; its lines are counted in bytes, as ast does."""
    first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
    mine = [*lines[first : last - 1], lines[last - 1][: statement.end_col_offset]]
    mine[0] = mine[0][statement.col_offset :]
    return b" ".join(b" ".join(mine).split()).decode(errors="replace")


def environ_part(content: bytes, others: Collection[bytes]) -> bytes:
    """environ.py without the flags that no other relevant file mentions, and without comments between statements.

    All of it when it does not parse.
    """
    statements = _statements(content)
    if statements is None:
        return content
    read = _read_by(others)
    return "\n".join(text for flag, text in statements if not flag or flag in read).encode()


def environ_flags(content: bytes, others: Collection[bytes]) -> Mapping[str, str]:
    """Flags that a relevant file mentions → their definitions."""
    read = _read_by(others)
    return {flag: text.partition("=")[2].strip() for flag, text in _statements(content) or () if flag in read}


def _read_by(others: Collection[bytes]) -> frozenset[str]:
    return frozenset[str]().union(*map(_mentioned, others))


def pinned_part(content: bytes, others: Collection[bytes]) -> bytes:
    return repr(sorted(pins(lambda _: content).items())).encode()


PARTS = (
    Part(path=ENVIRON, distil=environ_part, flags=environ_flags),
    Part(path=PYPROJECT, distil=pinned_part, flags=lambda content, others: {}),
)


def pins(read: Read) -> Mapping[str, str]:
    """Dependency → version specifier, as python/pyproject.toml pins those that the indexer computes with."""
    text = (read("python/pyproject.toml") or b"").decode(errors="replace")
    found: dict[str, str] = {}
    for name in PINNED:
        listed = rf"^\s*\"{re.escape(name)}(?:\[[^\]]*\])?\s*([=<>!~][^\";,]*(?:,[^\";]*)?)"
        seen = re.search(listed, text, re.MULTILINE | re.IGNORECASE)
        if seen:
            found[name] = seen[1].strip()
    return found


def environment(checkout: Path, device: Device) -> Mapping[str, str]:
    """No torch.compile; on a CPU Triton's interpreter, so that the candidate's own Triton kernels run there."""
    common = {"TORCHDYNAMO_DISABLE": "1", "SGLANG_IS_IN_CI": "false"}
    return {**common, "TRITON_INTERPRET": "1"} if device.kind == "cpu" else common


def prepare(request: BuildRequest) -> Sequence[BuildStep]:
    """Nothing to build."""
    return ()


def gate_switch(path: PathSpec) -> str:
    return FUSION_SWITCH if path.name == "fused" else ""


GATES = (
    GateSource(
        path="fused", files=(f"{_ATTENTION}/dsa/dsa_indexer.py", f"{_ATTENTION}/nsa/nsa_indexer.py"),
        switch="_use_dsa_indexer_fusion",
        arguments={"rope": {"neox": "is_neox_style", "interleaved": "not is_neox_style"}},
    ),
)  # fmt: skip
