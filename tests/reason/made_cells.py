"""Observations made by hand, through the same judge that the engine uses."""

from __future__ import annotations

from dsabisect.model import Comparison, Facet, Failure, Measurement, Observation, Outcome, Stage
from dsabisect.reason import judge


def said(name: str, ok: bool = True, stage: Stage = Stage.END_TO_END, **metrics: float | str) -> Comparison:
    return Comparison(stage=stage, name=name, ok=ok, metrics=metrics, worst_at={"row": 3}, tolerance={"max": 0.0021})


def failed(type_name: str = "RuntimeError", message: str = "boom", signature: str = "") -> Failure:
    return Failure(type=type_name, message=message, signature=signature or f"{type_name}: {message}")


def cell(
    answer: str = "good",
    *,
    path: str = "fused",
    case: str = "c",
    sha: str = "c" * 40,
    error: float = 0.41,
    failure: Failure | None = None,
    stage: Stage = Stage.END_TO_END,
    notes: tuple[str, ...] = (),
    purpose: str = "search",
    **facets: Facet,
) -> Observation:
    """``answer``: good, diverged, nondeterministic, or the value of an Outcome."""
    comparisons: tuple[Comparison, ...] = ()
    outcome = Outcome.COMPLETED
    if answer == "good":
        comparisons = (said("repeat", stage=stage), said("diff", stage=stage, max=8e-4))
    elif answer == "diverged":
        comparisons = (said("diff", False, stage, max=error, row_error=error, allowed=0.0021),)
    elif answer == "nondeterministic":
        comparisons = (said("repeat", False, stage, differing=5), said("diff", stage=stage, max=8e-4))
    else:
        outcome = Outcome(answer)
        if failure is None and outcome in (Outcome.RAISED, Outcome.CRASHED, Outcome.BUILD_FAILED):
            failure = failed()
    measurement = Measurement(path=path, case=case, outcome=outcome, failure=failure)
    verdict, reason, detail = judge.judge(measurement, comparisons)
    return Observation(
        sha=sha, build="b", path=path, case=case, outcome=outcome, verdict=verdict, reason=reason, facets=facets,
        comparisons=comparisons, failure=failure, detail=detail, notes=notes, purpose=purpose,
    )  # fmt: skip
