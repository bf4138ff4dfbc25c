"""`golden calibrate`: measure a commit that is known to be good and keep its rounding errors, with their provenance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

from dsabisect.errors import GoldenError
from dsabisect.indexer import compare, rows
from dsabisect.model import Case, Outcome, Stage, Verdict
from dsabisect.outside import calibration, golden
from dsabisect.session import Request, open_session

MEASURED = (Stage.LOGITS, Stage.END_TO_END)
TOLD = 5  # cells that are not good, named in the error


@dataclass(kw_only=True)
class Errors:
    """Row errors of every case seen, the worst of all paths and runs."""

    goldens: golden.GoldenSet
    by_case: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, case: Case, runs: Sequence[Mapping[str, Tensor]]) -> None:
        if case.stage not in MEASURED or not all("logits" in run for run in runs):
            return
        answers = self.goldens.golden(case.id)
        for run in runs:
            width = compare.width_of(answers)
            if run["logits"].dim() != 2 or run["logits"].shape[1] < width:
                return  # the comparison says so
            errors = rows.sums(answers, run["logits"][:, :width]).errors
            known = self.by_case.get(case.id)
            self.by_case[case.id] = errors if known is None else torch.maximum(known, errors)


def calibrate(request: Request, say: Callable[[str], None], folder: Path | None = None) -> tuple[Path, str]:
    """Measure ``request.bad``, which must be good, and write its calibration; the file and a summary of it.

    Raises:
        GoldenError: a cell is not good, or nothing was measured: such a commit is no baseline.
    """
    with ExitStack() as stack:
        session, _, sha = open_session(replace(request, rerun=True), say, stack)
        evaluator = session.evaluator
        stack.callback(evaluator.close, keep=False)
        plain = golden.load(request.golden or None)  # not the set with an earlier calibration in it
        seen = evaluator.seen = Errors(goldens=plain)
        observations = evaluator.evaluate(sha, session.columns, purpose="calibrate")
        wrong = [o for o in observations if o.verdict is not Verdict.GOOD or o.outcome is Outcome.ABSENT]
        if wrong or not seen.by_case:
            told = [f"{o.column} {o.detail}" for o in wrong[:TOLD]]
            told += [f"and {len(wrong) - TOLD} more"] if len(wrong) > TOLD else []
            what = f"{sha[:9]} is no baseline: " + ("; ".join(told) or "no logits seen")
            remedy = f"Choose another --commit, or only the --path that is right (logs: {evaluator.run_dir})"
            raise GoldenError(what, where=request.device, remedy=remedy)
        kept = {id: calibration.entry(plain, plain.by_id[id], e) for id, e in seen.by_case.items()}
        environment = evaluator.runner.environment(request.device)
        provenance = {
            "target": request.target, "commit": sha, "paths": list(evaluator.paths), "suite": request.suite,
            "device": request.device, "golden": plain.key,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "clocks": "not touched", "environment": dict(environment),
        }  # fmt: skip
        default = calibration.file_of(plain, request.target, evaluator.device.arch)
        path = default if folder is None else folder / default.name
        calibration.save(path, provenance, kept)
        return path, summary(kept)


def summary(kept: Mapping[str, Mapping[str, object]]) -> str:
    """One line a case: stage, rows, worst and median row error, and whether the baseline can be used."""
    lines = [f"{'case':<44} {'stage':<10} {'rows':>5} {'max':>10} {'median':>10}"]
    for id, one in sorted(kept.items()):
        mark = "" if one.get("usable", True) else "  not used: the negative controls do not hold with it"
        lines.append(f"{id:<44} {one['stage']:<10} {one['rows']:>5} {one['max']:>10.3g} {one['median']:>10.3g}{mark}")
    for stage in MEASURED:
        worst = [float(str(one["max"])) for one in kept.values() if one["stage"] == stage.value]
        if worst:
            lines.append(f"{stage.value}: worst row {max(worst):.3g} over {len(worst)} cases")
    return "\n".join(lines)
