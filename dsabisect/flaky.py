"""Columns whose answers do not repeat: the same commit is measured again and again until a posterior is sure.

A column comes here when repeats inside one cell disagreed bitwise, or when the confirmation did not show again what
the search had seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dsabisect.model import Column, Observation, Reason, Verdict
from dsabisect.reason import flakes, timeline
from dsabisect.reason.flakes import Runs
from dsabisect.reason.plan import Plan
from dsabisect.reason.timeline import Kind
from dsabisect.session import Session

if TYPE_CHECKING:
    from dsabisect.conclude import Axis

SURE = flakes.SURE
MOST_RUNS = 80  # runs of commits, for all flaky columns of a session together
FAILED, PASSED = (Kind.BAD,), (Kind.GOOD, Kind.ABSENT)


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Where a flaky column changed, and how sure that is."""

    column: Column
    position: int  # on the axis, the most likely first bad one
    confidence: float
    credible: tuple[int, ...]  # positions that hold 95 % of the posterior, in order
    runs: int


@dataclass(kw_only=True)
class Tallies:
    """Runs of the flaky columns, by column and position."""

    runs: dict[Column, dict[int, Runs]] = field(default_factory=dict)
    untestable: dict[Column, set[int]] = field(default_factory=dict)

    def add(self, column: Column, position: int, kind: Kind) -> None:
        of = self.runs.setdefault(column, {})
        if kind in (*FAILED, *PASSED):
            seen = of.get(position, Runs())
            of[position] = Runs(failed=seen.failed + (kind in FAILED), passed=seen.passed + (kind in PASSED))
        elif position not in of:
            self.untestable.setdefault(column, set()).add(position)

    def begin(self, column: Column, search: Plan, more: Mapping[int, Sequence[Observation]]) -> None:
        """Count what the search has seen of ``column``, and ``more`` runs by position."""
        for position, state in search.series[column].items():
            self.add(column, position, state.kind)
        for position, runs in more.items():
            for run in runs:
                self.add(column, position, timeline.state_of(run).kind)

    def next_run(self, column: Column, n: int) -> int | None:
        return flakes.next_run(n, self.runs[column], frozenset(self.untestable.get(column, ())))


def settle(session: Session, axis: Axis, search: Plan, tallies: Tallies) -> list[Settled]:
    """Measure flaky columns until each is sure, or the budget ends."""
    n = len(axis.keys)
    runs = 0
    turns: dict[int, int] = {}
    while (asked := _asked(tallies, n)) and runs < MOST_RUNS and not session.out_of_budget():
        position = min(asked.values())
        columns = list(asked)  # the commit is there: every column that is not sure learns from it
        turns[position] = turns.get(position, 0) + 1
        observations = session.evaluate(axis[position], columns, purpose="flake", turn=turns[position])
        for observation in observations:
            tallies.add(observation.column, position, timeline.state_of(observation).kind)
        runs += 1
    found = {column: _settled(axis, tallies, column) for column in tallies.runs}
    for said, columns in _alike(axis, found).items():
        session.note(f"{several(columns)}: {said}")
    for said, columns in _other_failures(axis, search, found).items():
        session.note(f"{several(columns)}: {said}")
    return [settled for settled in found.values() if 0 < settled.position < n]


def _asked(tallies: Tallies, n: int) -> dict[Column, int]:
    """The run that each column that is not sure wants most."""
    wanted = {column: tallies.next_run(column, n) for column in tallies.runs}
    return {column: position for column, position in wanted.items() if position is not None}


def _settled(axis: Axis, tallies: Tallies, column: Column) -> Settled:
    n = len(axis.keys)
    chances = flakes.posterior(n, tallies.runs[column])
    position, chance = flakes.best(chances)
    count = sum(r.failed + r.passed for r in tallies.runs[column].values())
    credible = tuple(p for p in flakes.credible(chances) if 0 < p < n)
    return Settled(column=column, position=position, confidence=chance, credible=credible, runs=count)


# ---- what is said of it -------------------------------------------------------------------------------------


def several(columns: Sequence[Column]) -> str:
    """`fused/e2e-neox and 3 more columns`"""
    more = len(columns) - 1
    return str(columns[0]) + (f" and {more} more column{'s' if more > 1 else ''}" if more else "")


def _alike(axis: Axis, found: Mapping[Column, Settled]) -> dict[str, list[Column]]:
    """Sentence → columns that it is true of."""
    n = len(axis.keys)
    said: dict[str, list[Column]] = {}
    for position in sorted({settled.position for settled in found.values()}):
        mine = [settled for settled in found.values() if settled.position == position]
        chance, runs = min(s.confidence for s in mine), min(s.runs for s in mine)
        posterior = f"posterior {chance:.2f} after {runs} runs"
        if 0 < position < n:
            line = f"does not repeat: {posterior} for {axis[position].short}"
        else:
            where = "from the good end on" if position == 0 else "at either end"
            line = f"does not repeat {where} ({posterior}): nobody is accused"
        said[line] = [s.column for s in mine]
    return said


def _other_failures(axis: Axis, search: Plan, found: Mapping[Column, Settled]) -> dict[str, list[Column]]:
    """A fault that came later is told apart by how it fails. Not searched here: the posterior knows one change."""
    said: dict[str, list[Column]] = {}
    for column, settled in found.items():
        told = [(p, s) for p, s in sorted(search.series[column].items()) if p >= settled.position]
        bad = [(p, s.signature) for p, s in told if s.kind is Kind.BAD]
        later = next(((p, signature) for p, signature in bad if signature != bad[0][1]), None)
        if later is None:
            continue
        position, signature = later
        last = max((p for p, s in told if p < position and s.kind is not Kind.SKIP), default=settled.position)
        between = f", after {axis[last].short}" if position - last > 1 else ""
        line = (
            f"fails in another way ({signature}) from {axis[position].short} on at the latest{between}: not confirmed"
        )
        said.setdefault(line, []).append(column)
    return said


def observed(
    session: Session, axis: Axis, position: int, columns: Sequence[Column]
) -> tuple[tuple[Observation, ...], tuple[Observation, ...]]:
    """Every cell of the commits before and at ``position``, for the advice; of ``columns`` a failure that was seen."""
    parent, culprit = (session.evaluate(axis[p], session.columns, purpose="search") for p in (position - 1, position))
    return tuple(parent), tuple(_failure(session, cell) if cell.column in columns else cell for cell in culprit)


def _failure(session: Session, cell: Observation) -> Observation:
    """The last failing run of ``cell``, with how many of its runs fail. The cell itself when none did."""
    events = (e for e in session.journal.events() if e["event"] == "observation" and e["sha"] == cell.sha)
    seen = [Observation.from_json({k: v for k, v in event.items() if k != "event"}) for event in events]
    runs = [o for o in seen if o.column == cell.column and o.source == "measured" and o.verdict is not Verdict.SKIP]
    failed = [o for o in runs if o.verdict is Verdict.BAD]
    if not failed:
        return cell
    last = failed[-1]
    if last.reason is Reason.NONDETERMINISTIC:
        return last
    told = f"{len(failed)} of {len(runs)} runs fail: {last.detail}"
    return replace(last, reason=Reason.FLAKY, detail=told)
