"""The values that every room of the house speaks of: frozen, keyword-only, standard library only.

`Case × path × Build → Outcome → Comparisons → Observation (Verdict + Reason) → Transition → Recommendation`.
Each value is written to the journal with :func:`to_json` and read back with ``Type.from_json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

Facet = str | int
Choice = Facet | tuple[Facet, ...]  # one value, or any of several
Number = float | int


class Outcome(str, Enum):
    """What happened when a cell (build, path, case) was run."""

    COMPLETED = "completed"
    NOT_EXERCISED = "not_exercised"  # the path asked for was not the path taken
    ABSENT = "absent"  # the path does not exist yet (or any more) at this commit
    BUILD_FAILED = "build_failed"
    RAISED = "raised"  # an exception from the candidate's own code
    CRASHED = "crashed"  # signal, os._exit, or an end without a result
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"  # the candidate itself went over its memory limit


class Verdict(str, Enum):
    """What an outcome shows. There are three answers, never a bool."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


class Reason(str, Enum):
    """Why a verdict was given: one closed word."""

    MATCHED = "matched"  # good: every comparison holds
    ABSENT = "absent"  # good for "introduced", never for "fixed"
    DIVERGED = "diverged"
    NONDETERMINISTIC = "nondeterministic"
    POISONED = "poisoned"  # a valid output changed with bytes that must not be read
    MISSING_OUTPUT = "missing_output"
    RAISED = "raised"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    BUILD_FAILED = "build_failed"
    NOT_EXERCISED = "not_exercised"
    OTHER_FAILURE = "other_failure"  # it fails, but not in the way that is searched for
    FLAKY = "flaky"
    ASKED = "asked"  # --skip


class Stage(str, Enum):
    """Where in the indexer a comparison stands. ``repeat`` and ``poison`` are comparisons, not stages."""

    QUANT = "quant"
    LOGITS = "logits"
    TOPK = "topk"
    END_TO_END = "end_to_end"
    METADATA = "metadata"


class Action(str, Enum):
    REVERT = "revert"
    REVERT_HUNK = "revert_hunk"
    GATE = "gate"
    HOLD = "hold"
    NONE = "none"  # nothing diverges


