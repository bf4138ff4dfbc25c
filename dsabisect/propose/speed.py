"""What an action costs and keeps in speed: the default selection timed without and with it, on the same machine.

Medians of many calls of the whole indexer, launched one by one (no CUDA graph), the time on the host included. Both
trees are timed in turns, and the better median of each counts: what disturbs a machine only ever makes it slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from dsabisect.model import Column, Observation, Outcome
from dsabisect.propose.prove import Proof

Timed = Callable[[str, Sequence[Column], int], Sequence[Observation]]  # (sha, columns, turn) → timed observations
ROUNDS = 2
MOST = 4  # cells of each kind that are timed: the most costly ones


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Cells that took one way without the action and one with it."""

    without: str  # the way, such as "fused"
    applied: str
    cells: int
    without_ms: float  # median over the cells
    applied_ms: float
    ratio: float  # applied / without, median over the cells: above 1 is slower


def columns_of(proof: Proof, defaults: Collection[str], cost: Callable[[str], int]) -> tuple[Column, ...]:
    """Columns of the default selection that run to their end in both trees, at most :data:`MOST` of each pair of ways.

    ``defaults``: names of the paths that force nothing. ``cost``: of a case.
    """
    kinds: dict[tuple[str, str], list[Column]] = {}
    for row in proof.rows:
        both = row.new.outcome is row.applied.outcome is Outcome.COMPLETED
        if row.column.path in defaults and both:
            kinds.setdefault((way(row.new), way(row.applied)), []).append(row.column)
    chosen = [sorted(columns, key=lambda c: -cost(c.case))[:MOST] for columns in kinds.values()]
    return tuple(column for columns in chosen for column in columns)


def measure(new: str, applied: str, columns: Sequence[Column], timed: Timed) -> tuple[Speed, ...]:
    """Time ``columns`` at both commits, in turns; () where the probe times nothing."""
    seen = [(timed(new, columns, turn), timed(applied, columns, turn)) for turn in range(ROUNDS)]
    kinds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for at in range(len(columns)):
        pairs = [(one[at], other[at]) for one, other in seen]
        if all(o.speed for pair in pairs for o in pair):
            key = (way(pairs[0][0]), way(pairs[0][1]))
            kinds.setdefault(key, []).append((_best([one for one, _ in pairs]), _best([other for _, other in pairs])))
    return tuple(
        Speed(
            without=before, applied=after, cells=len(times), without_ms=1e3 * median(a for a, _ in times),
            applied_ms=1e3 * median(b for _, b in times), ratio=median(b / a for a, b in times),
        )
        for (before, after), times in kinds.items()
    )  # fmt: skip


def _best(observations: Sequence[Observation]) -> float:
    return min(o.speed["median"] for o in observations)


def way(observation: Observation) -> str:
    """What the proof of an observation says it took: `fused/native`, `split`, …"""
    told = (observation.proof.get("path"), observation.proof.get("layout") or observation.proof.get("kernel"))
    return "/".join(filter(None, told)) or observation.column.path
