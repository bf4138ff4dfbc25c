"""What this machine can measure and what is in the way: one line for each thing that has broken runs before.

Everything foreign (torch, triton, deep_gemm, a compiler's output) runs in a process of its own with a time limit, so
that a crash there is a line here, and no CUDA context is made in ours.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsabisect.errors import DsabisectError
from dsabisect.outside import findings, store, surroundings
from dsabisect.outside.compilers import compiler_line, nvcc_line
from dsabisect.outside.findings import FAULT, MARK, OK, WARNING, Line, child, own_environment
from dsabisect.outside.kernels import deep_gemm_line, triton_line

GIT_OLDEST = (2, 29)  # fast-import, --end-of-options, sha1 object format by name
PYTHON_OLDEST = (3, 10)
DISK_FAULT, DISK_WARNING = 1 << 30, 10 << 30


def diagnose(
    *,
    build_env: Mapping[str, str] | None = None,
    golden_check: Callable[[], str] | None = None,
    cache: Path | None = None,
    interpreter: str = sys.executable,
) -> list[Line]:
    """Look at everything, in the order in which a run needs it.

    ``build_env``: CC, CXX and others as given to a run. ``golden_check``: describes the golden set in one line, or
    raises a DsabisectError. ``cache``: where checkouts, builds and compiled kernels go; the usual place by default.
    """
    env = {**own_environment(), **(build_env or {})}
    scratch = _scratch()
    if scratch.status == FAULT:  # nothing can be tried without one
        return [_python(), scratch]
    told, lines = _libraries(interpreter, env)
    arch = str(told.get("arch", ""))
    gpu, device = bool(arch), "cuda:0" if arch else ""
    lines = [_python(), *lines, _git(env), nvcc_line(env, gpu, arch), compiler_line(interpreter, env, gpu=gpu)]
    lines += [triton_line(interpreter, env, device)] if "triton" in told else []
    lines.append(deep_gemm_line(interpreter, env, device))
    lines += [scratch, *_folders(cache), _jit_caches(env)]
    if golden_check is not None:
        lines.append(_golden(golden_check))
    return lines


def exit_code(lines: Sequence[Line]) -> int:
    """1 when anything is at fault, else 0."""
    return int(any(line.status == FAULT for line in lines))


def render(line: Line) -> str:
    remedy = f"\n{'':10}→ {line.remedy}" if line.remedy else ""
    return f"{line.status:<8}  {line.name}: {line.found}{remedy}"


def as_json(line: Line) -> dict[str, str]:
    return asdict(line)


# ---- Python, torch, the device -----------------------------------------------------------------------------

LIBRARIES = """
import importlib, json
told = {}
for name in ("numpy", "safetensors", "torch", "triton", "tvm_ffi"):
    try:
        told[name] = str(getattr(importlib.import_module(name), "__version__", "?"))
    except Exception as error:
        told[name + "_error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
if "torch" in told:
    import torch
    told["cuda"] = str(torch.version.cuda or "")
    try:
        if torch.version.cuda and torch.cuda.device_count():
            found = torch.cuda.get_device_properties(0)
            torch.zeros(1, device="cuda:0").cpu()
            told.update(device=found.name, arch=f"sm{found.major}{found.minor}", count=torch.cuda.device_count())
    except Exception as error:
        told["device_error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
print("%s" + json.dumps(told), flush=True)
""".replace("%s", MARK)


def _libraries(interpreter: str, env: Mapping[str, str]) -> tuple[dict[str, Any], list[Line]]:
    """What is importable, and the device, as seen by one child."""
    ran = child([interpreter, "-c", LIBRARIES], env, findings.IMPORT_SECONDS)
    told = ran.told
    if told is None:
        remedy = f"Try `{interpreter} -c 'import torch'`; reinstall torch"
        return {}, [Line(name="torch", status=FAULT, found=f"importing it {ran.ending}", remedy=remedy)]
    lines = [_library(name, told, needed=name != "triton") for name in ("torch", "numpy", "safetensors", "triton")]
    if "arch" in told and "tvm_ffi" not in told:
        found, remedy = told["tvm_ffi_error"], "pip install apache-tvm-ffi (sglang's own JIT kernels need it)"
        lines.append(Line(name="tvm_ffi", status=WARNING, found=found, remedy=remedy))
    return told, [*lines, _device(told, env)]


def _library(name: str, told: Mapping[str, Any], *, needed: bool) -> Line:
    if name in told:
        cuda = f" (CUDA {told['cuda']})" if name == "torch" and told.get("cuda") else ""
        return Line(name=name, status=OK, found=f"{told[name]}{cuda}")
    use = "" if needed else " (only for kernels written in it)"
    status = FAULT if needed else WARNING
    return Line(name=name, status=status, found=told[f"{name}_error"], remedy=f"pip install {name}{use}")


def _device(told: Mapping[str, Any], env: Mapping[str, str]) -> Line:
    driver = _driver(env)
    if "arch" in told:
        more = f", {told['count']} devices" if told["count"] > 1 else ""
        return Line(name="CUDA device", status=OK, found=f"{told['device']} {told['arch']}, driver {driver}{more}")
    remedy = "GPU paths will not run; CPU paths (--device cpu) will"
    if "device_error" in told:
        remedy = f"{remedy}. Check `nvidia-smi`, and that the driver is new enough for CUDA {told.get('cuda', '')}"
        return Line(name="CUDA device", status=WARNING, found=str(told["device_error"]), remedy=remedy)
    why = "none seen" if told.get("cuda") else "this torch is built without CUDA"
    return Line(name="CUDA device", status=WARNING, found=f"{why}, driver {driver}", remedy=remedy)


def _driver(env: Mapping[str, str]) -> str:
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is None:
        return "none"
    ran = child([program, "--query-gpu=driver_version", "--format=csv,noheader"], env, 30.0)
    found = re.search(r"^\d+\.\d+(?:\.\d+)?$", ran.output, re.MULTILINE)
    return found[0] if ran.code == 0 and found else "unknown"


def _python() -> Line:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_OLDEST:
        return Line(name="Python", status=FAULT, found=version, remedy="Use Python 3.10 or newer")
    return Line(name="Python", status=OK, found=f"{version} ({sys.executable})")


# ---- programs ----------------------------------------------------------------------------------------------


def _git(env: Mapping[str, str]) -> Line:
    oldest = ".".join(map(str, GIT_OLDEST))
    remedy = f"Install git {oldest} or newer"
    program = shutil.which("git", path=env.get("PATH"))
    if program is None:
        return Line(name="git", status=FAULT, found="not found on PATH", remedy=remedy)
    ran = child([program, "--version"], env, 30.0)
    found = re.search(r"(\d+)\.(\d+)[\w.]*", ran.output)
    if ran.code != 0 or found is None:
        return Line(name="git", status=FAULT, found=f"`git --version` {ran.ending}", remedy=remedy)
    if (int(found[1]), int(found[2])) < GIT_OLDEST:
        return Line(name="git", status=FAULT, found=f"{found[0]} is too old", remedy=remedy)
    return Line(name="git", status=OK, found=found[0])


# ---- folders and goldens -----------------------------------------------------------------------------------


def _scratch() -> Line:
    try:
        place = tempfile.gettempdir()
    except OSError as error:
        remedy = "Set TMPDIR to a folder that can be written, or make room"
        return Line(name="temporary folder", status=FAULT, found=error.strerror or str(error), remedy=remedy)
    with tempfile.TemporaryDirectory(prefix="dsabisect-doctor-") as scratch:
        trouble = _cannot_execute(Path(scratch))
    if trouble:
        remedy = "Set TMPDIR to a folder on a file system that is not mounted noexec: kernels are compiled there"
        return Line(name="temporary folder", status=FAULT, found=f"{place}: {trouble}", remedy=remedy)
    return Line(name="temporary folder", status=OK, found=f"{place} can be written, and run from")


def _cannot_execute(folder: Path) -> str:
    """ "" when a program can be run from ``folder``: compiled kernels are loaded from there."""
    program = folder / "run"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o700)
    ran = child([str(program)], own_environment(), 30.0)
    return "" if ran.code == 0 else f"a program there {ran.ending}"


def _jit_caches(env: Mapping[str, str]) -> Line:
    """Candidates get caches of their own; a person who finds an old kernel answering should know that it is not so."""
    named = sorted(name for name in surroundings.CACHES if env.get(name))
    yours = f"; yours ({', '.join(named)}) are not used and not touched" if named else ""
    return Line(name="JIT caches", status=OK, found=f"private to each run and each set of kernel sources{yours}")


def _folders(cache: Path | None) -> list[Line]:
    try:
        folder = cache or store.work_root()
    except DsabisectError as error:
        return [_error_line("cache folder", error)]
    return [_cache(folder), _disk(folder)]


def _cache(folder: Path) -> Line:
    remedy = "Set DSABISECT_CACHE to a folder that can be written and is not mounted noexec"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as scratch:
            first, second = Path(scratch) / "a", Path(scratch) / "b"
            first.write_bytes(b"x" * 4096)
            os.replace(first, second)
            second.chmod(0o700)
            trouble = _cannot_execute(Path(scratch))
    except OSError as error:
        return Line(name="cache folder", status=FAULT, found=f"{folder}: {error.strerror or error}", remedy=remedy)
    if trouble:
        return Line(name="cache folder", status=FAULT, found=f"{folder}: {trouble}", remedy=remedy)
    return Line(name="cache folder", status=OK, found=f"{folder} can be written, and run from")


def _disk(folder: Path) -> Line:
    place = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Line(name="disk", status=WARNING, found=f"{place}: {error.strerror or error}")
    found = f"{free / (1 << 30):.1f} GiB free at {place}"
    if free >= DISK_WARNING:
        return Line(name="disk", status=OK, found=found)
    remedy = "Make room, or set DSABISECT_CACHE to a larger disk: a built DeepGEMM commit takes about 50 MB"
    return Line(name="disk", status=FAULT if free < DISK_FAULT else WARNING, found=found, remedy=remedy)


def _golden(check: Callable[[], str]) -> Line:
    try:
        return Line(name="golden set", status=OK, found=check())
    except DsabisectError as error:
        return _error_line("golden set", error)


def _error_line(name: str, error: DsabisectError) -> Line:
    where = f" ({error.where})" if error.where else ""
    return Line(name=name, status=FAULT, found=f"{error.what}{where}", remedy=error.remedy)
