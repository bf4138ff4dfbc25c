"""All commits in order."""

from __future__ import annotations

from dsabisect.demo import fused, native
from dsabisect.demo.edits import Step
from dsabisect.demo.stream import fast_import

STEPS: tuple[Step, ...] = (*native.STEPS, *fused.STEPS)


def stream() -> bytes:
    """The whole history for ``git fast-import``."""
    return fast_import(STEPS)


def named(shas: tuple[str, ...]) -> dict[str, str]:
    """Name of a step → sha of its commit; ``shas`` in the order of the steps."""
    return {step.name: sha for step, sha in zip(STEPS, shas, strict=True) if step.name}
