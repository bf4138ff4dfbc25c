"""What this machine can measure and what is in the way: one line for each thing that has broken runs before.

Everything foreign (torch, triton, deep_gemm, a compiler's output) runs in a process of its own with a time limit, so
that a crash there is a line here, and no CUDA context is made in ours.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsabisect.errors import DsabisectError
from dsabisect.outside import store

OK, WARNING, FAULT = "ok", "warning", "fault"
GIT_OLDEST = (2, 29)  # fast-import, --end-of-options, sha1 object format by name
PYTHON_OLDEST = (3, 10)
IMPORT_SECONDS, COMPILE_SECONDS, KERNEL_SECONDS = 120.0, 60.0, 420.0
DISK_FAULT, DISK_WARNING = 1 << 30, 10 << 30
MARK = "DSABISECT-DOCTOR "  # before the one line of a child's output that is ours
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
COMPILERS = "--build-env CC=/usr/bin/gcc --build-env CXX=/usr/bin/g++"
FULL_WHEELS = "sgl-deep-gemm 0.1.0 is right for torch 2.11 with CUDA 13"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing looked at. ``remedy`` is "" when nothing is to be done."""

    name: str
    status: str  # ok | warning | fault
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class _Ran:
    """How a child ended. ``code`` is negative for a signal, None when ``trouble`` says why there is none."""

    code: int | None
    output: str = ""  # stdout and stderr together
    trouble: str = ""  # it could not be started, or did not end in time

    @property
    def told(self) -> dict[str, Any] | None:
        """What the child reported, when it got that far."""
        lines = [line for line in self.output.splitlines() if line.startswith(MARK)]
        return json.loads(lines[-1][len(MARK) :]) if lines else None

    @property
    def ending(self) -> str:
        """One line for a person: the signal or exit code, and the last line printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip() and not line.startswith(MARK)]
        last = f": {lines[-1][:200]}" if lines else ""
        if self.code is None:
            return f"{self.trouble}{last}"
        if self.code < 0:
            return f"died of {_signal_name(-self.code)}{last}"
        return f"exit code {self.code}{last}"


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
    env = {**_own_environment(), **(build_env or {})}
    told, lines = _libraries(interpreter, env)
    gpu = bool(told.get("arch"))
    lines = [_python(), *lines, _git(env), _nvcc(env, gpu), compiler_line(interpreter, env, gpu=gpu)]
    lines.append(deep_gemm_line(interpreter, env, "cuda:0" if gpu else ""))
    lines += _folders(cache)
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
for name in ("numpy", "safetensors", "torch", "triton"):
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
    ran = _child([interpreter, "-c", LIBRARIES], env, IMPORT_SECONDS)
    told = ran.told
    if told is None:
        remedy = f"Try `{interpreter} -c 'import torch'`; reinstall torch"
        return {}, [Line(name="torch", status=FAULT, found=f"importing it {ran.ending}", remedy=remedy)]
    lines = [_library(name, told, needed=name != "triton") for name in ("torch", "numpy", "safetensors", "triton")]
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
    ran = _child([program, "--query-gpu=driver_version", "--format=csv,noheader"], env, 30.0)
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
    ran = _child([program, "--version"], env, 30.0)
    found = re.search(r"(\d+)\.(\d+)[\w.]*", ran.output)
    if ran.code != 0 or found is None:
        return Line(name="git", status=FAULT, found=f"`git --version` {ran.ending}", remedy=remedy)
    if (int(found[1]), int(found[2])) < GIT_OLDEST:
        return Line(name="git", status=FAULT, found=f"{found[0]} is too old", remedy=remedy)
    return Line(name="git", status=OK, found=found[0])


def _nvcc(env: Mapping[str, str], gpu: bool) -> Line:
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    program = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None
    program = program or shutil.which("nvcc", path=env.get("PATH"))
    remedy = "Install the CUDA toolkit and set CUDA_HOME: kernels are compiled when they are first called"
    if program is None:
        remedy = remedy if gpu else "Needed on a GPU only"
        return Line(name="nvcc", status=WARNING, found="not found in CUDA_HOME or on PATH", remedy=remedy)
    ran = _child([program, "--version"], env, 30.0)
    release = re.search(r"release (\d+\.\d+)", ran.output)
    if ran.code != 0 or release is None:
        return Line(name="nvcc", status=FAULT if gpu else WARNING, found=f"{program} {ran.ending}", remedy=remedy)
    return Line(name="nvcc", status=OK, found=f"{release[1]} ({program})")


SOURCE = r"""
#include <filesystem>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
// Exceptions, streams, regular expressions and locale: what breaks when a wrapped compiler links another libstdc++.
extern "C" int dsabisect_doctor() {
    std::string folder = std::filesystem::temp_directory_path().string();
    std::smatch found;
    std::string text = "release 13.0";
    if (folder.empty() || !std::regex_search(text, found, std::regex(R"((\d+)\.(\d+))"))) return 1;
    try {
        std::stringstream stream;
        stream << found[1].str() << found[2].str();
        throw std::runtime_error(stream.str());
    } catch (const std::exception& error) {
        return std::string(error.what()) == "130" ? 42 : 2;
    }
}
#ifndef DSABISECT_LIBRARY
int main() { return dsabisect_doctor() == 42 ? 0 : 1; }
#endif
"""
LOAD = "import ctypes, sys, torch; sys.exit(ctypes.CDLL(sys.argv[1]).dsabisect_doctor() != 42)"


def compiler_line(interpreter: str, env: Mapping[str, str], *, gpu: bool) -> Line:
    """Compile and run a program, then load a library beside torch: what links may still crash.

    The library is made as setuptools makes an extension: CC compiles, CXX links.
    """
    name = "host compiler"
    given = env.get("CXX") or "c++"
    program = shutil.which(given.split()[0], path=env.get("PATH"))
    if program is None:
        fault = gpu or bool(env.get("CXX"))
        remedy = f"Install g++, or name one: {COMPILERS}" if fault else "Needed only for commits that are built"
        return Line(name=name, status=FAULT if fault else WARNING, found=f"{given} not found", remedy=remedy)
    with tempfile.TemporaryDirectory(prefix="dsabisect-doctor-") as scratch:
        cxx = [program, *given.split()[1:]]
        cc = env["CC"].split() if env.get("CC") else cxx
        wrong = _try_compilers(cc, cxx, interpreter, env, Path(scratch))
    if wrong:
        remedy = f"Use a compiler that makes working programs: {COMPILERS}"
        return Line(name=name, status=FAULT, found=f"{program}: {wrong}", remedy=remedy)
    ran = _child([program, "--version"], env, 30.0)
    version = next(iter(ran.output.splitlines()), "")
    return Line(name=name, status=OK, found=f"{version or program}; what it compiles runs")


def _try_compilers(
    cc: Sequence[str], cxx: Sequence[str], interpreter: str, env: Mapping[str, str], scratch: Path
) -> str:
    """ "" when program and library both work, else what went wrong in one line."""
    source, object_file, program, library = (str(scratch / name) for name in ("a.cpp", "a.o", "a.out", "a.so"))
    Path(source).write_text(SOURCE)
    flags = ("-std=c++17", "-O1", "-fPIC")
    for what, seconds, argv in (
        ("compiling a program", COMPILE_SECONDS, [*cxx, *flags, source, "-o", program]),
        ("running the program that was compiled", COMPILE_SECONDS, [program]),
        ("compiling a library", COMPILE_SECONDS, [*cc, *flags, "-DDSABISECT_LIBRARY", "-c", source, "-o", object_file]),
        ("linking a library", COMPILE_SECONDS, [*cxx, "-shared", object_file, "-o", library]),
        ("calling the library beside torch", IMPORT_SECONDS, [interpreter, "-c", LOAD, library]),
    ):
        ran = _child(argv, env, seconds)
        if ran.code != 0:
            return f"{what}: {ran.ending}"
    return ""


# ---- deep_gemm ---------------------------------------------------------------------------------------------

DEEP_GEMM = """
import importlib.util, json, sys
def tell(**told):
    print("%s" + json.dumps(told), flush=True)
