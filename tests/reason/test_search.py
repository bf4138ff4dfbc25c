"""The search: exhaustively on short histories, and the numbers of SEARCH.md on long ones."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsabisect.model import Verdict
from dsabisect.reason import search

GOOD, BAD, SKIP = Verdict.GOOD, Verdict.BAD, Verdict.SKIP


def play(n: int, culprit: int, unbuildable: Mapping[int, str]) -> tuple[int, tuple[int, ...]]:
    """(evaluations beyond the two ends, suspects) for one transition at ``culprit``."""
    seen, blocks, count = {0: GOOD, n - 1: BAD}, {}, 0
    while (probe := search.next_probe(n, seen, blocks)) is not None:
        assert probe not in seen, "asked twice"
        assert 0 < probe < n - 1
        count += 1
        if probe in unbuildable:
            seen[probe], blocks[probe] = SKIP, unbuildable[probe]
        else:
            seen[probe] = BAD if probe >= culprit else GOOD
    return count, search.suspects(n, seen)


def truth(culprit: int, unbuildable: Mapping[int, str]) -> tuple[int, ...]:
    """All that anyone could say: from after the last testable good to the first testable bad."""
    first, last = culprit, culprit
    while first - 1 in unbuildable:
        first -= 1
    while last in unbuildable:
        last += 1
    return tuple(range(first, last + 1))


def spread(n: int, lengths: tuple[int, ...]) -> dict[int, str]:
    """Blocks in that order, with equal stretches of testable commits between them."""
    gap, at, found = (n - sum(lengths)) // (len(lengths) + 1), 0, {}
    for number, length in enumerate(lengths):
        at += gap
        found |= dict.fromkeys(range(at, at + length), f"error {number}")
        at += length
    return found


def strewn(n: int, lengths: tuple[int, ...], seed: int) -> dict[int, str]:
    """Blocks in that order at random, at least one testable commit between two."""
    free, rng = n - 2 - sum(lengths) - (len(lengths) - 1), random.Random(seed)
    cuts = sorted(rng.randint(0, free) for _ in lengths)
    found, before = {}, 1
    for number, (cut, length) in enumerate(zip(cuts, lengths, strict=True)):
        begin = before + cut + number
        found |= dict.fromkeys(range(begin, begin + length), f"error {number}")
        before += length
    return found


# ---- exhaustive ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 11))
def test_every_history_with_every_pattern_of_skips(n: int) -> None:
    inner = range(1, n - 1)
    for size in range(len(inner) + 1):
        for chosen in combinations(inner, size):
            apart = {p: f"error {p}" for p in chosen}
            alike = dict.fromkeys(chosen, "error")
            unnamed = dict.fromkeys(chosen, "")
            for culprit in range(1, n):
                want = truth(culprit, apart)
                for unbuildable in (apart, unnamed):
                    assert play(n, culprit, unbuildable)[1] == want  # nothing is left out, nothing is left open
                count, found = play(n, culprit, alike)
                assert set(want) <= set(found)  # a block may hide a testable commit, never the culprit
                assert count <= len(inner)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 9, 16, 17, 127, 128, 129, 500])
def test_without_skips_it_is_bisection(n: int) -> None:
    runs = [play(n, culprit, {}) for culprit in range(1, n)]
    assert max(count for count, _ in runs) <= math.ceil(math.log2(n))
    assert [found for _, found in runs] == [(culprit,) for culprit in range(1, n)]


# ---- the numbers to beat ------------------------------------------------------------------------------------


def measure(n: int, unbuildable: Mapping[int, str], step: int = 1) -> tuple[float, int]:
    counts = []
    for culprit in range(1, n, step):
        count, found = play(n, culprit, unbuildable)
        assert culprit in found
        assert found == truth(culprit, unbuildable)
        counts.append(count)
    return sum(counts) / len(counts), max(counts)


def test_three_blocks_all_culprits() -> None:
    unbuildable = spread(502, (31, 50, 28))
    assert len(unbuildable) == 109
    mean, most = measure(502, unbuildable)
    print(f"502 commits, 109 unbuildable in blocks 31+50+28: mean {mean:.2f}, max {most} (git bisect run: 23.1, 64)")
    assert mean <= 12
    assert most <= 17


def test_three_blocks_wherever_they_lie() -> None:
    places = [strewn(502, (31, 50, 28), seed) for seed in range(500, 510)]
    assert len({min(place) for place in places}) > 5
    found = [measure(502, place, step=17) for place in places]
    means, most = [mean for mean, _ in found], max(most for _, most in found)
    print(f"ten random places: means {min(means):.2f} to {max(means):.2f}, max {most}")
    assert sum(means) / len(means) <= 12
    assert most <= 17


def test_three_different_errors_side_by_side() -> None:
    """The worst place: one testable commit between the blocks, which only a look beside a skip can find."""
    place = {p: f"error {p > 269} {p > 320}" for p in (*range(238, 269), *range(270, 320), *range(321, 349))}
    mean, most = measure(502, place, step=4)
    print(f"109 unbuildable in three blocks side by side: mean {mean:.2f}, max {most}")
    assert mean <= 15
    assert most <= 27


def test_the_middle_half_is_unbuildable() -> None:
    mean, most = measure(256, dict.fromkeys(range(64, 192), "error"))
    print(f"256 commits, middle half unbuildable: mean {mean:.2f}, max {most} (nearest-middle 138, widest-gap 17)")
    assert most <= 25


# ---- skips --------------------------------------------------------------------------------------------------


def test_two_skips_that_were_asked_for_are_no_block() -> None:
    """--skip names single commits: what lies between them can be tested."""
    n, seen = 41, {0: GOOD, 40: BAD, 10: SKIP, 30: SKIP}
    asked = {10: "asked", 30: "asked"}
    assert 10 < search.next_probe(n, seen, asked) < 30
    block = {10: "build_failed|error", 30: "build_failed|error"}
    probe = search.next_probe(n, seen, block)
    assert not 10 < probe < 30  # the same positions with a build error are one


def test_a_long_block_that_nobody_looked_into_is_looked_into() -> None:
    n = 300
    seen = {0: GOOD, n - 1: BAD, 1: SKIP, n - 2: SKIP}
    inside = search.next_probe(n, seen, {1: "e", n - 2: "e"})
    assert inside == (2 + n - 3) // 2
    short = {0: GOOD, 51: BAD, 1: SKIP, 50: SKIP}
    assert search.next_probe(52, short, {1: "e", 50: "e"}) is None


def test_a_testable_commit_between_two_blocks_of_one_error_is_found_when_they_lie_far_apart() -> None:
    unbuildable = {p: "e" for p in range(100, 400) if not 220 <= p < 280}
    for culprit in (230, 250, 279):
        assert play(502, culprit, unbuildable)[1] == (culprit,)


# ---- answers that do not fit one transition -----------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([GOOD, BAD, SKIP]), max_size=40), st.sampled_from(["", "one error"]))
def test_any_answers_end_and_accuse_within_the_evidence(answers: list[Verdict], signature: str) -> None:
    n = len(answers) + 2
    answer = [GOOD, *answers, BAD]
    seen, blocks = {0: GOOD, n - 1: BAD}, {}
    for _ in range(n):
        probe = search.next_probe(n, seen, blocks)
        if probe is None:
            break
        assert probe not in seen
        seen[probe] = answer[probe]
        if answer[probe] is SKIP:
            blocks[probe] = signature
    else:
        raise AssertionError("it did not end")
    found = search.suspects(n, seen)
    assert seen[found[0] - 1] is GOOD
    assert seen[found[-1]] is BAD
    assert all(seen.get(p, SKIP) is SKIP for p in found[:-1])


def some_answers(n: int) -> st.SearchStrategy[tuple[int, dict[int, Verdict]]]:
    answers = st.dictionaries(st.integers(1, max(1, n - 2)), st.sampled_from([GOOD, BAD, SKIP]))
    return st.tuples(st.just(n), answers)


@given(st.integers(2, 30).flatmap(some_answers))
def test_any_cached_answers_are_taken(given_: tuple[int, dict[int, Verdict]]) -> None:
    """Resume and replay hand over whatever is known, also answers that bisection would not have asked for."""
    n, known = given_
    seen = {**known, 0: GOOD, n - 1: BAD}
    probe = search.next_probe(n, seen)
    good, bad = search.bounds(n, seen)
    assert probe is None or (good < probe < bad and probe not in seen)
    assert probe is not None or all(p in seen for p in range(good + 1, bad))
    assert search.next_probe(n, dict(reversed(seen.items()))) == probe  # the order of what is known does not matter


def test_on_off_on_gives_the_first_transition() -> None:
    seen = {0: GOOD, 3: BAD, 5: GOOD, 7: BAD, 9: BAD}
    assert search.bounds(10, seen) == (0, 3)
    assert search.suspects(10, seen) == (1, 2, 3)


@pytest.mark.parametrize(
    ("n", "seen"), [(0, {}), (1, {}), (5, {0: BAD}), (5, {4: GOOD}), (5, {0: SKIP}), (5, {4: SKIP})]
)
def test_ends_that_do_not_hold_are_refused(n: int, seen: dict[int, Verdict]) -> None:
    for ask in (search.next_probe, search.suspects):
        with pytest.raises(ValueError, match="position"):
            ask(n, seen)


# ---- looking ahead ------------------------------------------------------------------------------------------


def test_lookahead_is_what_the_next_answers_lead_to() -> None:
    n, seen = 100, {0: GOOD, 99: BAD, 40: SKIP}
    blocks = {40: "e"}
    found = search.lookahead(n, seen, blocks, 3)
    first = search.next_probe(n, seen, blocks)
    after = {search.next_probe(n, {**seen, first: answer}, blocks) for answer in (GOOD, BAD)}
    assert found[0] == first
    assert set(found[1:]) == after
    assert search.lookahead(n, seen, blocks, 1) == (first,)
    assert search.lookahead(n, seen, blocks, 0) == ()
    assert search.lookahead(2, {0: GOOD, 1: BAD}, {}, 5) == ()


def test_lookahead_never_names_a_commit_twice() -> None:
    found = search.lookahead(12, {0: GOOD, 11: BAD}, {}, 50)
    assert len(set(found)) == len(found)
    assert set(found) == set(range(1, 11))
