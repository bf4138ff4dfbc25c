"""A meta-path finder that runs a few modules of an sglang checkout for real and stands in for all the others.

sglang's packages import each other's whole world on first touch. Here `sglang`, `sglang.srt` and the like are bare
packages that point into the checkout, the DSA modules, `sglang.srt.environ` and the JIT kernels are executed for real,
and every other `sglang.*`, `sgl_kernel`, `flashinfer` and `aiter` module is a permissive stand-in: any name can be
imported from it, called, subclassed and used as a decorator, but it can never become a number, a truth value or a
tensor. Trying that raises a fault of the harness that names the stand-in, and is remembered even when the candidate
swallows it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch

from dsabisect.candidate.probes import BlockedImport, HarnessFault, NotExercised

ROOTS = ("sglang", "sgl_kernel", "flashinfer", "aiter")
# packages whose own __init__ is not run
BARE = (
    "sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention", "sglang.srt.layers.attention.dsa",
    "sglang.srt.layers.attention.nsa", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention",
    "sglang.kernels.ops.attention.dsa", "sglang.jit_kernel", "sglang.srt.layers.attention.triton_ops",
)  # fmt: skip
# executed for real, with everything below them
REAL = (
    "sglang.srt.layers.attention.dsa", "sglang.srt.layers.attention.dsa_backend", "sglang.srt.layers.attention.nsa",
    "sglang.srt.layers.attention.nsa_backend", "sglang.srt.environ", "sglang.jit_kernel",
    "sglang.kernels.ops.attention.dsa", "sglang.kernels.ops.attention.dsa_metadata",
    "sglang.srt.layers.attention.triton_ops.dsa_metadata",
)  # fmt: skip
# of those, what neither indexer nor metadata computes with, and what drags in packages of its own
NOT_REAL = (
    "sglang.jit_kernel.flash_attention", "sglang.jit_kernel.flash_attention_v3", "sglang.jit_kernel.flash_attention_v4",
    "sglang.jit_kernel.flash_attn", "sglang.jit_kernel.diffusion",
)  # fmt: skip
# asked of a machine or a mode that is not there: the answer is no
QUESTION = re.compile(r"^(is|has|can|should|use|uses|supports?|enable)_[a-z]")
LISTED = 80  # names in stood_in


class MissingSurrounding(HarnessFault, AttributeError):
    """The candidate reads an attribute that our surroundings do not have. ``hasattr`` and ``getattr`` may ask."""


class NeedsGpu(NotExercised, ImportError):
    """A module that compiles CUDA kernels was imported on a CPU. Code that asks whether it is there gets a no."""


class Record:
    """What was stood in for, which questions were answered with no, and faults that may have been swallowed."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.noes: set[str] = set()
        self.faults: list[HarnessFault] = []

    def stood_in(self) -> tuple[str, ...]:
        names = sorted(self.modules) + sorted(f"{name}() → False" for name in self.noes)
        return tuple(names[:LISTED]) + ((f"and {len(names) - LISTED} more",) if len(names) > LISTED else ())

    def misused(self, name: str, how: str) -> NoReturn:
        fault = HarnessFault(
            f"the stand-in for {name} was used as {how}",
            remedy="Give it an honest version in dsabisect/candidate/sglang_surroundings.py",
        )
        self.faults.append(fault)
        raise fault


class StandIn:
    """Anything of a module that is not run: may be named, called, subclassed, entered; never computed with."""

    __slots__ = ("_name", "_record")

    def __init__(self, name: str, record: Record) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_record", record)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}", self._record)

    def __setattr__(self, name: str, value: Any) -> None:
        self._record.misused(self._name, f"a place to keep {name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            self._record.misused(self._name, "a function of tensors")  # it may be one that fills its arguments
        if QUESTION.match(self._name.rpartition(".")[2]):
            self._record.noes.add(self._name)
            return False
        if len(args) == 1 and not kwargs and isinstance(args[0], (FunctionType, type)):
            return args[0]  # as a decorator
        return StandIn(f"{self._name}()", self._record)

    def __getitem__(self, key: Any) -> Any:
        return StandIn(f"{self._name}[…]", self._record)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StandIn):
            self._record.misused(self._name, "one side of a comparison")
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, StandIn)]
        if not found:
            raise HarnessFault(f"a stand-in was used as a tensor in {getattr(func, '__name__', func)}")
        found[0]._record.misused(found[0]._name, f"a tensor in {getattr(func, '__name__', func)}")


