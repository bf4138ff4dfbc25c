"""Columns whose answers do not repeat: the same commit is measured again and again until a posterior is sure.

A column comes here when repeats inside one cell disagreed bitwise, or when the confirmation did not show again what
the search had seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsabisect.model import Column, Observation
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


def settle(session: Session, axis: Axis, tallies: Tallies) -> list[Settled]:
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
    return [settled for settled in (_settled(session, axis, tallies, column) for column in tallies.runs) if settled]


def _asked(tallies: Tallies, n: int) -> dict[Column, int]:
    """The run that each column that is not sure wants most."""
    wanted = {column: tallies.next_run(column, n) for column in tallies.runs}
    return {column: position for column, position in wanted.items() if position is not None}


def _settled(session: Session, axis: Axis, tallies: Tallies, column: Column) -> Settled | None:
    n = len(axis.keys)
    chances = flakes.posterior(n, tallies.runs[column])
    position, chance = flakes.best(chances)
    count = sum(r.failed + r.passed for r in tallies.runs[column].values())
    if position in (0, n):
        where = "from the good end on" if position == 0 else "at either end"
        session.note(
            f"{column}: does not repeat {where} (posterior {chance:.2f} after {count} runs): nobody is accused"
        )
        return None
    session.note(f"{column}: does not repeat: posterior {chance:.2f} for {axis[position].short} after {count} runs")
    credible = tuple(p for p in flakes.credible(chances) if 0 < p < n)
    return Settled(column=column, position=position, confidence=chance, credible=credible, runs=count)


def observed(session: Session, axis: Axis, position: int) -> tuple[tuple[Observation, ...], tuple[Observation, ...]]:
    """Every cell of the commits before and at ``position``, for the advice."""
    parent, culprit = (session.evaluate(axis[p], session.columns, purpose="search") for p in (position - 1, position))
    return tuple(parent), tuple(culprit)
