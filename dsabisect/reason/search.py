"""Binary search over opaque positions, with skips. Pure: what is seen goes in, the next position comes out.

Positions run from 0 (good) to n-1 (bad). Because everything comes from a mapping, cached results, resume and replay are
the same call.

Untestable commits come in blocks: a span between two skips of the same signature counts as one block and is left
alone. Among the rest the probe that splits the suspects best is taken, ``(p - good)(bad - p)``, times the chance that
it can be tested at all, ``d / (d + 16)`` at distance d from the nearest skip. Without skips that is bisection:
ceil(log2 n). For 502 commits with blocks of 31, 50 and 28 (SEARCH.md) it needs 11.4 probes on average and at most 16
when they lie evenly, 10.3 to 12.8 and at most 17 at random places, 14.6 and at most 25 when three different errors lie
side by side; the middle of the widest stretch, which walks away from a block in steps that split badly, needs up to 20
at random places and 26 side by side. 16 was chosen from 8, 12, 16, 20, 24 and 32.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from dsabisect.model import Reason, Verdict

Seen = Mapping[int, Verdict]
Blocks = Mapping[int, str]

NEAR = 16  # commits: at this distance from a skip, half of the commits are taken to be testable
BLIND = 64  # commits: a longer span inside a block, in which nothing was probed, is looked into before it is believed
NO_BLOCK = frozenset({"", Reason.ASKED.value, Reason.FLAKY.value})  # skips that say nothing about their neighbours
NOTHING: Blocks = {}


def bounds(n: int, seen: Seen) -> tuple[int, int]:
    """(last good before it, first bad). With answers on, off, on, this is the first transition.

    Raises:
        ValueError: fewer than two positions, or an end that was seen otherwise than the search takes for granted.
    """
    if n < 2:
        raise ValueError(f"a search needs a good and a bad end, got {n} position(s)")
    if seen.get(0, Verdict.GOOD) is not Verdict.GOOD or seen.get(n - 1, Verdict.BAD) is not Verdict.BAD:
        raise ValueError(f"position 0 must be good and position {n - 1} bad before a search begins")
    bad = min((p for p, v in seen.items() if v is Verdict.BAD), default=n - 1)
    good = max((p for p, v in seen.items() if v is Verdict.GOOD and p < bad), default=0)
    return good, bad


def suspects(n: int, seen: Seen) -> tuple[int, ...]:
    """Positions that may have introduced the change: after the last good, up to the first bad. Never empty."""
    good, bad = bounds(n, seen)
    return tuple(range(good + 1, bad + 1))


def next_probe(n: int, seen: Seen, blocks: Blocks = NOTHING) -> int | None:
    """The position to measure next; None when nothing testable is left between the last good and the first bad.

    ``blocks``: position → signature of the skip there. Never a position that was seen, so that it always ends.
    """
    good, bad = bounds(n, seen)
    closed = _closed(good, bad, seen, blocks)
    free = [p for p in range(good + 1, bad) if p not in seen and p not in closed]
    if not free:
        return _inside_a_block(p for p in sorted(closed) if p not in seen)
    skips = sorted({p for p in seen if good < p < bad} | closed)
    return max(free, key=lambda p: ((p - good) * (bad - p) * _testable(p, skips), -p))


def _testable(position: int, skips: list[int]) -> float:
    """The chance that ``position`` can be tested, by its distance to the nearest of ``skips`` (sorted)."""
    at = bisect(skips, position)
    distances = [abs(position - other) for other in skips[max(0, at - 1) : at + 1]]
    return min(distances) / (min(distances) + NEAR) if distances else 1.0


def _closed(good: int, bad: int, seen: Seen, blocks: Blocks) -> set[int]:
    """Positions between two neighbouring skips of the same signature, not seen themselves."""
    skips = sorted(p for p, v in seen.items() if v is Verdict.SKIP and good < p < bad)
    closed: set[int] = set()
    for one, other in pairwise(skips):
        signature = blocks.get(one, "")
        if signature == blocks.get(other, "") and signature not in NO_BLOCK:
            closed.update(range(one + 1, other))
    return closed


def _inside_a_block(unseen: Iterable[int]) -> int | None:
    """The middle of the longest run of ``unseen``, when it is too long to be believed unseen."""
    first, last = max(_runs(unseen), key=lambda run: (run[1] - run[0], -run[0]), default=(0, -1))
    return (first + last) // 2 if last - first >= BLIND else None


def _runs(positions: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers in a sorted sequence."""
    first = last = None
    for position in positions:
        if last is not None and first is not None and position != last + 1:
            yield first, last
            first = position
        first, last = (position if first is None else first), position
    if first is not None and last is not None:
        yield first, last


def lookahead(n: int, seen: Seen, blocks: Blocks, k: int) -> tuple[int, ...]:
    """The ``k`` positions that will most likely be asked for next, for checkouts and builds ahead of time.

    The next probe first, then the probes that follow each of its answers, breadth first.
    """
    found: list[int] = []
    waiting = [dict(seen)]
    while waiting and len(found) < k:
        assumed = waiting.pop(0)
        probe = next_probe(n, assumed, blocks)
        if probe is None:
            continue
        if probe not in found:
            found.append(probe)
        waiting += [{**assumed, probe: Verdict.GOOD}, {**assumed, probe: Verdict.BAD}]
    return tuple(found)