def _refuse(how: str) -> Any:
    def method(self: StandIn, *_: Any) -> Any:
        self._record.misused(self._name, how)

    return method


for _method, _how in (
    ("bool", "a truth value"), ("int", "a number"), ("float", "a number"), ("index", "a number"), ("len", "a sequence"),
    ("iter", "a sequence"), ("contains", "a container"), ("setitem", "a container"), ("lt", "a number"),
    ("le", "a number"), ("gt", "a number"), ("ge", "a number"), ("add", "a number"), ("radd", "a number"),
    ("sub", "a number"), ("rsub", "a number"), ("mul", "a number"), ("rmul", "a number"), ("truediv", "a number"),
    ("rtruediv", "a number"), ("floordiv", "a number"), ("rfloordiv", "a number"), ("mod", "a number"),
    ("rmod", "a number"), ("pow", "a number"), ("rpow", "a number"), ("neg", "a number"), ("matmul", "a tensor"),
    ("rmatmul", "a tensor"), ("array", "an array"),
):  # fmt: skip
    setattr(StandIn, f"__{_method}__", _refuse(_how))


class _StandInModule(ModuleType):
    """A module that has every name. Honest ones first."""

    def __init__(self, name: str, honest: Mapping[str, Any], record: Record) -> None:
        super().__init__(name)
        self.__dict__.update(honest)
        self.__dict__["_record"] = record
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = StandIn(f"{self.__name__}.{name}", self.__dict__["_record"])
        setattr(self, name, value)
        return value


class _StandInLoader:
    def __init__(self, honest: Mapping[str, Any], record: Record) -> None:
        self.honest, self.record = honest, record

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.record.modules.add(spec.name)
        return _StandInModule(spec.name, self.honest, self.record)

    def exec_module(self, module: ModuleType) -> None:
        return None


class _BareLoader:
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        return None


class Finder:
    """Decides for every import below :data:`ROOTS`, and blocks what is to be missing.

    ``honest``: module name → names that our surroundings really implement. ``blocked``: modules that raise
    :class:`BlockedImport`; ``gpu_only``: packages whose import means that something needs a GPU. ``instead``: modules
    that are replaced as a whole (an honest torch version of a kernel file).
    """

    def __init__(
        self,
        checkout: Path,
        honest: Mapping[str, Mapping[str, Any]],
        record: Record,
        *,
        blocked: Iterable[str] = (),
        gpu_only: Iterable[str] = (),
        instead: Iterable[str] = (),
    ) -> None:
        self.python = Path(os.path.realpath(checkout)) / "python"
        self.honest, self.record = honest, record
        self.blocked, self.gpu_only, self.instead = frozenset(blocked), frozenset(gpu_only), frozenset(instead)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = name.partition(".")[0]
        if root in self.gpu_only:
            raise NeedsGpu(f"a CUDA kernel is compiled here ({name}): it needs a GPU")
        if root in self.blocked or name in self.blocked:
            raise BlockedImport(f"No module named {name!r} (blocked on purpose)", name=name)
        if root not in ROOTS and name not in self.instead:
            return None
        if name in self.instead or not (name in BARE or _below(name, REAL)) or _below(name, NOT_REAL):
            honest = self.honest.get(name, {})
            return ModuleSpec(name, _StandInLoader(honest, self.record), is_package=True)  # type: ignore[arg-type]
        return self._real(name)

    def _real(self, name: str) -> ModuleSpec | None:
        place = self.python.joinpath(*name.split("."))
        if name in BARE and place.is_dir():
            # an origin too: code of the candidate asks find_spec for it to learn where its own files are
            spec = ModuleSpec(name, _BareLoader(), is_package=True, origin=str(place / "__init__.py"))  # type: ignore[arg-type]
            spec.submodule_search_locations = [str(place)]
            return spec
        if (place / "__init__.py").is_file():
            return importlib.util.spec_from_file_location(
                name, place / "__init__.py", submodule_search_locations=[str(place)]
            )
        file = place.with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None

    def install(self) -> None:
        """Come first in sys.meta_path, alone of our kind, and forget what an earlier one has loaded."""
        sys.meta_path[:] = [self, *(f for f in sys.meta_path if not isinstance(f, Finder))]
        forget((*ROOTS, *self.blocked, *self.gpu_only, *self.instead))


def forget(roots: Iterable[str]) -> None:
    """Drop loaded modules of these names and below."""
    wanted = set(roots)
    for name in [n for n in sys.modules if n in wanted or n.partition(".")[0] in wanted]:
        del sys.modules[name]


def _below(name: str, places: Iterable[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)
