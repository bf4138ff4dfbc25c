"""The environment variables of a candidate's process: an allow-list, fixed values, and private folders for caches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "TZ", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH",
    "LD_LIBRARY_PATH", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS",
    "OMP_NUM_THREADS", "PYTHONPATH",
)  # fmt: skip
FIXED = {
    "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_MODULE_LOADING": "LAZY",
}  # fmt: skip
# A JIT cache shared between two commits would answer with the other one's kernel.
CACHES = {
    "TRITON_CACHE_DIR": "triton", "TRITON_HOME": "triton-home",
    "DG_JIT_CACHE_DIR": "deep_gemm", "DG_CACHE_DIR": "deep_gemm",
    "SGLANG_DG_CACHE_DIR": "deep_gemm", "SGL_DG_CACHE_DIR": "deep_gemm", "SGLANG_CACHE_DIR": "sglang",
    "TVM_FFI_CACHE_DIR": "tvm-ffi", "TORCH_EXTENSIONS_DIR": "torch-extensions", "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "PYTORCH_KERNEL_CACHE_PATH": "jiterator", "CUDA_CACHE_PATH": "cuda", "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang", "CUTE_DSL_CACHE_DIR": "cute-dsl", "NUMBA_CACHE_DIR": "numba",
}  # fmt: skip
PLACES = {
    "HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "data",
}  # fmt: skip
# Read when torch is loaded, so that a zygote that already has it comes too late for another value.
EARLY = ("TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "ATEN_", "LD_", "PYTHON")


def base(interpreter: str, build_env: Mapping[str, str]) -> dict[str, str]:
    """What passes from our own environment and nothing else: a candidate must not depend on who runs it."""
    passed = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
    own = os.path.dirname(os.path.abspath(shutil.which(interpreter) or interpreter))
    places = passed.get("PATH", os.defpath).split(os.pathsep)
    passed["PATH"] = os.pathsep.join(places if own in places else [own, *places])  # ninja lives beside the interpreter
    entries = [entry for entry in passed.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    if entries:  # a torch that was installed with --target is found by it
        passed["PYTHONPATH"] = os.pathsep.join(entries)
    return {**FIXED, **passed, **build_env}


def early(env: Mapping[str, str]) -> dict[str, str]:
    """The part of ``env`` that must be set before torch is loaded."""
    return {name: value for name, value in env.items() if name.startswith(EARLY) and name not in CACHES}


def private(scratch: Path, caches: Path) -> dict[str, str]:
    """HOME, TMPDIR and the like below ``scratch``, JIT caches below ``caches``; all of these folders are made."""
    folders = {name: scratch / place for name, place in PLACES.items()}
    folders |= {name: caches / place for name, place in CACHES.items()}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    return {name: str(folder) for name, folder in folders.items()}


def caches_of(names: Iterable[str], root: Path) -> dict[str, str]:
    """The cache variables ``names`` with folders below ``root``, which are made."""
    folders = {name: root / CACHES[name] for name in names}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    return {name: str(folder) for name, folder in folders.items()}
