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
    spread: float  # most that the turns of one tree and cell differ, as a share: a smaller change of ratio says nothing


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
    turns = [(timed(new, columns, turn), timed(applied, columns, turn)) for turn in range(ROUNDS)]
    kinds: dict[tuple[str, str], list[tuple[list[float], list[float]]]] = {}
    for at in range(len(columns)):
        seen = [(before[at], after[at]) for before, after in turns]
        if all(o.speed for pair in seen for o in pair):
            key = (way(seen[0][0]), way(seen[0][1]))
            kinds.setdefault(key, []).append(
                ([a.speed["median"] for a, _ in seen], [b.speed["median"] for _, b in seen])
            )
    return tuple(_speed(before, after, cells) for (before, after), cells in kinds.items())


def _speed(without: str, applied: str, cells: Sequence[tuple[list[float], list[float]]]) -> Speed:
    """``cells``: for each cell the medians of its turns, without the action and with it, in seconds."""
    best = [(min(a), min(b)) for a, b in cells]
    return Speed(
        without=without, applied=applied, cells=len(cells), without_ms=1e3 * median(a for a, _ in best),
        applied_ms=1e3 * median(b for _, b in best), ratio=median(b / a for a, b in best),
        spread=max(max(turns) / min(turns) - 1 for cell in cells for turns in cell),
    )  # fmt: skip


def way(observation: Observation) -> str:
    """What the proof of an observation says it took: `fused/native`, `split`, …"""
    told = (observation.proof.get("path"), observation.proof.get("layout") or observation.proof.get("kernel"))
    return "/".join(filter(None, told)) or observation.column.path
