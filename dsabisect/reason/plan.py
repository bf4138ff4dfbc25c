"""Which position to measure next, for all columns at once. Pure: states go in, the next probe comes out.

Order: both ends; the suspects that must be looked at; then every step between neighbours is bisected, the earliest
first; then stretches in which a whole window could still hide are looked into. Everything is derived from what was
seen, so that cached results, a resumed run, a replay and marks by hand are the same call.

The window: a state that nobody announced is taken to last at least ``window`` positions. What lasts less and is not
among the suspects may be missed; nothing else. Near a step that was located exactly, the same assumption says that its
new state lasts, which saves probes there.

Positions with equal keys are one tree: what is seen at one of them is seen at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dsabisect.model import Column, Verdict
from dsabisect.reason import search, timeline
from dsabisect.reason.timeline import Kind, Series, State, Step

WINDOW = 8  # positions
MOST_AHEAD = 60  # probes: a longer estimate says nothing
STRIDES = 16  # a long axis is looked into at about so many places: the window grows with it


def window_for(n: int) -> int:
    """The default window of an axis of ``n`` positions."""
    return max(WINDOW, -(-n // STRIDES))


@dataclass(frozen=True, kw_only=True)
class Probe:
    position: int
    columns: tuple[Column, ...]
    why: str  # end | suspect | step | window


@dataclass(kw_only=True)
class Plan:
    """The state of one search. ``window=0``: steps only, the plain bisection of ``--first``."""

    keys: Sequence[Hashable]  # one a position, equal for equal trees
    columns: tuple[Column, ...]
    suspects: Collection[int] = ()  # commits that announce a change: looked at, and taken to be where a step lies
    also: Collection[int] = ()  # looked at too, such as what stood right before a revert
    window: int = WINDOW
    series: dict[Column, dict[int, State]] = field(default_factory=dict)
    closed: set[Column] = field(default_factory=set)  # columns that are searched in another way, or not at all

    def __post_init__(self) -> None:
        if len(self.keys) < 2:
            raise ValueError(f"a search needs a good and a bad end, got {len(self.keys)} position(s)")
        for column in self.columns:
            self.series.setdefault(column, {})
        twins: dict[Hashable, list[int]] = defaultdict(list)
        for position, key in enumerate(self.keys):
            twins[key].append(position)
        self._twins = {position: tuple(twins[key]) for position, key in enumerate(self.keys)}

    @property
    def last(self) -> int:
        return len(self.keys) - 1

    def take(self, position: int, column: Column, state: State) -> None:
        """Note what was seen. The same tree counts at all its positions; what is already told there stays."""
        for twin in self._twins[position]:
            self.series[column].setdefault(twin, state)
        self.series[column][position] = state

    # ---- the next probe ----------------------------------------------------------------------------------

    def next(self) -> Probe | None:
        """The most useful probe now; None when every step is located and no window can hide."""
        groups = self._groups()
        ends = [(p, s, "end") for p in (0, self.last) for s in groups if p not in s]
        asked = [(p, s, "suspect") for p in sorted({*self.suspects, *self.also}) for s in groups if p not in s]
        for found in (ends, asked, self._inside_steps(groups), self._windows(groups)):
            if found:
                position, _, why = min(found, key=lambda f: f[0])
                return Probe(position=position, columns=self._wanting(position, groups), why=why)
        return None

    def probe_at(self, position: int) -> Probe:
        """What a probe there would measure; no columns when it would teach nothing."""
        return Probe(position=position, columns=self._wanting(position, self._groups()), why="ahead")

    def remaining(self) -> int:
        """About how many probes are left: as many as there are if nothing changes in between."""
        plan, count = self, 0
        while (probe := plan.next()) is not None and count < MOST_AHEAD:
            plan, count = plan._assuming(probe, -1), count + 1
        return count

    def _groups(self) -> dict[_Frozen, list[Column]]:
        """Columns by what was seen of them: most columns of a run share their series."""
        groups: dict[_Frozen, list[Column]] = defaultdict(list)
        for column in self.columns:
            if column not in self.closed:
                groups[_Frozen(self.series[column])].append(column)
        return dict(groups)

    def _inside_steps(self, groups: Collection[_Frozen]) -> list[tuple[int, _Frozen, str]]:
        found = []
        for series in groups:
            for step in self._sought(series):
                probe = inside(step, series, self.suspects)
                if probe is not None:
                    found.append((probe, series, "step"))
                    break  # the later steps of a column wait: the earliest is the headline
        return found

    def _sought(self, series: Series) -> list[Step]:
        return timeline.steps(series) if self.window else first_step(series)

    def _windows(self, groups: Collection[_Frozen]) -> list[tuple[int, _Frozen, str]]:
        if not self.window:
            return []
        found = [(hiding(series, self.window), series) for series in groups]
        return [(position, series, "window") for position, series in found if position is not None]

    def _wanting(self, position: int, groups: Mapping[_Frozen, list[Column]]) -> tuple[Column, ...]:
        """Every column that learns something there: the commit is checked out, built and started only once."""
        wanting = {c for series, columns in groups.items() if self._learns(series, position) for c in columns}
        return tuple(c for c in self.columns if c in wanting)

    def _learns(self, series: Series, position: int) -> bool:
        if position in series:
            return False
        if position in (0, self.last) or position in self.suspects or position in self.also:
            return True
        if any(step.after < position < step.upto for step in self._sought(series)):
            return True
        return bool(self.window) and hides(series, self.window, position)

    def ahead(self, k: int) -> tuple[int, ...]:
        """``k`` positions that will probably be asked for next, each once, for checkouts and builds ahead of time.

        The next probe first; then those that follow if it shows what its left neighbour showed, and what its right
        one did, breadth first.
        """
        found: list[int] = []
        waiting = [self]
        while waiting and len(found) < k:
            plan = waiting.pop(0)
            probe = plan.next()
            if probe is None:
                continue
            if probe.position not in found:
                found.append(probe.position)
            waiting += [plan._assuming(probe, side) for side in (-1, 1)]
        return tuple(found)

    def _assuming(self, probe: Probe, side: int) -> Plan:
        plan = Plan(
            keys=self.keys, columns=self.columns, suspects=self.suspects, also=self.also, window=self.window,
            series={c: dict(s) for c, s in self.series.items()}, closed=set(self.closed),
        )  # fmt: skip
        for column in probe.columns:
            plan.take(probe.position, column, _neighbour(self.series[column], probe.position, side))
        return plan


class _Frozen(dict[int, State]):
    """A series that can be a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _neighbour(series: Series, position: int, side: int) -> State:
    told = [(p, s) for p, s in sorted(series.items()) if s.kind is not Kind.SKIP and (p - position) * side > 0]
    return told[-1 if side < 0 else 0][1] if told else timeline.GOOD


