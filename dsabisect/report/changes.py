"""The changes of verdict of a report, grouped by the commit that makes them, with the numbers on both sides. Pure.

A transition is one column's; a person asks about commits. So transitions of one kind with the same suspects are one
:class:`Step`, and what was measured just before and just after it stands beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsabisect.report import text
from dsabisect.report.build import column_of

Report = Mapping[str, Any]
Seen = Mapping[str, Mapping[str, Mapping[str, Any]]]  # sha → column → its last observation
BREAKS = ("introduced", "exposed")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One column in a chart. Values are errors, smaller is better; None where that side has no number."""

    column: str
    allowed: float
    before: float | None
    after: float | None
    after_mean: float | None
    ok_before: bool = True
    ok_after: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One rule (say `end_to_end diff`) over the columns of a step, the worst first."""

    title: str
    marks: tuple[Mark, ...]
    left_out: int


@dataclass(frozen=True, kw_only=True)
class FacetCount:
    """How a facet divides the cells of the paths concerned: value → (good, bad)."""

    name: str
    counts: Mapping[str, tuple[int, int]]

    @property
    def separates(self) -> bool:
        """No value has both good and bad cells, and both occur."""
        pure = all(0 in pair for pair in self.counts.values())
        return pure and all(any(pair[side] for pair in self.counts.values()) for side in (0, 1))


@dataclass(frozen=True, kw_only=True)
class Step:
    kind: str  # introduced | exposed | masked | fixed | gated
    suspects: tuple[str, ...]  # oldest first; one when it is one commit
    before: str  # sha of the last commit measured before it
    after: str  # sha of the first commit measured after it
    confirmed: bool
    columns: tuple[str, ...]
    confidence: float = 1.0  # below 1 where runs of one commit disagreed
    charts: tuple[Chart, ...] = ()
    facets: tuple[FacetCount, ...] = ()
    broken: Mapping[str, int] = field(default_factory=dict)  # rule or failure that does not hold → columns
    traceback: str = ""

    @property
    def breaks(self) -> bool:
        return self.kind in BREAKS


def steps(report: Report, *, most: int = 40) -> tuple[Step, ...]:
    """All changes of verdict, oldest first. ``most``: marks in one chart."""
    position = {c["id"]: at for at, c in enumerate(report["range"]["commits"])}
    seen = text.latest(report["observations"])
    grouped: dict[tuple[str, tuple[str, ...], str, str], list[Mapping[str, Any]]] = {}
    for t in report["transitions"]:
        before, after = sorted((t["good"], t["bad"]), key=lambda sha: position.get(sha, len(position)))
        grouped.setdefault((t["kind"], tuple(t["suspects"]), before, after), []).append(t)
    ordered = sorted(grouped.items(), key=lambda item: position.get(item[0][1][-1], len(position)))
    return tuple(_step(*key, found, seen, most) for key, found in ordered)


def _step(
    kind: str,
    suspects: tuple[str, ...],
    before: str,
    after: str,
    found: Sequence[Mapping[str, Any]],
    seen: Seen,
    most: int,
) -> Step:
    columns = tuple(column_of(t) for t in found)
    old, new = seen.get(before, {}), seen.get(after, {})
    bad_side = new if kind in BREAKS else old
    shown = [bad_side[c] for c in columns if c in bad_side]
    raised = next((o["failure"] for o in shown if o["failure"]), None)
    return Step(
        kind=kind,
        suspects=suspects,
        before=before,
        after=after,
        confirmed=all(t["confirmed"] for t in found),
        columns=columns,
        confidence=min(float(t.get("confidence", 1.0)) for t in found),
        charts=tuple(_charts(columns, old, new, most)),
        facets=facet_counts(columns, bad_side),
        broken=_broken(shown),
        traceback=raised["traceback"] if raised else "",
    )


# ---- numbers ------------------------------------------------------------------------------------------------


def _charts(columns: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any], most: int) -> Iterable[Chart]:
    """One chart for each rule with an error and a tolerance, over every column of the paths concerned."""
    paths = {c.partition("/")[0] for c in columns}
    beside = sorted(c for c in {*old, *new} if c.partition("/")[0] in paths)
    rules = dict.fromkeys(
        (k["stage"], k["name"])
        for side in (old, new)
        for c in beside
        if c in side
        for k in side[c]["comparisons"]
        if "max" in k["tolerance"] and "max" in k["metrics"]
    )
    for stage, name in rules:
        marks = [m for c in beside if (m := _mark(c, (stage, name), old.get(c), new.get(c))) is not None]
        marks.sort(key=lambda m: (-_ratio(m), m.column))
        yield Chart(title=f"{stage} {name}", marks=tuple(marks[:most]), left_out=max(0, len(marks) - most))


def _mark(
    column: str, rule: tuple[str, str], old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> Mark | None:
    before, after = (_comparison(side, rule) for side in (old, new))
    shown = after or before
    if shown is None:
        return None
    return Mark(
        column=column,
        allowed=number(shown["tolerance"]["max"]),
        before=_worst(before) if before else None,
        after=_worst(after) if after else None,
        after_mean=number(after["metrics"]["mean"]) if after and "mean" in after["metrics"] else None,
        ok_before=before is None or before["ok"],
        ok_after=after is None or after["ok"],
    )


def _worst(comparison: Mapping[str, Any]) -> float:
    """The error that the tolerance is of: that of the row that comes closest to its own tolerance, or goes over it."""
    metrics = comparison["metrics"]
    return number(metrics.get("row_error", metrics["max"]))


def _comparison(observation: Mapping[str, Any] | None, rule: tuple[str, str]) -> Mapping[str, Any] | None:
    for k in observation["comparisons"] if observation else ():
        if (k["stage"], k["name"]) == rule and "max" in k["metrics"] and "max" in k["tolerance"]:
            found: Mapping[str, Any] = k
            return found
    return None


def number(value: object) -> float:
    """A metric as a float; the words that the document has for NaN and infinity count as infinity."""
    try:
        found = float(str(value))
    except ValueError:
        return math.inf
    return math.inf if math.isnan(found) else found


def _share(error: float, allowed: float) -> float:
    return error / allowed if allowed > 0 else math.inf if error > 0 else 0.0


def _ratio(mark: Mark) -> float:
    return max((_share(v, mark.allowed) for v in (mark.before, mark.after) if v is not None), default=0.0)


def share_of_allowed(observation: Mapping[str, Any]) -> float | None:
    """The largest error of a cell as a share of what is allowed (1 = at the tolerance); None without a number."""
    shares = [
        _share(_worst(k), number(k["tolerance"]["max"]))
        for k in observation["comparisons"]
        if "max" in k["metrics"] and "max" in k["tolerance"]
    ]
    return max(shares, default=None)


# ---- what tells the cells apart -----------------------------------------------------------------------------


def facet_counts(columns: Sequence[str], row: Mapping[str, Mapping[str, Any]]) -> tuple[FacetCount, ...]:
    """Good and bad cells by facet value, over the cells of the paths that ``columns`` are of."""
    paths = {c.partition("/")[0] for c in columns}
    cells = [o for o in row.values() if o["path"] in paths and o["verdict"] != "skip" and o["reason"] != "absent"]
    counts = []
    for name in sorted({name for o in cells for name in o["facets"]}):
        by_value: dict[str, tuple[int, int]] = {}
        for o in cells:
            value = str(o["facets"].get(name, "—"))
            good, bad = by_value.get(value, (0, 0))
            by_value[value] = (good + (o["verdict"] == "good"), bad + (o["verdict"] == "bad"))
        if len(by_value) > 1:
            counts.append(FacetCount(name=name, counts=dict(sorted(by_value.items()))))
    return tuple(sorted(counts, key=lambda c: (not c.separates, c.name)))


def _broken(cells: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Rules that do not hold, and failures by their signature, with the number of columns."""
    counts: dict[str, int] = {}
    for o in cells:
        rules = [f"{k['stage']} {k['name']}" for k in o["comparisons"] if not k["ok"]]
        words = rules or ([o["failure"]["signature"]] if o["failure"] else [o["reason"]])
        for word in dict.fromkeys(words):
            counts[word] = counts.get(word, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
