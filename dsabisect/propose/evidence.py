"""What was measured for one proposal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dsabisect.model import Column
from dsabisect.propose.prove import Proof
from dsabisect.propose.speed import Speed


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Empty when there is nothing to propose."""

    proof: Proof | None = None
    dependents: Mapping[str, tuple[Column, ...]] = field(default_factory=dict)  # sha → columns that it needs this for
    speeds: tuple[Speed, ...] = ()
