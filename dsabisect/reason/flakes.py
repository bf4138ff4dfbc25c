"""Bayesian search for one column whose answers do not repeat. Pure.

Model: before the culprit a run fails with an unknown rate, from the culprit on with another, larger one. Both rates
are integrated out (a Beta prior each), so that a test that fails one time in five after the culprit and never before
is found as well as one that fails now and then on both sides. The first bad position may be any of 1..n-1 with equal
chance, or 0 (it failed from the start), or n (it does not fail), so that nobody is accused of what was always so.
The next run is the one from which the posterior is expected to learn most (greatest expected loss of entropy, as in
Ben-Or and Hassidim's noisy search, FOCS 2008).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BEFORE = (1.0, 4.0)  # Beta prior of the failure rate of good commits: most runs pass
AFTER = (4.0, 1.0)  # of bad ones: most runs fail
SURE = 0.95  # posterior at which the search ends
NEAR = 48  # positions that are weighed for the next run: those around which the posterior lies


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What was seen at one position."""

    failed: int = 0
    passed: int = 0


Tally = Mapping[int, Runs]


def posterior(n: int, tally: Tally) -> list[float]:
    """Chance of each of 0..n to be the first bad position; 0: bad from the start, n: never."""
    failed, passed = _before(n, tally)
    logs = [
        _evidence(failed[c], passed[c], BEFORE) + _evidence(failed[n] - failed[c], passed[n] - passed[c], AFTER)
        for c in range(n + 1)
    ]
    top = max(logs)
    weights = [math.exp(value - top) for value in logs]
    total = sum(weights)
    return [weight / total for weight in weights]


def _before(n: int, tally: Tally) -> tuple[list[int], list[int]]:
    """Failures and passes at positions < c, for c = 0..n."""
    failed, passed = [0], [0]
    for position in range(n):
        runs = tally.get(position, Runs())
        failed.append(failed[-1] + runs.failed)
        passed.append(passed[-1] + runs.passed)
    return failed, passed


def _evidence(failed: int, passed: int, prior: tuple[float, float]) -> float:
    """log of the Beta-Bernoulli evidence of so many failures and passes."""
    return _beta(prior[0] + failed, prior[1] + passed) - _beta(*prior)


def _beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def best(chances: Sequence[float]) -> tuple[int, float]:
    """The most likely culprit and its chance."""
    position = max(range(len(chances)), key=lambda p: (chances[p], -p))
    return position, chances[position]


def credible(chances: Sequence[float], mass: float = SURE) -> tuple[int, ...]:
    """The smallest set of positions that holds ``mass`` of the posterior, in order."""
    chosen: list[int] = []
    held = 0.0
    for position in sorted(range(len(chances)), key=lambda p: (-chances[p], p)):
        if held >= mass:
            break
        chosen.append(position)
        held += chances[position]
    return tuple(sorted(chosen))


def next_run(n: int, tally: Tally, untestable: frozenset[int] = frozenset(), sure: float = SURE) -> int | None:
    """The position to run next; None when one culprit is as good as certain, or nothing can be run."""
    chances = posterior(n, tally)
    if best(chances)[1] >= sure:
        return None
    failed, passed = _before(n, tally)
    good = [_rate(failed[c], passed[c], BEFORE) for c in range(n + 1)]
    bad = [_rate(failed[n] - failed[c], passed[n] - passed[c], AFTER) for c in range(n + 1)]
    options = [p for p in _options(chances) if p < n and p not in untestable]
    return min(options, key=lambda p: (_entropy_after(p, chances, good, bad), p), default=None)


def _rate(failed: int, passed: int, prior: tuple[float, float]) -> float:
    return (failed + prior[0]) / (failed + passed + prior[0] + prior[1])


def _options(chances: Sequence[float]) -> list[int]:
    """Positions worth weighing: neighbours of the likely culprits, and where the posterior is cut into equal parts."""
    likely = sorted(range(len(chances)), key=lambda p: -chances[p])[: NEAR // 4]
    cuts, held, step = [], 0.0, 1
    for position, chance in enumerate(chances):
        held += chance
        while step < NEAR // 2 and held >= step / (NEAR // 2):
            cuts.append(position)
            step += 1
    around = {p + d for p in (*likely, *cuts) for d in (-1, 0)}
    return sorted(p for p in around if 0 <= p < len(chances))


def _entropy_after(position: int, chances: Sequence[float], good: Sequence[float], bad: Sequence[float]) -> float:
    """Expected entropy (nats) of the posterior once ``position`` was run once more."""
    fails = [w * (bad[c] if c <= position else good[c]) for c, w in enumerate(chances)]
    passes = [w - f for w, f in zip(chances, fails, strict=True)]
    return _unscaled(fails) + _unscaled(passes)


def _unscaled(weights: Sequence[float]) -> float:
    """Total weight times the entropy of the normalised weights."""
    total = sum(weights)
    return total * math.log(total) - sum(w * math.log(w) for w in weights if w > 0) if total > 0 else 0.0
