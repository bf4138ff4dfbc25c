"""What the candidate's interpreter and device are, measured in a child that may touch the device."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

ABSENT = "absent"
DEEP_GEMM_WHEELS = ("deep_gemm", "sgl-deep-gemm")  # both install the module `deep_gemm`


def environment(device: str) -> dict[str, Any]:
    """``{"facts": {...}}``, or ``{"fault": text, "remedy": text}`` when the device cannot be used.

    ``uuid`` stands beside the facts, not among them: which of several equal cards it is decides no result.
    """
    import torch

    facts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or "none"),
        "triton": version("triton"),
        "numpy": version("numpy"),
        "deep_gemm": deep_gemm(),
        "threads": str(torch.get_num_threads()),
    }
    if device == "cpu":
        return {"facts": {**facts, "driver": "none", "device_name": _processor(), "arch": "cpu"}}
    return _cuda(facts, int(device.partition(":")[2]))


def _cuda(facts: dict[str, str], index: int) -> dict[str, Any]:
    import torch

    remedy = "Choose --device cpu, or a machine, driver and torch that can use it (`nvidia-smi`, `dsabisect doctor`)"
    if not torch.version.cuda:
        return {"fault": f"torch {torch.__version__} is built without CUDA", "remedy": remedy}
    try:
        count = torch.cuda.device_count()
        if index >= count:
            there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0" if count else "none"
            return {"fault": f"no device cuda:{index}; there is {there}", "remedy": remedy}
        found = torch.cuda.get_device_properties(index)
        torch.zeros(1, device=f"cuda:{index}").cpu()  # a driver that lists a device may still refuse to use it
    except Exception as error:
        return {"fault": f"cuda:{index} cannot be used: {error}".splitlines()[0], "remedy": remedy}
    arch = f"sm{found.major}{found.minor}"
    facts = {**facts, "driver": _driver(), "device_name": found.name, "arch": arch}
    return {"facts": facts, "uuid": str(getattr(found, "uuid", ""))}


def version(name: str) -> str:
    """Version of an installed distribution, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ABSENT


def deep_gemm() -> str:
    """``version sha256:…`` over the files of the module ``deep_gemm``, which is not imported."""
    spec = importlib.util.find_spec("deep_gemm")
    if spec is None:
        return ABSENT
    places = list(spec.submodule_search_locations or [])
    files = [
        f for place in places for f in sorted(Path(place).rglob("*")) if f.is_file() and "__pycache__" not in f.parts
    ]
    total = hashlib.sha256()
    for file in files or [Path(str(spec.origin))]:
        total.update(file.name.encode() + b"\0")
        total.update(hashlib.sha256(file.read_bytes()).digest())
    known = [v for v in map(version, DEEP_GEMM_WHEELS) if v != ABSENT]
    return f"{known[0] if known else 'unknown'} sha256:{total.hexdigest()[:32]}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.machine()


def _driver() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[1]
    import torch

    return (
        f"CUDA API {getattr(torch._C, '_cuda_getDriverVersion', lambda: os.environ.get('CUDA_VERSION', 'unknown'))()}"
    )
