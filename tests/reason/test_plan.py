"""The plan, played against known histories: exhaustively where they are short, at all culprits where they are long."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, product

import pytest

from dsabisect.model import Column
from dsabisect.reason import plan, timeline
from dsabisect.reason.plan import Plan
from dsabisect.reason.timeline import GOOD, Kind, State, Step

ONE = Column(path="p", case="c")
BAD = State(kind=Kind.BAD, signature="x")
OF = {
    ".": GOOD, "X": BAD, "a": State(kind=Kind.SKIP, signature="a"), "b": State(kind=Kind.SKIP, signature="b"),
    "-": timeline.ABSENT, "~": timeline.OFF, "?": State(kind=Kind.SKIP, signature="asked"),
}  # fmt: skip


def play(
    history: Sequence[State], suspects: Iterable[int] = (), window: int = 8, keys: Sequence[object] = ()
) -> tuple[list[int], list[Step], Plan]:
    """(positions in the order in which they were measured, steps, the plan)"""
    search = Plan(
        keys=keys or range(len(history)), columns=(ONE,), suspects=frozenset(suspects), window=window
    )  # fmt: skip
    asked: list[int] = []
    while (probe := search.next()) is not None:
        assert probe.columns == (ONE,)
        assert probe.position not in asked, "nothing is measured twice"
        asked.append(probe.position)
        search.take(probe.position, ONE, history[probe.position])
    return asked, timeline.steps(search.series[ONE]), search


def states(letters: str) -> list[State]:
    return [OF[c] for c in letters]


def with_changes(n: int, at: Iterable[int]) -> list[State]:
    """Good at first, other at each of ``at``."""
    turns = set(at)
    bad, found = False, []
    for position in range(n):
        bad ^= position in turns
        found.append(BAD if bad else GOOD)
    return found


# ---- plain bisection ----------------------------------------------------------------------------------------


def test_first_on_every_history_of_up_to_ten_commits() -> None:
    """Good, bad and skip in every order: the answer always holds a real first change, and is one when it can be."""
    for n in range(2, 11):
        for middle in product(".X?", repeat=n - 2):
            letters = "." + "".join(middle) + "X"
            _, _, search = play(states(letters), window=0)
            (step,) = plan.first_step(search.series[ONE])
            assert (letters[step.after], letters[step.upto]) == (".", "X")
            assert set(letters[step.after + 1 : step.upto]) <= {"?"}, "everything testable in between was measured"
            if ".X" in letters.replace("?", "") and letters.replace("?", "").count(".X") == 1:  # one change
                assert step.after < letters.index("X") <= step.upto


@pytest.mark.parametrize("n", [2, 3, 16, 100, 128, 500])
def test_first_needs_as_many_probes_as_bisection(n: int) -> None:
    for culprit in range(1, n):
        asked, (step,), _ = play(with_changes(n, [culprit]), window=0)
        assert step.upto == culprit
        assert step.after == culprit - 1
        assert len(asked) <= math.ceil(math.log2(n - 1)) + 2 if n > 2 else len(asked) == 2


def test_long_blocks_that_do_not_build() -> None:
    """SEARCH.md, row one: 502 commits, blocks of 31, 50 and 28, every culprit: mean at most 12, worst at most 17."""
    broken = {*range(60, 91), *range(200, 250), *range(380, 408)}
    counts = []
    for culprit in range(1, 502):
        history = [OF["a"] if p in broken else s for p, s in enumerate(with_changes(502, [culprit]))]
        asked, (step,), _ = play(history, window=0)
        assert step.after < culprit <= step.upto
        counts.append(len(asked) - 2)
    assert sum(counts) / len(counts) <= 12
    assert max(counts) <= 17


def test_the_middle_half_does_not_build() -> None:
    for culprit in [*range(1, 65), *range(192, 256)]:
        history = [OF["a"] if 64 <= p < 192 else s for p, s in enumerate(with_changes(256, [culprit]))]
        asked, (step,), _ = play(history, window=0)
        assert step.after < culprit <= step.upto
        assert len(asked) <= 25


# ---- timeline -----------------------------------------------------------------------------------------------


def test_every_timeline_of_up_to_eight_commits_is_told_whole_when_all_are_looked_at() -> None:
    """With a window of one nothing can hide: good, bad and skip in every order."""
    for n in range(2, 9):
        for letters in product(".X?", repeat=n):
            history = states("".join(letters))
            _, steps, search = play(history, window=1)
            assert steps == timeline.steps(dict(enumerate(history)))
            assert all(search.series[ONE][p] == history[p] for p in search.series[ONE])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_windows_are_found_wherever_they_lie(count: int) -> None:
    """48 commits, states that last at least 8: all arrangements, nobody announced anything."""
    for turns in combinations(range(8, 41), count):
        if all(b - a >= 8 for a, b in pairwise(turns)):
            _, steps, _ = play(with_changes(48, turns))
            assert [(s.after, s.upto) for s in steps] == [(t - 1, t) for t in turns]


def test_a_short_window_is_found_when_it_is_announced() -> None:
    """Off for one commit, on for one: as sglang's flips, which lie nine commits of thousands apart."""
    history = with_changes(100, [30, 60, 61, 62])
    _, steps, _ = play(history, suspects=[60, 61, 62])
    assert [s.upto for s in steps] == [30, 60, 61, 62]


