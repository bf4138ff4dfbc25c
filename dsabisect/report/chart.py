"""Where the marks of a chart stand: one line a column, error on a log scale, its tolerance as a tick. Pure numbers.

Coordinates are those of an SVG viewBox that is :data:`WIDTH` wide; the template draws them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dsabisect.report.changes import Chart, Mark

WIDTH, LEFT, RIGHT, LINE, TOP = 780, 300, 60, 18, 24
DECADES = 12  # at most so many powers of ten; what is smaller stands at the left edge


@dataclass(frozen=True, kw_only=True)
class Line:
    """One column: x of each mark, None where there is nothing to show."""

    column: str
    y: float
    allowed: float
    before: float | None
    after: float | None
    mean: float | None
    told: str  # the numbers in words, also for a screen reader
    ok_before: bool
    ok_after: bool


@dataclass(frozen=True, kw_only=True)
class Drawn:
    title: str
    height: int
    ticks: tuple[tuple[float, str], ...]  # x, label
    lines: tuple[Line, ...]
    left_out: int


def draw(chart: Chart) -> Drawn:
    low, high = _decades(chart.marks)

    def x(value: float | None) -> float | None:
        if value is None:
            return None
        power = high if math.isinf(value) else math.log10(value) if value > 0 else low
        part = (min(max(power, low), high) - low) / (high - low)
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    lines = [
        Line(
            column=mark.column, y=TOP + LINE * at + LINE / 2, allowed=x(mark.allowed) or LEFT, before=x(mark.before),
            after=x(mark.after), mean=x(mark.after_mean), told=told(mark), ok_before=mark.ok_before,
            ok_after=mark.ok_after,
        )
        for at, mark in enumerate(chart.marks)
    ]  # fmt: skip
    step = max(1, math.ceil((high - low) / 6))
    ticks = tuple((x(10.0**power) or LEFT, f"1e{power}") for power in range(low, high + 1, step))
    height = TOP + LINE * len(lines) + 8
    return Drawn(title=chart.title, height=height, ticks=ticks, lines=tuple(lines), left_out=chart.left_out)


def told(mark: Mark) -> str:
    sides = [(word, value) for word, value in (("before", mark.before), ("after", mark.after)) if value is not None]
    return ", ".join(f"{word} {value:.3g}" for word, value in sides) + f", allowed {mark.allowed:.3g}"


def _decades(marks: Iterable[Mark]) -> tuple[int, int]:
    """The powers of ten that hold every finite value above zero."""
    values = [
        v for m in marks for v in (m.allowed, m.before, m.after, m.after_mean) if v and math.isfinite(v) and v > 0
    ]
    if not values:
        return -8, 0
    high = math.ceil(math.log10(max(values)) - 1e-9)
    low = math.floor(math.log10(min(values)) + 1e-9)
    return max(min(low, high - 1), high - DECADES), high
