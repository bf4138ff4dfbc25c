"""From what happened and what was compared to a verdict; from verdicts at both ends to what can be searched."""

from __future__ import annotations

import math
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
    """`end_to_end diff: row 3: 0.41 > 0.0021 allowed · overlap …`"""
    shown = dict(comparison.metrics)
    where = "".join(f" {name} {at}" for name, at in (comparison.worst_at or {}).items())
    allowed = shown.pop("allowed", comparison.tolerance.get("max"))
    if comparison.name in ("diff", "regret"):
        seen = shown.get("row_error", shown.get("max"))
        return f"{comparison.stage.value} {comparison.name}:{where}: {_number(seen)} > {_number(allowed)} allowed"
    numbers = ", ".join(f"{name} {_number(value)}" for name, value in shown.items() if value != "")
    return _line(f"{comparison.stage.value} {comparison.name}:{where}: {numbers}")


# ---- signatures: is it the failure that is searched for? ------------------------------------------------------


def signature(observation: Observation) -> str:
    """Stage, reason and either the normalised failure or the comparison with its order of magnitude."""
    if observation.failure is not None:
        return f"{observation.reason.value}|{observation.failure.signature}"
    failing = decisive(observation.comparisons)
    if failing is None:
        return observation.reason.value
    return f"{observation.reason.value}|{failing.stage.value}|{failing.name}|{_magnitude(failing)}"


def _magnitude(comparison: Comparison) -> str:
    seen = comparison.metrics.get("row_error", comparison.metrics.get("max"))
    return f"e{math.floor(math.log10(seen))}" if isinstance(seen, (int, float)) and seen > 0 else ""


def agree(one: str, other: str) -> bool:
    """The same failure, orders of magnitude at most one apart."""
    if one == other:
        return True
    head, _, tail = one.rpartition("|")
    other_head, _, other_tail = other.rpartition("|")
    if head != other_head or not (tail.startswith("e") and other_tail.startswith("e")):
        return False
    return abs(int(tail[1:]) - int(other_tail[1:])) <= 1


def against(observation: Observation, sought: str) -> Verdict:
    """Verdict for the search: another failure than the sought one is untestable, not bad."""
    if observation.verdict is not Verdict.BAD:
        return observation.verdict
    return Verdict.BAD if agree(signature(observation), sought) else Verdict.SKIP


# ---- endpoints ----------------------------------------------------------------------------------------------


class EndpointStatus(str, Enum):
    SEARCHABLE = "searchable"
    NOTHING_DIVERGES = "nothing_diverges"
    GOOD_END_IS_BAD = "good_end_is_bad"
    BOTH_FAIL_ALIKE = "both_fail_alike"
    UNTESTABLE = "untestable"


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    status: EndpointStatus
    diverging: tuple[Column, ...] = ()  # good (or absent) at the good end, bad at the bad end
    broken: tuple[Column, ...] = ()  # bad at the good end: never searched, never accused
    mended: tuple[Column, ...] = ()  # bad at the good end, good at the bad end
    untestable: tuple[Column, ...] = ()
    hint: str = ""
    remedy: str = ""


def endpoints(good: Sequence[Observation], bad: Sequence[Observation]) -> Endpoints:
    """Sort the columns by their verdicts at both ends."""
    ends: Mapping[Column, tuple[Observation, Observation]] = {
        g.column: (g, b) for g in good for b in bad if g.column == b.column
    }
    pick = lambda old, new: tuple(c for c, (g, b) in ends.items() if g.verdict is old and b.verdict is new)  # noqa: E731
    diverging = pick(Verdict.GOOD, Verdict.BAD)
    both, mended = pick(Verdict.BAD, Verdict.BAD), pick(Verdict.BAD, Verdict.GOOD)
    untestable = tuple(c for c, pair in ends.items() if Verdict.SKIP in (pair[0].verdict, pair[1].verdict))
    found = {"diverging": diverging, "broken": (*both, *mended), "mended": mended, "untestable": untestable}
    if diverging:
        hint = f"{len(both)} columns are bad at both ends and are left out: {_some(both)}" if both else ""
        return Endpoints(status=EndpointStatus.SEARCHABLE, hint=hint, **found)
    if both and not mended and not pick(Verdict.GOOD, Verdict.GOOD) and _alike(ends, both):
        return Endpoints(
            status=EndpointStatus.BOTH_FAIL_ALIKE,
            hint=f"every cell fails in the same way at both ends: {ends[both[0]][0].detail}",
            remedy="That is the machine's or the environment's: `dsabisect doctor`, and the log of a cell, say more",
            **found,
        )
    if both or mended:
        return Endpoints(
            status=EndpointStatus.GOOD_END_IS_BAD,
            hint=f"the good end is bad in {len(both) + len(mended)} columns: {_some((*both, *mended))}",
            remedy="Give an older --good"
            + (". Where the bad end is good again, swap the ends to find what mended it" if mended else ""),
            **found,
        )
    if pick(Verdict.GOOD, Verdict.GOOD):
        return Endpoints(
            status=EndpointStatus.NOTHING_DIVERGES,
            hint=f"both ends are good in {len(pick(Verdict.GOOD, Verdict.GOOD))} columns"
            + (f"; {len(untestable)} could not be tested" if untestable else ""),
            remedy="If CI is red, it is red for something that these cases do not show: try --suite full or another --path",
            **found,
        )
    return Endpoints(
        status=EndpointStatus.UNTESTABLE,
        hint=f"no column could be tested at both ends: {_some(untestable)}: {_first_detail(ends)}",
        remedy="Choose ends that build, or another --path",
        **found,
    )


def _alike(ends: Mapping[Column, tuple[Observation, Observation]], columns: Sequence[Column]) -> bool:
    return all(g.reason in FAILED and signature(g) == signature(b) for g, b in (ends[c] for c in columns))


def _some(columns: Sequence[Column], count: int = 3) -> str:
    more = f" and {len(columns) - count} more" if len(columns) > count else ""
    return ", ".join(str(c) for c in columns[:count]) + more


def _first_detail(ends: Mapping[Column, tuple[Observation, Observation]]) -> str:
    return next((o.detail for pair in ends.values() for o in pair if o.verdict is Verdict.SKIP), "nothing was measured")


# ---- confirmation -------------------------------------------------------------------------------------------


def confirmed(parent: Sequence[Observation], culprit: Sequence[Observation], sought: str) -> str | None:
    """None when every run of the parent was good and every run of the culprit showed the sought failure, else why not."""
    for run in parent:
        if run.verdict is not Verdict.GOOD:
            return f"the parent {run.sha[:9]} was {run.verdict.value} ({run.reason.value}) when run again: {run.detail}"
    for run in culprit:
        if against(run, sought) is not Verdict.BAD:
            return f"{run.sha[:9]} was {run.verdict.value} ({run.reason.value}) when run again: {run.detail}"
    if len(parent) < 2 or len(culprit) < 2:
        return "it was not run again at least twice"
    return None