def test_all_transitions_in_24_evaluations() -> None:
    """SEARCH.md: n = 128, 1, 3 or 5 transitions, windows of 8 or more; what reverts or switches says so."""
    rng = random.Random(20261201)
    for count in (1, 3, 5):
        for _ in range(150):
            free = 128 - 8 * (count + 1)
            cuts = sorted(rng.randint(0, free) for _ in range(count))
            turns = [cut + 8 * (number + 1) for number, cut in enumerate(cuts)]
            asked, steps, _ = play(with_changes(128, turns), suspects=turns[1:])
            assert [s.upto for s in steps] == turns
            assert len(asked) <= 24, (turns, asked)


def test_equal_trees_are_measured_once() -> None:
    """A revert returns to the tree of before: its answer is known."""
    history = with_changes(12, [5, 6])
    keys = [*range(6), 4, *range(6, 11)]  # position 6 is position 4 again
    asked, steps, search = play(history, suspects=[5, 6], window=20, keys=keys)
    assert not {4, 6} <= set(asked)
    assert search.series[ONE][6] == GOOD
    assert [s.upto for s in steps] == [5, 6]


def test_columns_share_evaluations_and_are_left_alone_once_decided() -> None:
    columns = tuple(Column(path="p", case=c) for c in "abc")
    of = {columns[0]: with_changes(64, [20]), columns[1]: with_changes(64, [20]), columns[2]: with_changes(64, [50])}
    search = Plan(keys=range(64), columns=columns, window=0)
    asked: dict[int, tuple[Column, ...]] = {}
    while (probe := search.next()) is not None:
        assert probe.position not in asked
        asked[probe.position] = probe.columns
        for column in probe.columns:
            search.take(probe.position, column, of[column][probe.position])
    assert asked[0] == asked[63] == columns
    assert asked[19] == columns[:2], "c was decided to lie later"
    assert len(asked) <= 2 + 6 + 6
    assert [plan.first_step(search.series[c])[0].upto for c in columns] == [20, 20, 50]


def test_a_closed_column_asks_for_nothing() -> None:
    search = Plan(keys=range(8), columns=(ONE,), closed={ONE})
    assert search.next() is None


def test_ahead_names_what_is_asked_next() -> None:
    """The first is the next probe; whatever it shows, what follows it was foreseen too."""
    search = Plan(keys=range(64), columns=(ONE,), window=0)
    for position, state in ((0, GOOD), (63, BAD)):
        search.take(position, ONE, state)
    foreseen = search.ahead(3)
    probe = search.next()
    assert probe is not None
    assert foreseen[0] == probe.position
    for state in (GOOD, BAD):
        after = Plan(keys=range(64), columns=(ONE,), window=0, series={ONE: dict(search.series[ONE])})
        after.take(probe.position, ONE, state)
        following = after.next()
        assert following is not None
        assert following.position in foreseen


def test_remaining_counts_down_while_nothing_changes() -> None:
    search = Plan(keys=range(40), columns=(ONE,))
    counts = []
    while (probe := search.next()) is not None:
        counts.append(search.remaining())
        search.take(probe.position, ONE, GOOD)
    assert counts == list(range(len(counts), 0, -1))


def test_a_step_that_ends_at_a_suspect_is_asked_there_first() -> None:
    step = Step(after=0, upto=20, old=GOOD, new=BAD)
    assert plan.inside(step, {0: GOOD, 20: BAD}, suspects=[20]) == 19
    assert plan.inside(step, {0: GOOD, 20: BAD}) == 10


def test_absent_inside_a_mending_step_is_passed_over() -> None:
    """A fault that goes away with its path is looked for where the path is good again."""
    _, steps, _ = play(states("..XX----....."), window=2)
    assert [(s.after, s.upto) for s in steps] == [(1, 2), (3, 8)]


def test_marks_are_not_measured() -> None:
    search = Plan(keys=range(16), columns=(ONE,), window=0)
    search.series[ONE][8] = BAD
    asked = []
    while (probe := search.next()) is not None:
        asked.append(probe.position)
        search.take(probe.position, ONE, with_changes(16, [3])[probe.position])
    assert 8 not in asked
    assert plan.first_step(search.series[ONE])[0].upto == 3


def test_too_short() -> None:
    with pytest.raises(ValueError, match="good and a bad end"):
        Plan(keys=[1], columns=(ONE,))
