"""Series of states along an axis, the steps between them, and what each step is called. Pure.

A series maps positions that were seen to states. A step is a change between two neighbours that were told apart;
what lies between them (skips, and paths that are absent) may hold the change too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from dsabisect.model import Column, Observation, Outcome, Reason, TransitionKind, Verdict
from dsabisect.reason import judge


class Kind(str, Enum):
    GOOD = "good"
    ABSENT = "absent"  # the path is not there: as good as good before a fault, nothing at all after one
    BAD = "bad"
    OFF = "off"  # the path was asked for and another one was taken
    SKIP = "skip"  # nothing was learnt


@dataclass(frozen=True, kw_only=True)
class State:
    kind: Kind
    signature: str = ""  # of BAD: the failure; of SKIP: what keys the block


MARKED = "marked"  # signature of a fault that a person said, whichever it is
GOOD, ABSENT, OFF = State(kind=Kind.GOOD), State(kind=Kind.ABSENT), State(kind=Kind.OFF)
Series = Mapping[int, State]
FINE = (Kind.GOOD, Kind.ABSENT, Kind.OFF)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of state somewhere in (after, upto]."""

    after: int
    upto: int
    old: State
    new: State

    @property
    def breaks(self) -> bool:
        return self.new.kind is Kind.BAD


def state_of(observation: Observation) -> State:
    """How one measured cell counts in its series.

    A path that was not taken is OFF, not a skip, so that a fault that goes away because the path is gated off is seen
    as that. Failures are told apart by their kind, not by their size: a size drifts while the cause stays.
    """
    if observation.outcome is Outcome.NOT_EXERCISED:
        return OFF
    if observation.verdict is Verdict.SKIP:
        return State(kind=Kind.SKIP, signature=judge.signature(observation))
    if observation.verdict is Verdict.BAD:
        return State(kind=Kind.BAD, signature=judge.without_size(judge.signature(observation)))
    return ABSENT if observation.reason is Reason.ABSENT else GOOD


def steps(series: Series) -> list[Step]:
    """Changes between neighbours, by position. Skips are passed over.

    Absent counts as good for a fault that comes and as nothing for a fault that goes: a fault that goes away with its
    path is mended only where the path is good again.
    """
    told = [(p, s) for p, s in sorted(series.items()) if s.kind is not Kind.SKIP]
    present = [(p, s) for p, s in told if s.kind is not Kind.ABSENT]
    come = [_step(*pair) for pair in pairwise(told) if _comes(pair[0][1], pair[1][1])]
    go = [
        _step(*pair)
        for pair in pairwise(present)
        if pair[0][1].kind is Kind.BAD and pair[1][1].kind in (Kind.GOOD, Kind.OFF)
    ]
    return sorted((*come, *go), key=lambda step: (step.upto, step.after))


def _step(one: tuple[int, State], other: tuple[int, State]) -> Step:
    return Step(after=one[0], upto=other[0], old=one[1], new=other[1])


def _comes(old: State, new: State) -> bool:
    same = old.signature == new.signature or MARKED in (old.signature, new.signature)
    return new.kind is Kind.BAD and (old.kind is not Kind.BAD or not same)


def state_at(series: Series, position: int) -> State | None:
    """The state seen there, or the one that both told neighbours share; None when that is not known."""
    seen = series.get(position)
    if seen is not None and seen.kind is not Kind.SKIP:
        return seen
    told = sorted(p for p, s in series.items() if s.kind is not Kind.SKIP)
    left, right = bisect_left(told, position) - 1, bisect_right(told, position)
    if left < 0 or right >= len(told):
        return None
    before, behind = series[told[left]], series[told[right]]
    return before if before == behind else None


# ---- names --------------------------------------------------------------------------------------------------


def kind_of(step: Step, forced: Iterable[Series]) -> TransitionKind:
    """What a step is called, beside the series of the paths that were forced, for the same case.

    ``forced`` is empty for a step of a forced path itself: what happens there is the code's own doing. A step of the
    default selection is *exposed* when a forced path was bad before it, so that only the selection changed, and
    *masked* when a forced path stays bad after it.
    """
    if step.breaks:
        was_bad = any(_is(Kind.BAD, series, step.after) for series in forced)
        return TransitionKind.EXPOSED if was_bad or step.old.kind is Kind.OFF else TransitionKind.INTRODUCED
    if step.new.kind is Kind.OFF:
        return TransitionKind.GATED
    others = [s for s in forced if _is(Kind.BAD, s, step.after)]
    if any(_is(Kind.BAD, series, step.upto) for series in others):
        return TransitionKind.MASKED
    gated = bool(others) and all(_is(Kind.OFF, series, step.upto) for series in others)
    return TransitionKind.GATED if gated else TransitionKind.FIXED


def _is(kind: Kind, series: Series, position: int) -> bool:
    state = state_at(series, position)
    return state is not None and state.kind is kind


def partners(column: Column, series: Mapping[Column, Series], defaults: Sequence[str]) -> list[Series]:
    """Series of the forced paths on the case of a default column; none for a forced column."""
    if column.path not in defaults:
        return []
    return [s for other, s in series.items() if other.case == column.case and other.path not in defaults]
