"""What the facts about a failure mean: the candidate's, the probe's, or the machine's. Pure; strings in, values out.

A signature survives line numbers, addresses, sizes and folders, so that the same failure at two commits has one name.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dsabisect.model import Failure

SIGNATURE_CHARACTERS = 240
MESSAGE_CHARACTERS = 2000
TRACEBACK_FRAMES = 8


class Origin(str, Enum):
    """Whose failure it is."""

    CANDIDATE = "candidate"
    CANDIDATE_CRASH = "candidate_crash"  # the CUDA context is lost: the process is as good as dead
    CANDIDATE_MEMORY = "candidate_memory"
    ABSENT = "absent"
    NOT_EXERCISED = "not_exercised"
    HARNESS = "harness"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, kw_only=True)
class Judged:
    origin: Origin
    failure: Failure
    remedy: str = ""


# The CUDA context is gone after these (CUDA Runtime API, "Error types": "leaves the process in an inconsistent state").
_CONTEXT_LOST = re.compile(
    r"illegal memory access|misaligned address|illegal instruction|unspecified launch failure|device-side assert"
    r"|invalid program counter|invalid address space|hardware stack error|launch timed out|ILLEGAL_ADDRESS"
    r"|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|LAUNCH_FAILED|CUDA_ERROR_ASSERT|cudaErrorIllegalAddress",
    re.IGNORECASE,
)
_DEVICE_GONE = re.compile(
    r"no CUDA-capable device|Found no NVIDIA driver|driver version is insufficient|uncorrectable ECC"
    r"|devices? .{0,30}busy or unavailable|CUDA unknown error|system not yet initialized|GPU is lost|fallen off the bus"
    r"|NVIDIA driver on your system is too old|Cannot re-initialize CUDA in forked subprocess",
    re.IGNORECASE,
)
_MEMORY_TYPES = ("MemoryError", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
_MEMORY_TEXT = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough)|CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY", re.IGNORECASE
)
_MACHINE_ERRNO = {28: "no space left on device", 122: "disk quota exceeded", 23: "too many open files on the machine"}
_COMPILING = re.compile(r"compil|nvcc|nvrtc|ninja|cicc|ptxas|exit_code|return_code", re.IGNORECASE)


def judge(facts: Mapping[str, Any], *, phase: str, checkout: Path, log: str = "") -> Judged:
    """Whose failure the facts of :func:`dsabisect.candidate.cells.facts` are. ``log``: what was printed meanwhile."""
    failure = failure_of(facts, checkout, log)
    origin, remedy = _origin(facts, phase, checkout)
    return Judged(origin=origin, failure=failure, remedy=remedy)


def _origin(facts: Mapping[str, Any], phase: str, checkout: Path) -> tuple[Origin, str]:
    text, kind = facts["message"], facts["kind"]
    if kind in ("absent", "not_exercised", "harness"):
        return Origin(kind), facts["remedy"]
    if _DEVICE_GONE.search(text):
        return Origin.ENVIRONMENT, "Check the GPU with `nvidia-smi` and `dsabisect doctor`, then --resume"
    if facts["errno"] in _MACHINE_ERRNO:
        return Origin.ENVIRONMENT, f"{_MACHINE_ERRNO[facts['errno']].capitalize()}: make room, then --resume"
    if _CONTEXT_LOST.search(text):  # reported late and anywhere, also by the probe's own copy to the CPU
        return Origin.CANDIDATE_CRASH, ""
    if facts["type"] in _MEMORY_TYPES or _MEMORY_TEXT.search(text):
        return _memory(facts)
    if facts["foreign_import"] and kind != "blocked":
        name = facts["foreign_import"]
        return Origin.HARNESS, f"Install the module {name!r} for its interpreter, or stand in for it in the probe"
    if phase in ("probe", "load", "outputs", "write"):
        return Origin.HARNESS, ""
    if facts["inside"] or _names_own_file(text, checkout):
        return Origin.CANDIDATE, ""
    return Origin.HARNESS, ""


def _memory(facts: Mapping[str, Any]) -> tuple[Origin, str]:
    """Of the device: the environment's when others hold more of it than a context needs (2 GiB, or a tenth)."""
    device = facts["device_memory"]
    if device:
        others = device["total"] - device["free"] - device["reserved"]
        if others > max(2 << 30, device["total"] // 10):
            return (
                Origin.ENVIRONMENT,
                f"Other processes hold {others >> 20} MiB of the GPU: wait for them, then --resume",
            )
    return Origin.CANDIDATE_MEMORY, ""


def _names_own_file(message: str, checkout: Path) -> bool:
    """Does the message name a source file of the checkout, as C++ assertions do ("csrc/apis/attention.hpp:148")?"""
    for name in re.findall(r"[\w./+-]+\.(?:cpp|cc|cu|cuh|hpp|h|py)\b", message):
        path = Path(name)
        if path.is_absolute() and path.is_relative_to(checkout):
            return True
        if not path.is_absolute() and "/" in name and ".." not in path.parts and (checkout / path).is_file():
            return True
    return False


# ---- failures and signatures -------------------------------------------------------------------------------


def failure_of(facts: Mapping[str, Any], checkout: Path, log: str = "") -> Failure:
    """The failure of an exception; a failed compilation takes its first error line from the log."""
    message, shown = _relative(facts["message"], checkout), facts["message"]
    if _COMPILING.search(message):
        told = compiler_error(message)
        line = told or compiler_error(log)
        message += f"\n{_relative(line, checkout)}" if line and not told else ""
        shown = f"{first_line(shown)} | {line}" if line and line != first_line(shown) else shown
    frames = [f for f in facts["frames"] if not _ours(f[0])] or facts["frames"]
    lines = [f"{_relative(str(f[0]), checkout)}:{f[1]} in {f[2]}" for f in frames[-TRACEBACK_FRAMES:]]
    return Failure(
        type=facts["type"],
        message=message[:MESSAGE_CHARACTERS],
        signature=signature(facts["type"], shown),
        traceback="\n".join(lines),
    )


def _ours(file: str) -> bool:
    return file.endswith(
        ("/dsabisect/candidate/cells.py", "/dsabisect/candidate/probes/__init__.py")
    ) or file.startswith("<frozen")


def _relative(text: str, checkout: Path) -> str:
    for root in {str(checkout), str(checkout.resolve())}:
        text = text.replace(root + "/", "")
    return text


def first_line(text: str) -> str:
    """The first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def plain(kind: str, message: str) -> Failure:
    """A failure that no exception tells of."""
    return Failure(type=kind, message=message, signature=signature(kind, message))


def signature(type_name: str, message: str) -> str:
    """``type: first line`` with paths → file names, addresses → X, numbers → N; quotes kept, spaces folded.

    >>> signature("RuntimeError", "size of tensor a (6) must match\\nmore")
    'RuntimeError: size of tensor a (N) must match'
    >>> signature("", "/tmp/x1/csrc/a.cu(12): error: bad 'T2' at 0x7f00")
    "a.cu(N): error: bad 'TN' at X"
    """
    text = first_line(message)
    text = re.sub(r"(?:[\w.+~-]*/)+([\w.+~-]+)", r"\1", text)
    text = re.sub(r"0x[0-9a-fA-F]+|\b[0-9a-f]{12,}\b", "X", text)
    text = re.sub(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", "N", text)
    text = re.sub(r"\s+", " ", text).strip()
    whole = f"{type_name}: {text}" if type_name and text else type_name or text
    return whole[:SIGNATURE_CHARACTERS]


_COMPILER_LINE = re.compile(
    r"(?::\d+(?::\d+)?|\(\d+\)): (?:fatal )?(?:catastrophic )?error\b|^\s*error(?: #\d+)?:|\bfatal error:"
    r"|undefined reference to|CMake Error|^ld(?:\.\w+)?: |ptxas (?:fatal|error)|static assertion failed",
    re.IGNORECASE,
)
_PYTHON_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure)\b(?:: .*)?$")
_ABORT_LINE = re.compile(
    r"terminate called|^\s*what\(\):|Assertion.*failed|^Fatal Python error|free\(\)|malloc\(\)|stack smashing"
)


def compiler_error(log: str) -> str:
    """The first line of a compiler's or linker's error, or ""."""
    return next((line.strip() for line in log.splitlines() if _COMPILER_LINE.search(line)), "")


def first_error(log: str) -> str:
    """The line of a build log that says why: a compiler's first, else Python's last exception, else the last line."""
    if line := compiler_error(log):
        return line
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    raised = [line for line in lines if _PYTHON_LINE.match(line)]
    return raised[-1] if raised else lines[-1] if lines else ""


def crash(status: int, log: str, checkout: Path, stack: str = "") -> Failure:
    """A process that ended without a result: by a signal, or by an exit of its own. ``stack``: faulthandler's words."""
    if os.WIFSIGNALED(status):
        name = _signal_name(os.WTERMSIG(status))
        said = next((line.strip() for line in log.splitlines() if _ABORT_LINE.search(line)), "")
        message = f"ended by {name}" + (f": {_relative(said, checkout)}" if said else "")
        where = said if said and not said.startswith("Fatal Python error") else ""
        return Failure(
            type=name, message=message, signature=signature(name, where), traceback=short_stack(stack, checkout)
        )
    message = f"exited {os.WEXITSTATUS(status)} without a result"
    return Failure(
        type="Exited", message=message, signature=f"Exited: {message}", traceback=short_stack(stack, checkout)
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def short_stack(stack: str, checkout: Path) -> str:
    """Frames of the current thread in faulthandler's words, outermost first as elsewhere, ours left out."""
    thread = re.search(r"^Current thread .*\n((?:  .*\n?)*)", stack, re.MULTILINE)
    found = re.findall(r'^  File "([^"]+)", line (\d+) in (.+)$', thread[1] if thread else stack, re.MULTILINE)
    named = [
        (_relative(file, checkout), line, name) for file, line, name in found if "/dsabisect/candidate/" not in file
    ]
    return "\n".join(f"{file}:{line} in {name}" for file, line, name in reversed(named[:TRACEBACK_FRAMES]))


# ---- builds ------------------------------------------------------------------------------------------------

_BUILD_MACHINE = re.compile(
    r"No space left on device|Killed signal terminated program|Cannot allocate memory|virtual memory exhausted"
    r"|(?:CUDA_HOME|CUDA_PATH) environment variable is not set"
    r"|(?:nvcc|gcc|g\+\+|cc|c\+\+|ninja|cmake)['\"]?: (?:command )?not found"
    r"|No such file or directory: '[^']*(?:nvcc|gcc|g\+\+|ninja|cmake)'"
    r"|command '[^']*' failed: No such file or directory|Ninja is required"
    r"|No module named '(?:torch|setuptools|pybind11|numpy|wheel)'"
)


def build_is_machine(log: str) -> str:
    """The line that shows that the machine, not the commit, kept a build from working; "" when there is none."""
    return next((line.strip() for line in log.splitlines() if _BUILD_MACHINE.search(line)), "")
