from __future__ import annotations

import math
import random

import pytest

from dsabisect.reason import flakes
from dsabisect.reason.flakes import Runs


def play(n: int, culprit: int, before: float, after: float, rng: random.Random) -> tuple[int, int]:
    """(answer, runs), both ends run once first."""
    tally: dict[int, Runs] = {}
    count = 0

    def run(position: int) -> None:
        nonlocal count
        count += 1
        failed = rng.random() < (after if position >= culprit else before)
        seen = tally.get(position, Runs())
        tally[position] = Runs(failed=seen.failed + failed, passed=seen.passed + (not failed))

    run(0)
    run(n - 1)
    while (position := flakes.next_run(n, tally)) is not None:
        run(position)
        assert count < 300
    return flakes.best(flakes.posterior(n, tally))[0], count


def test_ten_and_ninety_percent() -> None:
    """SEARCH.md: n = 128, every culprit: at least 99 % right, at most 26 runs on average."""
    rng = random.Random(7)
    played = [(culprit, *play(128, culprit, 0.1, 0.9, rng)) for culprit in range(1, 128)]
    assert sum(culprit == answer for culprit, answer, _ in played) >= 126
    assert sum(runs for _, _, runs in played) / len(played) <= 26


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (0.0, 0.5), (0.05, 0.6)])
def test_other_rates(before: float, after: float) -> None:
    rng = random.Random(11)
    right = [play(32, culprit, before, after, rng)[0] == culprit for culprit in range(1, 32)]
    assert sum(right) >= 29


def test_nobody_is_accused_of_what_was_always_so() -> None:
    always = {0: Runs(failed=6, passed=2), 31: Runs(failed=6, passed=2), 15: Runs(failed=5, passed=2)}
    assert flakes.best(flakes.posterior(32, always))[0] == 0
    never = {0: Runs(passed=8), 31: Runs(passed=8), 15: Runs(passed=8)}
    assert flakes.best(flakes.posterior(32, never))[0] == 32


def test_posterior_against_the_definition() -> None:
    """Beta-Bernoulli evidence of both sides, by numeric integration over the two rates."""
    tally = {1: Runs(failed=1, passed=3), 3: Runs(failed=4, passed=1)}
    n = 5

    def evidence(failed: int, passed: int, prior: tuple[float, float]) -> float:
        a, b = prior
        steps = 20_000
        norm = math.gamma(a + b) / math.gamma(a) / math.gamma(b)
        rates = ((k + 0.5) / steps for k in range(steps))
        return sum(norm * r ** (a - 1 + failed) * (1 - r) ** (b - 1 + passed) for r in rates) / steps

    want = []
    for c in range(n + 1):
        left = [r for p, r in tally.items() if p < c]
        right = [r for p, r in tally.items() if p >= c]
        sides = ((left, flakes.BEFORE), (right, flakes.AFTER))
        want.append(
            math.prod(evidence(sum(r.failed for r in s), sum(r.passed for r in s), prior) for s, prior in sides)
        )
    total = sum(want)
    assert flakes.posterior(n, tally) == pytest.approx([w / total for w in want], rel=1e-4)


def test_credible_set_holds_the_mass() -> None:
    assert flakes.credible([0.0, 0.5, 0.3, 0.16, 0.04]) == (1, 2, 3)
    assert flakes.credible([0.02, 0.97, 0.01]) == (1,)


def test_untestable_positions_are_never_asked_for() -> None:
    untestable = frozenset(range(5, 11))
    tally = {0: Runs(passed=1), 15: Runs(failed=1)}
    for _ in range(40):
        position = flakes.next_run(16, tally, untestable)
        if position is None:
            break
        assert position not in untestable
        seen = tally.get(position, Runs())
        bad = position >= 8
        tally[position] = Runs(failed=seen.failed + bad, passed=seen.passed + (not bad))
    chances = flakes.posterior(16, tally)
    assert set(flakes.credible(chances)) <= set(range(5, 12))