def selftest():  # brings torch, so only when it is needed
    sys.path.insert(0, sys.argv[1])
    from dsabisect.candidate import selftest
    return selftest
if importlib.util.find_spec("deep_gemm") is None:
    tell(absent=True)
    sys.exit()
try:
    import deep_gemm
    told = dict(file=str(deep_gemm.__file__), version=str(getattr(deep_gemm, "__version__", "?")))
    if sys.argv[2]:
        found = selftest().check_deep_gemm(deep_gemm, sys.argv[2])
        told["worst"] = max(v for k, v in found.items() if k.startswith(("paged", "ragged")))
    tell(**told)
except Exception as error:
    harness = hasattr(error, "remedy")  # a HarnessFault
    tell(error=str(error) if harness else selftest().one_line(error),
         remedy=error.remedy if harness else selftest().remedy(error))
""".replace("%s", MARK)


def deep_gemm_line(interpreter: str, env: Mapping[str, str], device: str) -> Line:
    """Import it and run its kernels on known numbers on ``device`` ("" = import only).

    Some wheels import and then misread every tensor. Without a device nothing about deep_gemm is a fault.
    """
    name, use = "deep_gemm", "sglang's paths on a GPU need it"
    with tempfile.TemporaryDirectory(prefix="dsabisect-doctor-") as scratch:
        private = {**env, "DG_JIT_CACHE_DIR": scratch, "DG_CACHE_DIR": scratch}
        argv = [interpreter, "-c", DEEP_GEMM, str(PACKAGE_ROOT), device]
        ran = _child(argv, private, KERNEL_SECONDS if device else IMPORT_SECONDS, cwd=scratch)
    told = ran.told
    bad = FAULT if device else WARNING
    if told is None:
        remedy = f"Install one made for this torch: pip install sgl-deep-gemm==VERSION ({FULL_WHEELS})"
        return Line(name=name, status=bad, found=f"importing or calling it {ran.ending}", remedy=remedy)
    if told.get("absent"):
        return Line(name=name, status=WARNING, found="not installed", remedy=f"pip install sgl-deep-gemm: {use}")
    if "error" in told:
        remedy = told["remedy"] if device else f"{told['remedy']}. Not needed without a GPU"
        return Line(name=name, status=bad, found=told["error"], remedy=remedy)
    right = f", right to {told['worst']:.1e} on known numbers" if "worst" in told else ", its kernels not tried: no GPU"
    return Line(name=name, status=OK, found=f"{told['version']} ({told['file']}){right}")


# ---- folders and goldens -----------------------------------------------------------------------------------


def _folders(cache: Path | None) -> list[Line]:
    try:
        folder = cache or store.work_root()
    except DsabisectError as error:
        return [_error_line("cache folder", error)]
    return [_cache(folder), _disk(folder)]


def _cache(folder: Path) -> Line:
    remedy = "Set DSABISECT_CACHE to a folder that can be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as scratch:
            first, second = Path(scratch) / "a", Path(scratch) / "b"
            first.write_bytes(b"x" * 4096)
            os.replace(first, second)
            second.chmod(0o700)
    except OSError as error:
        return Line(name="cache folder", status=FAULT, found=f"{folder}: {error.strerror or error}", remedy=remedy)
    return Line(name="cache folder", status=OK, found=f"{folder} can be written")


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


# ---- children ----------------------------------------------------------------------------------------------


def _own_environment() -> dict[str, str]:
    """Ours, without what would make a child's git look elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def _child(argv: Sequence[str], env: Mapping[str, str], seconds: float, cwd: str = "/") -> _Ran:
    """Run to its end in a process group of its own; on a timeout the whole group is killed.

    Not in the folder that we stand in: its files would come before installed modules.
    """
    try:
        child = subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return _Ran(code=None, trouble=f"cannot be started ({error.strerror or error})")
    code: int | None
    trouble = ""
    try:
        output, _ = child.communicate(timeout=seconds)
        code = child.returncode
    except subprocess.TimeoutExpired:
        _kill(child)
        output, code, trouble = child.communicate()[0], None, f"did not end within {seconds:g} s"
    except BaseException:
        _kill(child)
        child.wait()
        raise
    return _Ran(code=code, output=output.decode(errors="replace"), trouble=trouble)


def _kill(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
