"""Which part of a bundled change must be reverted: hunks, subsets of them, and delta debugging over subsets.

Minimal in the sense of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002), ddmin: no
single hunk can be left out of the answer. When few hunks are there, every smaller subset is tried first, so the answer
has the fewest hunks that there can be.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import comb

EXHAUSTIVE = 64  # subsets that may be tried in order of size before ddmin takes over
Mends = Callable[[tuple[int, ...]], bool]


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """Lines ``old`` of the parent became ``new``, at line ``at`` (from 0) of the culprit's file."""

    path: str
    at: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    whole: bool = False  # the file was added, removed or is binary: all or nothing

    def __str__(self) -> str:
        return f"{self.path}:{self.at + 1} (+{len(self.new)} -{len(self.old)})"


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The smallest set of hunks whose revert mends what broke."""

    hunks: tuple[int, ...]
    tried: int  # subsets measured
    interacting: bool  # several hunks are needed together
    smallest: bool  # True: every smaller subset was tried; False: no single hunk can be left out


@dataclass(kw_only=True)
class _Trials:
    """Each subset is measured once."""

    mends: Mends
    limit: int
    seen: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def __call__(self, subset: Iterable[int]) -> bool:
        key = tuple(sorted(subset))
        if key not in self.seen:
            if len(self.seen) >= self.limit:
                raise Exhausted
            self.seen[key] = self.mends(key)
        return self.seen[key]


class Exhausted(Exception):
    """The number of subsets that may be measured is reached."""


def split(old: Mapping[str, bytes | None], new: Mapping[str, bytes | None]) -> tuple[Hunk, ...]:
    """Hunks of parent → culprit, by path and line. None stands for a file that is not there."""
    found: list[Hunk] = []
    for path in sorted({*old, *new}):
        before, after = old.get(path), new.get(path)
        if before == after:
            continue
        if before is None or after is None or b"\0" in before + after:
            found.append(Hunk(path=path, at=0, old=_lines(before), new=_lines(after), whole=True))
            continue
        a, b = _lines(before), _lines(after)
        matcher = difflib.SequenceMatcher(a=[_key(x) for x in a], b=[_key(x) for x in b], autojunk=False)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes():
            if tag != "equal":
                found.append(Hunk(path=path, at=j1, old=a[i1:i2], new=b[j1:j2]))
    return tuple(found)


def reverted(
    hunks: Sequence[Hunk],
    chosen: Iterable[int],
    old: Mapping[str, bytes | None],
    new: Mapping[str, bytes | None],
) -> dict[str, bytes | None]:
    """The culprit's files with the chosen hunks taken back: files that change, None for one that goes."""
    wanted = set(chosen)
    files: dict[str, bytes | None] = {}
    for path in sorted({hunks[n].path for n in wanted}):
        mine = [(hunks[n], n in wanted) for n in range(len(hunks)) if hunks[n].path == path]
        if mine[0][0].whole:
            files[path] = old.get(path)
            continue
        lines = list(_lines(new.get(path)))
        for hunk, back in sorted(mine, key=lambda pair: -pair[0].at):
            if back:
                lines[hunk.at : hunk.at + len(hunk.new)] = hunk.old
        files[path] = b"".join(lines)
    return files


def smallest(count: int, mends: Mends, limit: int = 200) -> Smallest | None:
    """The smallest subset of ``count`` hunks that ``mends``; None when even all of them do not.

    ``mends`` is asked at most ``limit`` times and once for each subset; then the best so far is the answer.
    """
    trial = _Trials(mends=mends, limit=max(1, limit))
    everything = tuple(range(count))
    if count == 0 or not trial(everything):
        return None
    best = everything
    proven = False
    try:
        for size in range(1, count):
            if sum(comb(count, n) for n in range(1, size + 1)) > EXHAUSTIVE:
                break
            for subset in combinations(everything, size):
                if trial(subset):
                    return _answer(subset, trial, smallest=True)
            proven = size == count - 1
        if proven or count == 1:
            return _answer(everything, trial, smallest=True)
        for subset in _ddmin(everything, trial):
            best = subset
    except Exhausted:
        pass
    return _answer(best, trial, smallest=False)


def _answer(subset: Sequence[int], trial: _Trials, *, smallest: bool) -> Smallest:
    return Smallest(hunks=tuple(subset), tried=len(trial.seen), interacting=len(subset) > 1, smallest=smallest)


def _ddmin(everything: tuple[int, ...], trial: _Trials) -> Iterable[tuple[int, ...]]:
    """Ever smaller subsets that mend; from the last one no single hunk can be left out."""
    current, parts = list(everything), 2
    while len(current) >= 2:
        chunks = _cut(current, parts)
        smaller = next((c for c in chunks if trial(c)), None)
        if smaller is not None:
            current, parts = smaller, 2
            yield tuple(current)
            continue
        rest = next((r for c in chunks if (r := [n for n in current if n not in c]) and trial(r)), None)
        if rest is not None:
            current, parts = rest, max(parts - 1, 2)
            yield tuple(current)
        elif parts >= len(current):
            return
        else:
            parts = min(len(current), 2 * parts)


def _cut(items: Sequence[int], parts: int) -> list[list[int]]:
    ends = [len(items) * n // parts for n in range(parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(ends) if a < b]


def _lines(content: bytes | None) -> tuple[bytes, ...]:
    """Lines with their ends; only a line feed ends a line."""
    parts = (content or b"").split(b"\n")
    return (*(part + b"\n" for part in parts[:-1]), *([parts[-1]] if parts[-1] else []))


def _key(line: bytes) -> str:
    return line.decode("latin-1")
