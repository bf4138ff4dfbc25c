"""From what happened and what was compared to a verdict; from verdicts at both ends to what can be searched."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dsabisect.model import Column, Comparison, Measurement, Observation, Outcome, Reason, Verdict

ORDER = ("missing", "shape", "repeat", "poison", "finite", "infset", "diff", "bytes", "scale", "lens", "topk", "regret")
REASON_OF = {
    "missing": Reason.MISSING_OUTPUT, "shape": Reason.MISSING_OUTPUT, "repeat": Reason.NONDETERMINISTIC,
    "poison": Reason.POISONED,
}  # fmt: skip
OF_OUTCOME = {
    Outcome.NOT_EXERCISED: (Verdict.SKIP, Reason.NOT_EXERCISED),
    Outcome.ABSENT: (Verdict.GOOD, Reason.ABSENT),
    Outcome.BUILD_FAILED: (Verdict.SKIP, Reason.BUILD_FAILED),
    Outcome.RAISED: (Verdict.BAD, Reason.RAISED),
    Outcome.CRASHED: (Verdict.BAD, Reason.CRASHED),
    Outcome.TIMED_OUT: (Verdict.BAD, Reason.TIMED_OUT),
    Outcome.OUT_OF_MEMORY: (Verdict.BAD, Reason.OUT_OF_MEMORY),
}
FAILED = (Reason.RAISED, Reason.CRASHED, Reason.TIMED_OUT, Reason.OUT_OF_MEMORY)


def judge(measurement: Measurement, comparisons: Sequence[Comparison]) -> tuple[Verdict, Reason, str]:
    """Verdict, reason and one line for a person. The first failing comparison in ORDER decides."""
    if measurement.outcome is not Outcome.COMPLETED:
        verdict, reason = OF_OUTCOME[measurement.outcome]
        failure = measurement.failure
        said = f"{failure.type}: {failure.message}" if failure else measurement.detail
        return verdict, reason, _line(said)
    if not comparisons:  # nothing was compared: that is no proof of anything
        return Verdict.SKIP, Reason.NOT_EXERCISED, "nothing was compared"
    failing = decisive(comparisons)
    if failing is None:
        return Verdict.GOOD, Reason.MATCHED, _good_line(comparisons)
    return Verdict.BAD, REASON_OF.get(failing.name, Reason.DIVERGED), describe(failing)


def decisive(comparisons: Sequence[Comparison]) -> Comparison | None:
    """The failing comparison that says most about the cause: the first in ORDER, unknown names last."""
    failing = [c for c in comparisons if not c.ok]
    return min(failing, key=lambda c: _rank(c.name)) if failing else None


def _rank(name: str) -> int:
    stem = name.partition("_")[0]
    return ORDER.index(stem) if stem in ORDER else len(ORDER)


def _line(text: str, limit: int = 300) -> str:
    one = " ".join(text.split())
    return one if len(one) <= limit else one[: limit - 1] + "…"


def _good_line(comparisons: Sequence[Comparison]) -> str:
    diff = next((c for c in comparisons if c.name == "diff"), None)
    return f"{diff.stage.value}: worst row {_number(diff.metrics['max'])}" if diff else "equal"


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def describe(comparison: Comparison) -> str:
    """`end_to_end diff: 0.41 > 0.0021 allowed (row 3, position 17)`: the numbers first, lines get cut at their end."""
    shown = dict(comparison.metrics)
    where = ", ".join(f"{name} {at}" for name, at in (comparison.worst_at or {}).items())
    at = f" ({where})" if where else ""
    head = f"{comparison.stage.value} {comparison.name}"
    allowed = shown.pop("allowed", comparison.tolerance.get("max"))
    if comparison.name in ("diff", "regret"):
        seen = shown.get("row_error", shown.get("max"))
        return _line(f"{head}: {_number(seen)} > {_number(allowed)} allowed{at}")
    numbers = ", ".join(f"{name} {_number(value)}" for name, value in shown.items() if value != "")
    return _line(f"{head}: {numbers}{at}")


# ---- signatures: is it the failure that is searched for? ------------------------------------------------------

MAGNITUDE = re.compile(r"(diverged\|\w+\|\w+)\|e(-?\d+)")
DECADES = 1  # how far two magnitudes of the same failure may lie apart


def signature(observation: Observation) -> str:
    """Reason and the normalised failure, or reason, stage and comparison with its order of magnitude.

    ``raised|RuntimeError: size of tensor a (N) …`` · ``diverged|end_to_end|diff|e-1`` · ``not_exercised``
    """
    if observation.failure is not None:
        return f"{observation.reason.value}|{observation.failure.signature}"
    failing = decisive(observation.comparisons)
    if failing is None:
        return observation.reason.value
    magnitude = _magnitude(failing) if observation.reason is Reason.DIVERGED else ""
    return f"{observation.reason.value}|{failing.stage.value}|{failing.name}" + (f"|{magnitude}" if magnitude else "")


def _magnitude(comparison: Comparison) -> str:
    seen = comparison.metrics.get("row_error", comparison.metrics.get("max"))
    return f"e{math.floor(math.log10(seen))}" if isinstance(seen, (int, float)) and 0 < seen < math.inf else ""


def without_size(one: str) -> str:
    """The signature without the order of magnitude of a difference."""
    found = MAGNITUDE.fullmatch(one)
    return found[1] if found else one


def agree(one: str, other: str) -> bool:
    """The same failure, orders of magnitude at most one apart."""
    if one == other:
        return True
    mine, theirs = MAGNITUDE.fullmatch(one), MAGNITUDE.fullmatch(other)
    if mine is None or theirs is None or mine[1] != theirs[1]:
        return False
    return abs(int(mine[2]) - int(theirs[2])) <= DECADES


def answer(observation: Observation, sought: str) -> tuple[Verdict, Reason]:
    """Verdict and reason for the search: another failure than the sought one is untestable, not bad."""
    if observation.verdict is not Verdict.BAD or agree(signature(observation), sought):
        return observation.verdict, observation.reason
    return Verdict.SKIP, Reason.OTHER_FAILURE


def against(observation: Observation, sought: str) -> Verdict:
    """The verdict of :func:`answer`."""
    return answer(observation, sought)[0]


# ---- endpoints ----------------------------------------------------------------------------------------------


class EndpointStatus(str, Enum):
    SEARCHABLE = "searchable"
    NOTHING_DIVERGES = "nothing_diverges"
    GOOD_END_IS_BAD = "good_end_is_bad"
    BOTH_FAIL_ALIKE = "both_fail_alike"
    UNTESTABLE = "untestable"


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """The columns by what both ends say of them, and whether there is something to search."""

    status: EndpointStatus
    diverging: tuple[Column, ...] = ()  # good (or absent) at the good end, bad at the bad end
    steady: tuple[Column, ...] = ()  # bad at neither end, measured at one of them at least
    broken: tuple[Column, ...] = ()  # bad at the good end: never searched, never accused
    mended: tuple[Column, ...] = ()  # those of broken that are good, not merely absent, at the bad end
    untestable: tuple[Column, ...] = ()  # not measured at one end, or absent at both
    hint: str = ""
    remedy: str = ""


Ends = Mapping[Column, tuple[Observation, Observation]]


def endpoints(good: Sequence[Observation], bad: Sequence[Observation]) -> Endpoints:
    """Sort the columns by their verdicts at both ends. Columns that only one end has are untestable."""
    at_bad = {o.column: o for o in bad}
    ends: Ends = {o.column: (o, at_bad[o.column]) for o in good if o.column in at_bad}
    lone = sorted({o.column for o in (*good, *bad)} - set(ends))
    sorts: dict[str, list[Column]] = {kind: [] for kind in ("diverging", "steady", "broken", "mended", "untestable")}
    for column, pair in ends.items():
        for kind in _kinds(*pair):
            sorts[kind].append(column)
    sorts["untestable"] += lone
    found = {kind: tuple(columns) for kind, columns in sorts.items()}
    status = _status(ends, found)
    hint, remedy = _told(status, ends, found)
    return Endpoints(status=status, hint=hint, remedy=remedy, **found)


def _kinds(old: Observation, new: Observation) -> tuple[str, ...]:
    """Where a column belongs. Absent is good for "introduced", never for "mended", and no proof of anything alone."""
    if Verdict.SKIP in (old.verdict, new.verdict) or old.reason is new.reason is Reason.ABSENT:
        return ("untestable",)
    if old.verdict is Verdict.BAD:
        return ("broken", "mended") if _worked(new) else ("broken",)
    return ("diverging",) if new.verdict is Verdict.BAD else ("steady",)


def _worked(observation: Observation) -> bool:
    return observation.verdict is Verdict.GOOD and observation.reason is not Reason.ABSENT


def _status(ends: Ends, found: Mapping[str, tuple[Column, ...]]) -> EndpointStatus:
    if found["diverging"]:
        return EndpointStatus.SEARCHABLE
    if found["broken"]:
        nothing_worked = not any(_worked(o) for pair in ends.values() for o in pair)
        alike = nothing_worked and _alike(ends, found["broken"])
        return EndpointStatus.BOTH_FAIL_ALIKE if alike else EndpointStatus.GOOD_END_IS_BAD
    return EndpointStatus.NOTHING_DIVERGES if found["steady"] else EndpointStatus.UNTESTABLE


def _alike(ends: Ends, columns: Sequence[Column]) -> bool:
    """Does every column fail at both ends with the same exception, crash or limit?"""
    pairs = [ends[c] for c in columns]
    return all(old.reason in FAILED and new.reason in FAILED and signature(old) == signature(new) for old, new in pairs)


def _told(status: EndpointStatus, ends: Ends, found: Mapping[str, tuple[Column, ...]]) -> tuple[str, str]:
    """Hint and remedy: one line each."""
    broken, mended, untestable = found["broken"], found["mended"], found["untestable"]
    if status is EndpointStatus.SEARCHABLE:
        return (f"{_count(broken)} bad at the good end already, left out: {_some(broken)}" if broken else ""), ""
    if status is EndpointStatus.BOTH_FAIL_ALIKE:
        return (
            f"every cell that could be run fails in the same way at both ends: {ends[broken[0]][0].detail}",
            "That is the machine's or the environment's: `dsabisect doctor`, and the log of a cell, say more",
        )
    if status is EndpointStatus.GOOD_END_IS_BAD:
        swap = ". Where the bad end is good again, swap the ends to find what mended it" if mended else ""
        hint = f"the good end is bad in {_count(broken)}: {_some(broken)}: {ends[broken[0]][0].detail}"
        return hint, f"Give an older --good{swap}"
    if status is EndpointStatus.NOTHING_DIVERGES:
        rest = f"; {_count(untestable)} could not be tested at both" if untestable else ""
        return (
            f"neither end is bad in {_count(found['steady'])}{rest}",
            "If CI is red, it is red for something that these cases do not show: try --suite full or another --path",
        )
    return (
        f"no column could be tested at both ends: {_some(untestable)}: {_first_detail(ends)}",
        "Choose ends that build and have the path, or another --path",
    )


def _count(columns: Sequence[Column]) -> str:
    return f"{len(columns)} column{'s' if len(columns) != 1 else ''}"


def _some(columns: Sequence[Column], count: int = 3) -> str:
    more = f" and {len(columns) - count} more" if len(columns) > count else ""
    return ", ".join(str(c) for c in columns[:count]) + more


def _first_detail(ends: Ends) -> str:
    told = (o.detail or o.reason.value for pair in ends.values() for o in pair if not _worked(o))
    return next(told, "nothing was measured")


# ---- confirmation -------------------------------------------------------------------------------------------


def confirmed(parent: Sequence[Observation], culprit: Sequence[Observation], sought: str) -> str | None:
    """None when every run of the parent was good and every run of the culprit showed the sought failure, else why not.

    The runs are interleaved by the caller: P, C, P, C, from clean builds, at least two each.
    """
    for run in parent:
        if run.verdict is not Verdict.GOOD:
            return f"the parent {run.sha[:9]} was {run.verdict.value} ({run.reason.value}) when run again: {run.detail}"
    for run in culprit:
        if against(run, sought) is not Verdict.BAD:
            return f"{run.sha[:9]} was {run.verdict.value} ({run.reason.value}) when run again: {run.detail}"
    if len(parent) < 2 or len(culprit) < 2:
        return "it was not run again at least twice"
    return None
