"""Every change of verdict between neighbouring measured positions. The seam for the whole timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsabisect.model import Reason, TransitionKind, Verdict


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of verdict somewhere in (after, upto]."""

    kind: TransitionKind
    after: int
    upto: int


def transitions(seen: Mapping[int, Verdict], reasons: Mapping[int, Reason] | None = None) -> list[Step]:
    """Steps in order. A path that is absent counts as good for "introduced", never for "fixed"; skips are passed over."""
    why = reasons or {}
    told = [(p, v) for p, v in sorted(seen.items()) if v is not Verdict.SKIP]
    steps = []
    for (before, old), (after, new) in zip(told, told[1:], strict=False):
        if (old, new) == (Verdict.GOOD, Verdict.BAD):
            steps.append(Step(kind=TransitionKind.INTRODUCED, after=before, upto=after))
        elif (old, new) == (Verdict.BAD, Verdict.GOOD) and why.get(after) is not Reason.ABSENT:
            steps.append(Step(kind=TransitionKind.FIXED, after=before, upto=after))
    return steps
