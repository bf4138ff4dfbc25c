"""One commit of sglang, loaded: its indexer and backend modules in our surroundings, with its kernel calls watched.

Watching never replaces: each watched function is called with what it was given, and what it returns or raises passes
through.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from dsabisect.candidate import emulated_deep_gemm, selftest
from dsabisect.candidate import sglang_surroundings as surroundings
from dsabisect.candidate.probes import Absent, HarnessFault
from dsabisect.candidate.sglang_cpu import exact_interpreter, mm_with_out_dtype
from dsabisect.candidate.sglang_finder import Finder, Record

ATTENTION = "sglang.srt.layers.attention"
GENERATIONS = ("dsa", "nsa")  # nsa_* was renamed dsa_* on 2026-05-20; thin shims of the old name stay behind
DEEP_GEMM = ("fp8_paged_mqa_logits", "fp8_mqa_logits", "get_paged_mqa_logits_metadata")
WATCHED_HOMES = ("sglang.jit_kernel", "sglang.kernels.ops.attention.dsa")
OWN_WATCHED = ("rotate_activation", "fused_store_index_k_cache")


@dataclass
class Calls:
    """What the candidate called, in order, since the last ``clear``."""

    names: list[str] = field(default_factory=list)
    lens: list[torch.Tensor] = field(default_factory=list)  # of get_paged_mqa_logits_metadata
    drafts: list[int] = field(default_factory=list)  # next_n of each fp8_paged_mqa_logits

    def clear(self) -> None:
        self.names.clear()
        self.lens.clear()
        self.drafts.clear()

    def told(self) -> str:
        return ",".join(dict.fromkeys(self.names))

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        self.names.append(name)
        if name == "get_paged_mqa_logits_metadata" and args:
            self.lens.append(args[0].detach().clone())
        if name == "fp8_paged_mqa_logits" and args:
            self.drafts.append(int(args[0].shape[1]))


def watched(name: str, function: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def watching(*args: Any, **kwargs: Any) -> Any:
        calls.note(name, args)
        return function(*args, **kwargs)

    return watching


class WatchedModule(ModuleType):
    """``deep_gemm`` with three of its functions watched and all else as it is."""

    def __init__(self, module: ModuleType, calls: Calls) -> None:
        super().__init__("deep_gemm")
        self.__dict__["_module"] = module
        for name in ("__file__", "__path__", "__version__"):
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))
        self.__spec__ = module.__spec__
        for name in DEEP_GEMM:
            if hasattr(module, name):
                setattr(self, name, watched(name, getattr(module, name), calls))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class Loaded:
    """The modules of one commit for one (arch, deep_gemm) pair."""

    def __init__(self, *, checkout: Path, device: str, arch: str, deep_gemm: str, real_deep_gemm: Any = None) -> None:
        self.checkout, self.device, self.arch, self.deep_gemm = checkout, device, arch, deep_gemm
        self.calls, self.record = Calls(), Record()
        self.scene = surroundings.Scene(device=device, arch=arch)
        self.generation = generation(checkout)
        on_cpu = device == "cpu"
        instead = {**surroundings.einops(), **(surroundings.only_on_cpu() if on_cpu else {})}
        blocked = ["deep_gemm"] if deep_gemm == "missing" else []
        finder = Finder(
            checkout, {**surroundings.honest(self.scene), **instead}, self.record, blocked=blocked,
            gpu_only=["tvm_ffi"] if on_cpu else [], instead=instead,
        )  # fmt: skip
        finder.install()
        if deep_gemm != "missing":
            module = emulated_deep_gemm if on_cpu else real_deep_gemm
            self.configure()
            # its submodules stay: a compiled extension must not be loaded twice
            sys.modules["deep_gemm"] = WatchedModule(module, self.calls)
        if on_cpu:
            self.record.modules |= {mm_with_out_dtype(), exact_interpreter()} - {""}
        self._indexer: ModuleType | None = None
        self._backend: ModuleType | None = None

    def configure(self, *, any_next_n: bool = False) -> None:
        """Tell the emulated deep_gemm which arch to be; the real one is what it is."""
        if self.device == "cpu" and self.deep_gemm != "missing":
            arch = self.arch if self.arch in ("sm90", "sm100") else "sm90"
            emulated_deep_gemm.configure(arch="sm100" if any_next_n else arch)

    @property
    def indexer(self) -> ModuleType:
        """The module of the indexer, its kernels watched."""
        if self._indexer is None:
            name = f"{ATTENTION}.{self.generation}.{self.generation}_indexer"
            self._indexer = importlib.import_module(name)
            self._watch(self._indexer)
        return self._indexer

    @property
    def backend(self) -> ModuleType:
        if self._backend is None:
            self._backend = importlib.import_module(f"{ATTENTION}.{self.generation}_backend")
        return self._backend

    @property
    def backend_class(self) -> Any:
        for name in ("DeepseekSparseAttnBackend", "NativeSparseAttnBackend"):
            if hasattr(self.backend, name):
                return getattr(self.backend, name)
        raise Absent("this commit has no DSA attention backend class that we know")

    def accessor(self) -> Any:
        """The candidate's own index_buf_accessor, where it lives at this commit."""
        for package in ("sglang.kernels.ops.attention.dsa", f"{ATTENTION}.{self.generation}"):
            if (self.checkout / "python" / package.replace(".", "/") / "index_buf_accessor.py").is_file():
                return importlib.import_module(f"{package}.index_buf_accessor")
        raise HarnessFault(
            "the checkout has no index_buf_accessor.py", remedy="Find where it went, and name that in sglang_loaded.py"
        )

    def _watch(self, module: ModuleType) -> None:
        for name, value in list(vars(module).items()):
            home = getattr(value, "__module__", None) or ""
            known = name in OWN_WATCHED or home.startswith(WATCHED_HOMES)
            if isinstance(value, FunctionType) and known:
                setattr(module, name, watched(name, value, self.calls))

    def swallowed(self) -> None:
        """Raise the first fault of a stand-in that the candidate caught: what it did next was not its own choice."""
        if self.record.faults:
            raise self.record.faults[0]


def generation(checkout: Path) -> str:
    """ "dsa" or "nsa": the package that holds the real indexer."""
    home = checkout / "python" / ATTENTION.replace(".", "/")
    for name in GENERATIONS:
        if (home / name / f"{name}_indexer.py").is_file():
            return name
    raise Absent("this commit has no DSA indexer")


def trusted_deep_gemm(device: str) -> tuple[Any, Mapping[str, Any]]:
    """The installed deep_gemm, after its self-test on known numbers.

    Raises:
        HarnessFault: it is missing, cannot be loaded, or misreads tensors.
    """
    try:
        module = importlib.import_module("deep_gemm")
    except Exception as error:
        raise HarnessFault(
            f"deep_gemm cannot be imported: {selftest.one_line(error)}",
            remedy="pip install sgl-deep-gemm" if isinstance(error, ModuleNotFoundError) else selftest.remedy(error),
        ) from error
    return module, selftest.check_deep_gemm(module, device)
