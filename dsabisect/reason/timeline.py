"""Every change of verdict between neighbouring measured positions. The seam for the whole timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from dsabisect.model import Reason, TransitionKind, Verdict

NO_REASONS: Mapping[int, Reason] = {}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of verdict somewhere in (after, upto]."""

    kind: TransitionKind  # introduced or fixed: told from exposed, masked and gated only beside the other columns
    after: int
    upto: int


def transitions(seen: Mapping[int, Verdict], reasons: Mapping[int, Reason] = NO_REASONS) -> list[Step]:
    """Steps by position. Skips are passed over.

    A path that is absent counts as good for "introduced" and as nothing at all for "fixed": a fault that goes away with
    its path is fixed only where the path is good again.
    """
    told = [(p, v, reasons.get(p) is Reason.ABSENT) for p, v in sorted(seen.items()) if v is not Verdict.SKIP]
    present = [(p, v) for p, v, absent in told if not absent]
    introduced = [
        Step(kind=TransitionKind.INTRODUCED, after=before, upto=after)
        for (before, old, _), (after, new, _) in pairwise(told)
        if (old, new) == (Verdict.GOOD, Verdict.BAD)
    ]
    fixed = [
        Step(kind=TransitionKind.FIXED, after=before, upto=after)
        for (before, old), (after, new) in pairwise(present)
        if (old, new) == (Verdict.BAD, Verdict.GOOD)
    ]
    return sorted((*introduced, *fixed), key=lambda step: (step.upto, step.after))