# ---- inside a step ------------------------------------------------------------------------------------------


def first_step(series: Series) -> list[Step]:
    """The first change to bad alone."""
    return [step for step in timeline.steps(series) if step.breaks][:1]


def inside(step: Step, series: Series, suspects: Collection[int] = ()) -> int | None:
    """The position to measure inside ``step``; None when it is located, or only untestable ones are left.

    A step that ends at a suspect most likely happened right there: its predecessor is asked first.
    """
    width = step.upto - step.after
    between = range(step.after + 1, step.upto)
    if step.upto in suspects and width > 1 and step.upto - 1 not in series:
        return step.upto - 1
    seen = {0: Verdict.GOOD, width: Verdict.BAD, **{p - step.after: Verdict.SKIP for p in between if p in series}}
    blocks = {p - step.after: series[p].signature or series[p].kind.value for p in between if p in series}
    probe = search.next_probe(width + 1, seen, blocks)
    return None if probe is None else step.after + probe


# ---- windows ------------------------------------------------------------------------------------------------


def hiding(series: Series, window: int) -> int | None:
    """The first position to look at so that no window can hide; None when none can."""
    for low, high in _stretches(series, window):
        width = high - low
        return low + -(-width // -(-width // window))
    return None


def hides(series: Series, window: int, position: int) -> bool:
    """Does ``position`` lie in a stretch in which a window could hide?"""
    return any(low < position < high for low, high in _stretches(series, window))


def _stretches(series: Series, window: int) -> list[tuple[int, int]]:
    """(low, high): nothing is known of the ``window`` or more positions between them.

    Next to a step that is located the new state is taken to last, and the old one to have lasted.
    """
    begins = {s.upto for s in timeline.steps(series) if s.upto - s.after == 1}
    found = []
    for one, other in pairwise(sorted(series)):
        if _one_block(series, one, other):
            continue
        low = one + window - 1 if one in begins else one
        high = other - window + 1 if other + 1 in begins else other
        if high - low > window:
            found.append((low, high))
    return found


def _one_block(series: Series, one: int, other: int) -> bool:
    """Two skips with the same error: what lies between them is not looked into, unless it is long."""
    left, right = series[one], series[other]
    alike = left.kind is right.kind is Kind.SKIP and left.signature == right.signature
    return alike and left.signature not in search.NO_BLOCK and other - one < search.BLIND