class TransitionKind(str, Enum):
    INTRODUCED = "introduced"
    EXPOSED = "exposed"
    MASKED = "masked"
    FIXED = "fixed"
    GATED = "gated"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step of the axis that is searched. The search never looks inside."""

    id: str  # full sha of the commit
    title: str
    author: str = ""
    date: str = ""  # ISO 8601 committer date
    kind: str = "commit"  # commit | pin | hunk | flag

    @property
    def short(self) -> str:
        return self.id[:9]


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where cells run. ``arch`` is a facet: cpu, sm90, sm100, sm120."""

    name: str  # "cpu" or "cuda:N", as given
    arch: str

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class PathSpec:
    """One way through the code under test, and the flags that force it."""

    name: str
    title: str
    env: Mapping[str, str] = field(default_factory=dict)  # set before the candidate is imported
    settings: Mapping[str, Any] = field(default_factory=dict)  # handed to the probe
    default_selection: bool = False  # True: nothing forced, the commit chooses
    outputs: tuple[str, ...] = ("logits",)  # what every run of this path must yield
    relevant: tuple[str, ...] = ()  # git pathspecs that decide this path alone; () = the target's RELEVANT


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch of inputs with known answers.

    ``facets`` name everything that a gate could test; ``shape`` everything else that decides the inputs.
    """

    id: str
    stage: Stage
    facets: Mapping[str, Facet]
    shape: Mapping[str, Any]
    suites: tuple[str, ...] = ()
    seed: int = 0
    inputs_sha256: str = ""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Case:
        return cls(
            id=raw["id"], stage=Stage(raw["stage"]), facets=dict(raw["facets"]), shape=dict(raw["shape"]),
            suites=tuple(raw.get("suites", ())), seed=int(raw.get("seed", 0)),
            inputs_sha256=raw.get("inputs_sha256", ""),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Build:
    """A commit made ready to run. Equal ``key`` means interchangeable."""

    target: str
    tree: str  # hash of the relevant tree, so that a revert shares the key of what it returns to
    pins: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    environment: str = ""  # hash of device, driver, torch, deep_gemm, harness and golden versions

    @property
    def key(self) -> str:
        return digest(to_json(self))[:20]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a candidate failed, with a signature that survives line numbers, addresses and sizes."""

    type: str
    message: str
    signature: str
    traceback: str = ""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any] | None) -> Failure | None:
        return None if raw is None else cls(**raw)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One rule applied to one cell. ``metrics`` are filled also when the rule holds."""

    stage: Stage
    name: str  # finite, range, diff, topk, regret, repeat, poison, missing, lens, bytes, ...
    ok: bool
    metrics: Mapping[str, Number | str] = field(default_factory=dict)
    worst_at: Mapping[str, int] | None = None
    tolerance: Mapping[str, Number] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Comparison:
        return cls(**{**raw, "stage": Stage(raw["stage"])})


@dataclass(frozen=True, kw_only=True, order=True)
class Column:
    """One series of verdicts along the history."""

    path: str
    case: str

    def __str__(self) -> str:
        return f"{self.path}/{self.case}"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured cell: one line of the journal."""

    sha: str
    build: str  # Build.key
    path: str
    case: str
    outcome: Outcome
    verdict: Verdict
    reason: Reason
    facets: Mapping[str, Facet] = field(default_factory=dict)  # the case's, and the device's arch
    comparisons: tuple[Comparison, ...] = ()
    failure: Failure | None = None
    detail: str = ""  # one line for a person
    proof: Mapping[str, str] = field(default_factory=dict)  # which path was really taken
    stood_in: tuple[str, ...] = ()  # modules that the harness stood in for
    notes: tuple[str, ...] = ()  # advice lines from the probe, such as an unclear error
    repeats: int = 1
    timing: Mapping[str, float] = field(default_factory=dict)  # seconds by part
    speed: Mapping[str, float] = field(default_factory=dict)  # of timed calls: calls, median, low, high (quartiles), s
    log: str = ""  # relative to logs/ in the run folder
    purpose: str = "search"  # endpoint | search | confirm | flake | check | verify
    source: str = "measured"  # measured | twin (another commit of this run with the same tree) | cache (an earlier run)
    turn: int = 0  # which of several runs, for purpose confirm and flake
    about: str = ""  # sha of the accused commit, for purpose confirm

    @property
    def column(self) -> Column:
        return Column(path=self.path, case=self.case)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Observation:
        return cls(
            **{
                **raw,
                "outcome": Outcome(raw["outcome"]),
                "verdict": Verdict(raw["verdict"]),
                "reason": Reason(raw["reason"]),
                "comparisons": tuple(Comparison.from_json(c) for c in raw.get("comparisons", ())),
                "failure": Failure.from_json(raw.get("failure")),
                "stood_in": tuple(raw.get("stood_in", ())),
                "notes": tuple(raw.get("notes", ())),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A change of verdict in one column, between two neighbours of the history or inside a set."""

    path: str
    case: str
    kind: TransitionKind
    good: str  # sha of the last good commit
    bad: str  # sha of the first bad commit
    suspects: tuple[str, ...]  # oldest first; one element when the answer is one commit
    confirmed: bool = False
    confidence: float = 1.0  # posterior of the suspects; below 1.0 only where runs of one commit disagreed

    @property
    def column(self) -> Column:
        return Column(path=self.path, case=self.case)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Keep the change, off only under a stated condition."""

    predicate: Mapping[str, Choice]  # conjunction of facet == value or facet in values under which it goes off
    alternatives: tuple[Mapping[str, Choice], ...] = ()  # every other smallest predicate that separates
    switch: str = ""  # the flag or attribute that turns the path off
    stays_on: tuple[str, ...] = ()
    goes_off: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    action: Action
    change: str = ""  # sha
    gate: Gate | None = None
    because: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # runs still to be made, as commands or sentences
    verified: Mapping[str, Any] | None = None


# ---- between the host and the candidate's process ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one candidate process may use."""

    cell_seconds: float = 120.0
    start_seconds: float = 180.0  # import of the candidate and its first JIT compilation
    memory_bytes: int = 8 << 30
    log_bytes: int = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell to measure: the probe gets the case and each input file in turn."""

    path: PathSpec
    case: Case
    inputs: tuple[str, ...]  # safetensors, absolute: the runs in order, e.g. (a, b, a) for poison and repeat
    out: str  # absolute folder for run0.safetensors, run1.safetensors, ...


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the runner saw of one cell. No verdict yet."""

    path: str
    case: str
    outcome: Outcome
    outputs: tuple[str, ...] = ()  # safetensors files, one per run
    failure: Failure | None = None
    detail: str = ""
    proof: Mapping[str, str] = field(default_factory=dict)
    stood_in: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    timing: Mapping[str, float] = field(default_factory=dict)
    speed: Mapping[str, float] = field(default_factory=dict)  # see Observation
    log: str = ""


def to_json(value: Any) -> Any:
    """Plain JSON values of a model value; mappings keep their keys, tuples become lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


def digest(value: Any) -> str:
    """sha256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
