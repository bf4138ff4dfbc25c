"""The seam: what a repository must say about itself so that its indexer can be measured. Host side; no torch.

A target is a module (or any object) that satisfies :class:`Target`, plus a probe module that runs inside the
candidate's process (see :mod:`dsabisect.candidate.probes`). A new target is two files and one registry line, or an
entry point in the group ``dsabisect.targets``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dsabisect.errors import UsageError
from dsabisect.model import Case, Device, PathSpec

Read = Callable[[str], "bytes | None"]  # path inside the commit → its bytes, None when it is not there


@dataclass(frozen=True, kw_only=True)
class BuildStep:
    """One command of a build recipe, run inside the checkout, in its own process group."""

    argv: tuple[str, ...]
    title: str
    env: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What a recipe may depend on."""

    checkout: Path
    device: Device
    interpreter: str
    submodules: Mapping[str, Path]  # submodule path inside the checkout → folder that holds its files
    build_env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A file of which only a part can change an answer: most commits that touch it are no business of the indexer's."""

    path: str
    distil: Callable[[bytes, Collection[bytes]], bytes]  # its content, those of the other relevant files → what counts
    flags: Callable[[bytes, Collection[bytes]], Mapping[str, str]]  # the same → flag: its default, as written


@dataclass(frozen=True, kw_only=True)
class GateSource:
    """Where a path's switch is read in the source, and what a facet is called in the constructor there.

    A target may have ``GATES``, a tuple of these; without it no source gate is proposed for it.
    """

    path: str  # name of the path
    files: tuple[str, ...]  # the first that is there is taken
    switch: str  # `_use_fusion` or `config.USE_FUSION`
    arguments: Mapping[str, Mapping[str, str]]  # facet → its value → expression over arguments of `__init__`


@runtime_checkable
class Target(Protocol):
    """Everything that differs between repositories. Plain data and pure functions; no I/O but in ``prepare``."""

    NAME: str
    TITLE: str
    PROBE: str  # module that runs in the candidate's process, e.g. "dsabisect.candidate.probes.sglang"
    PATHS: tuple[PathSpec, ...]
    DEFAULT_PATHS: tuple[str, ...]  # measured when no --path is given
    RELEVANT: tuple[str, ...]  # git pathspecs: a commit that touches none of them cannot change the answer
    PARTS: tuple[Part, ...]  # files among RELEVANT that count only in part
    CHECKOUT: tuple[str, ...]  # folders and files that a checkout needs; () = everything
    SUBMODULES: tuple[str, ...]  # submodule paths that a build needs
    DEPENDENCY_CACHES: tuple[str, ...]  # cache variables of what is installed, not built: shared by all commits
    JIT_SOURCES: tuple[str, ...]  # git pathspecs that decide what is compiled at run time; () = all of RELEVANT

    def supports(self, path: PathSpec, case: Case, device: Device) -> str | None:
        """None when the cell can run, else one line that says why it cannot."""

    def pins(self, read: Read) -> Mapping[str, str]:
        """Versions of dependencies that this commit pins, read from its files."""

    def environment(self, checkout: Path, device: Device) -> Mapping[str, str]:
        """Environment variables that the candidate's process needs beyond the allow-list."""

    def prepare(self, request: BuildRequest) -> Sequence[BuildStep]:
        """Link what a build needs into the (private) checkout and give the commands that build it. () = none."""

    def gate_switch(self, path: PathSpec) -> str:
        """The flag or attribute that turns ``path`` off, in the words of the repository; "" when there is none."""


# ---- registry ----------------------------------------------------------------------------------------------

BUILTIN: Mapping[str, str] = {
    "demo": "dsabisect.targets.demo",
    "sglang": "dsabisect.targets.sglang",
    "deepgemm": "dsabisect.targets.deepgemm",
}


def names() -> tuple[str, ...]:
    """Built-in targets first, then those of installed entry points."""
    found = [e.name for e in metadata.entry_points(group="dsabisect.targets") if e.name not in BUILTIN]
    return (*BUILTIN, *sorted(set(found)))


def load(name: str) -> Any:
    """The target of that name, checked for conformance.

    Raises:
        UsageError: no such target, or one that does not satisfy :class:`Target`.
    """
    if name in BUILTIN:
        target: Any = importlib.import_module(BUILTIN[name])
    else:
        entries = [e for e in metadata.entry_points(group="dsabisect.targets") if e.name == name]
        if not entries:
            raise UsageError(f"unknown target {name!r}", remedy=f"Known targets: {', '.join(names())}")
        target = entries[0].load()
    faults = conformance(target)
    if faults:
        raise UsageError(f"target {name!r} does not conform: {'; '.join(faults)}", remedy="See docs/add-a-target.md")
    return target


def conformance(target: Any) -> list[str]:
    """What a target lacks, one line each; an empty list when it conforms."""
    faults = []
    for name, kind in (
        ("NAME", str), ("TITLE", str), ("PROBE", str), ("PATHS", tuple), ("DEFAULT_PATHS", tuple),
        ("RELEVANT", tuple), ("PARTS", tuple), ("CHECKOUT", tuple), ("SUBMODULES", tuple), ("JIT_SOURCES", tuple),
        ("DEPENDENCY_CACHES", tuple),
    ):  # fmt: skip
        if not isinstance(getattr(target, name, None), kind):
            faults.append(f"{name} is missing or not a {kind.__name__}")
    faults += [
        f"{name}() is missing"
        for name in ("supports", "pins", "environment", "prepare", "gate_switch")
        if not callable(getattr(target, name, None))
    ]
    if faults:
        return faults
    known = [path.name for path in target.PATHS]
    if len(set(known)) != len(known):
        faults.append("two paths share a name")
    faults += [f"default path {p!r} is not among PATHS" for p in target.DEFAULT_PATHS if p not in known]
    return faults
