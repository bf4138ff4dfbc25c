"""Binary search over opaque positions, with skips. Pure: what is seen goes in, the next position comes out.

Positions run from 0 (good) to n-1 (bad). Because everything comes from a mapping, cached results, resume and replay are
the same call. Untestable commits come in blocks: a span between two skips of the same signature counts as one block,
and the widest stretch outside of the blocks is probed in its middle, so that a block costs its two edges and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsabisect.model import Verdict

Seen = Mapping[int, Verdict]


def bounds(n: int, seen: Seen) -> tuple[int, int]:
    """(last good before it, first bad). With answers on, off, on, this is the first transition."""
    bad = min(p for p, v in {n - 1: Verdict.BAD, **seen}.items() if v is Verdict.BAD)
    good = max((p for p, v in {0: Verdict.GOOD, **seen}.items() if v is Verdict.GOOD and p < bad), default=0)
    return good, bad


def suspects(n: int, seen: Seen) -> tuple[int, ...]:
    """Positions that may have introduced the change: after the last good, up to the first bad."""
    good, bad = bounds(n, seen)
    return tuple(range(good + 1, bad + 1))


def next_probe(n: int, seen: Seen, blocks: Mapping[int, str] = {}) -> int | None:
    """The position to measure next; None when nothing testable is left between the last good and the first bad."""
    good, bad = bounds(n, seen)
    stretches = list(_stretches(good, bad, seen, blocks))
    if not stretches:
        return None
    first, last = max(stretches, key=lambda s: (s[1] - s[0], -s[0]))
    return (first + last) // 2


def _stretches(good: int, bad: int, seen: Seen, blocks: Mapping[int, str]) -> Iterator[tuple[int, int]]:
    """Maximal runs (first, last) of positions between good and bad that are neither seen nor inside a block."""
    closed = _closed(good, bad, seen, blocks)
    first = None
    for position in range(good + 1, bad + 1):
        free = position < bad and position not in seen and position not in closed
        if free and first is None:
            first = position
        elif not free and first is not None:
            yield first, position - 1
            first = None


def _closed(good: int, bad: int, seen: Seen, blocks: Mapping[int, str]) -> set[int]:
    """Positions between two neighbouring skips of the same signature."""
    skips = sorted(p for p, v in seen.items() if v is Verdict.SKIP and good < p < bad)
    closed: set[int] = set()
    for one, other in zip(skips, skips[1:], strict=False):
        if blocks.get(one, "") == blocks.get(other, "") != "":
            closed.update(range(one, other + 1))
    return closed


def lookahead(n: int, seen: Seen, blocks: Mapping[int, str], count: int) -> tuple[int, ...]:
    """The ``count`` positions that will most likely be asked for next, for checkouts and builds ahead of time."""
    found: list[int] = []
    waiting = [dict(seen)]
    while waiting and len(found) < count:
        assumed = waiting.pop(0)
        probe = next_probe(n, assumed, blocks)
        if probe is None:
            continue
        if probe not in found:
            found.append(probe)
        waiting += [{**assumed, probe: Verdict.GOOD}, {**assumed, probe: Verdict.BAD}]
    return tuple(found)
