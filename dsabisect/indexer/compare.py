"""Outputs of a path against a golden: mask first, worst row counts, metrics always filled.

`golden` tensors (outside/golden.py): row_start, row_len [rows] i64; logits (valid values, rows concatenated) f32;
baseline_err, baseline_regret [rows] f64 (end_to_end); q_fp8, q_scale, k_fp8, k_scale (quant); lens (metadata).
Runs are run 0 (poison a), run 1 (poison b), run 2 (poison a again); one to three may be given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsabisect.indexer import tolerances
from dsabisect.model import Case, Comparison, Number, Stage

Golden = Mapping[str, Tensor]
Run = Mapping[str, Tensor]
OUTPUTS = {
    Stage.QUANT: ("q_fp8", "q_scale", "k_fp8", "k_scale"), Stage.LOGITS: ("logits",), Stage.TOPK: ("topk",),
    Stage.END_TO_END: ("logits",), Stage.METADATA: ("lens",),
}  # fmt: skip


def compare(case: Case, golden: Golden, runs: Sequence[Run], required: Sequence[str] = ()) -> tuple[Comparison, ...]:
    """Every rule of the case's stage. A missing or misshapen output ends the list: nothing else can be said."""
    names = tuple(dict.fromkeys((*OUTPUTS[case.stage], *required)))
    missing = sorted({name for run in runs for name in names if name not in run}) if runs else list(names)
    first = [_said(case, "missing", not missing, {"outputs": len(names), "missing": ", ".join(missing)})]
    if missing:
        return tuple(first)
    faults = [fault for run in runs for fault in _shape_faults(case, golden, run)]
    first.append(_said(case, "shape", not faults, {"fault": faults[0] if faults else ""}))
    if faults:
        return tuple(first)
    rules: dict[Stage, Callable[..., list[Comparison]]] = {
        Stage.QUANT: _quant, Stage.LOGITS: _logits, Stage.TOPK: _topk, Stage.END_TO_END: _end_to_end, Stage.METADATA: _metadata,
    }  # fmt: skip
    across = [_same(case, golden, runs[0], other, name) for other, name in zip(runs[1:], ("poison", "repeat"), strict=False)]
    return (*first, *across, *rules[case.stage](case, golden, runs[0]))


def _said(
    case: Case,
    name: str,
    ok: bool,
    metrics: Mapping[str, Number | str],
    worst_at: Mapping[str, int] | None = None,
    tolerance: Mapping[str, Number] | None = None,
) -> Comparison:
    safe = {k: v if isinstance(v, (str, int)) or math.isfinite(v) else str(v) for k, v in metrics.items()}
    return Comparison(stage=case.stage, name=name, ok=ok, metrics=safe, worst_at=worst_at, tolerance=tolerance or {})


# ---- shapes and masks --------------------------------------------------------------------------------------


def _shape_faults(case: Case, golden: Golden, run: Run) -> list[str]:
    faults = []
    if case.stage in (Stage.LOGITS, Stage.END_TO_END):
        rows, width = len(golden["row_len"]), int((golden["row_start"] + golden["row_len"]).max())
        seen = run["logits"]
        if seen.dim() != 2 or seen.shape[0] != rows or seen.shape[1] < width or not seen.is_floating_point():
            faults.append(f"logits {tuple(seen.shape)} {seen.dtype}, wanted ({rows}, at least {width}) of floats")
    if "topk" in run:
        rows = len(golden["row_len"])
        seen = run["topk"]
        if seen.dim() != 2 or seen.shape[0] != rows or seen.is_floating_point():
            faults.append(f"topk {tuple(seen.shape)} {seen.dtype}, wanted ({rows}, K) of integers")
    if case.stage is Stage.QUANT:
        faults += [f"{n} {tuple(run[n].shape)}, wanted {tuple(golden[n].shape)}" for n in OUTPUTS[Stage.QUANT]
                   if run[n].shape != golden[n].shape]  # fmt: skip
    return faults


def valid(golden: Golden, width: int) -> Tensor:
    """[rows, width] bool: the positions that mean anything."""
    at = torch.arange(width)[None, :]
    start, length = golden["row_start"][:, None], golden["row_len"][:, None]
    return (at >= start) & (at < start + length)


def truth(golden: Golden, width: int) -> Tensor:
    """The golden logits as [rows, width] fp64, 0 outside the valid region."""
    full = torch.zeros(len(golden["row_len"]), width, dtype=torch.float64)
    full[valid(golden, width)] = golden["logits"].double()
    return full


def _same(case: Case, golden: Golden, one: Run, other: Run, name: str) -> Comparison:
    """Bitwise equality over what means something. Top-k is compared as a set: its order is free."""
    differing, total, worst = 0, 0, None
    for output in one:
        a, b = _meaningful(golden, output, one[output]), _meaningful(golden, output, other.get(output, one[output][:0]))
        total += a.numel()
        if a.shape != b.shape:
            differing += max(1, a.numel())
            continue
        unequal = a.contiguous().view(torch.uint8).reshape(a.numel(), -1) != b.contiguous().view(torch.uint8).reshape(a.numel(), -1)
        bad = unequal.any(-1) if a.numel() else unequal.flatten()
        differing += int(bad.sum())
        if worst is None and bool(bad.any()):
            worst = {"value": int(bad.nonzero()[0, 0])}
    return _said(case, name, differing == 0, {"differing": differing, "values": total}, worst)


def identical(golden: Golden, one: Run, other: Run) -> bool:
    """Is everything that means something equal in value?"""
    pairs = [(_meaningful(golden, n, one[n]), _meaningful(golden, n, other[n])) for n in one]
    return all(a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs)


def _meaningful(golden: Golden, output: str, value: Tensor) -> Tensor:
    if output == "logits":
        return value[valid(golden, value.shape[1])]
    return value.sort(-1).values.flatten() if output == "topk" else value.flatten()


# ---- rules -------------------------------------------------------------------------------------------------


def row_errors(x: Tensor, y: Tensor) -> Tensor:
    """calc_diff per row in fp64: 1 - 2 sum(xy) / sum(x² + y²); two zero rows differ by 0."""
    total = (x * x + y * y).sum(-1)
    return torch.where(total > 0, 1 - 2 * (x * y).sum(-1) / total.clamp(min=1e-300), torch.zeros_like(total))


def _finite(case: Case, golden: Golden, logits: Tensor) -> Comparison:
    mask = valid(golden, logits.shape[1])
    bad = mask & ~torch.isfinite(logits)
    where = {"row": int(bad.nonzero()[0, 0]), "position": int(bad.nonzero()[0, 1])} if bool(bad.any()) else None
    return _said(case, "finite", not bool(bad.any()), {"bad": int(bad.sum()), "valid": int(mask.sum())}, where)


def _masked(golden: Golden, logits: Tensor) -> Tensor:
    clean = torch.where(valid(golden, logits.shape[1]), logits.double(), torch.zeros((), dtype=torch.float64))
    return torch.nan_to_num(clean, nan=0.0, posinf=0.0, neginf=0.0)


def _logits(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    logits = run["logits"].float() if run["logits"].dtype != torch.float64 else run["logits"]
    errors = row_errors(_masked(golden, logits), truth(golden, logits.shape[1]))
    cancelling = tolerances.value("logits.accumulation") ** 2 * golden["condition"]
    allowed = cancelling.clamp(min=tolerances.value("logits.diff"))
    row = int((errors - allowed).argmax())
    said = [_finite(case, golden, logits)]
    if case.shape.get("clean"):
        outside = ~valid(golden, logits.shape[1])
        wrong = outside & (logits != -math.inf)
        said.append(_said(case, "infset", not bool(wrong.any()), {"wrong": int(wrong.sum()), "outside": int(outside.sum())}))
    said.append(_diff(case, errors, allowed, row))
    return said


def _diff(case: Case, errors: Tensor, allowed: Tensor, row: int) -> Comparison:
    """The row that is furthest over its own limit, or nearest to it."""
    metrics: dict[str, Number | str] = {
        "max": float(errors.max()), "mean": float(errors.mean()), "row_error": float(errors[row]),
        "allowed": float(allowed[row]), "rows_over": int((errors > allowed).sum()), "rows": len(errors),
    }  # fmt: skip
    return _said(case, "diff", bool((errors <= allowed).all()), metrics, {"row": row}, {"max": float(allowed[row])})


def _end_to_end(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    logits = run["logits"].float()
    want, got = truth(golden, logits.shape[1]), _masked(golden, logits)
    errors = row_errors(got, want)
    allowed = tolerances.value("end_to_end.factor") * golden["baseline_err"] + tolerances.value("end_to_end.floor")
    row = int((errors - allowed).argmax())
    said = [_finite(case, golden, logits)]
    said.append(_diff(case, errors, allowed, row))
    if "topk" in run:
        said += _selection(case, golden, run["topk"].long(), got, by="own logits")
    said += _regret(case, golden, run, got, want)
    return said


def _regret(case: Case, golden: Golden, run: Run, got: Tensor, want: Tensor) -> list[Comparison]:
    k = int(case.shape["topk"])
    mask = valid(golden, got.shape[1])
    low = torch.finfo(torch.float64).min
    count = golden["row_len"].clamp(max=k)
    width = min(k, got.shape[1])
    truly = torch.where(mask, want, torch.full_like(want, low)).topk(width, -1)
    chosen = run["topk"].long() if "topk" in run else torch.where(mask, got, torch.full_like(got, low)).topk(width, -1).indices
    chosen = chosen[:, :width]
    real = torch.arange(chosen.shape[1])[None, :] < count[:, None] if "topk" not in run else chosen >= 0
    kth = truly.values.gather(1, (count - 1)[:, None])
    scores = want.gather(1, chosen.clamp(min=0, max=want.shape[1] - 1))
    short = torch.where(real, kth - scores, torch.zeros_like(scores)).clamp(min=0).amax(-1)
    n = golden["row_len"].double()
    mean = want.sum(-1) / n
    sigma = torch.sqrt((torch.where(mask, want - mean[:, None], torch.zeros_like(want)) ** 2).sum(-1) / n)
    regrets = torch.where(sigma > 0, short / sigma.clamp(min=1e-300), torch.zeros_like(short))
    allowed = torch.clamp(tolerances.value("regret.factor") * golden["baseline_regret"], min=tolerances.value("regret.floor"))
    row = int((regrets - allowed).argmax())
    picked = torch.zeros_like(mask).scatter(1, chosen.clamp(min=0), real)
    true_set = torch.zeros_like(mask).scatter(1, truly.indices, torch.arange(width)[None, :] < count[:, None])
    overlap = (picked & true_set).sum(-1).double() / count
    return [
        _said(case, "regret", bool((regrets <= allowed).all()), {"max": float(regrets.max()), "allowed": float(allowed[row])},
              {"row": row}, {"max": float(allowed[row])}),
        _said(case, "overlap", True, {"min": float(overlap.min()), "mean": float(overlap.mean())}),
    ]  # fmt: skip


def _topk(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    width = int((golden["row_start"] + golden["row_len"]).max())
    return _selection(case, golden, run["topk"].long(), truth(golden, width), by="golden logits")


def _selection(case: Case, golden: Golden, topk: Tensor, scores: Tensor, by: str) -> list[Comparison]:
    """In range, unique, right count, -1 elsewhere; nothing below the k-th value, nothing above it left out."""
    k = int(case.shape["topk"])
    lens = golden["row_len"]
    count, real = lens.clamp(max=k), topk >= 0
    range_bad = (topk >= lens[:, None]) | (topk < -1)
    safe = topk.clamp(min=0, max=scores.shape[1] - 1)
    times = torch.zeros_like(scores).scatter_add(1, safe, real.double())
    mask = valid(golden, scores.shape[1])
    low = torch.full_like(scores, torch.finfo(torch.float64).min)
    ranked = torch.where(mask, scores, low).topk(min(k, scores.shape[1]), -1).values
    kth = ranked.gather(1, (count - 1)[:, None])
    below = real & (scores.gather(1, safe) < kth)
    left_out = mask & (scores > kth) & (times == 0)
    faults = {
        "out_of_range": range_bad.any(-1), "twice": (times > 1).any(-1), "count": real.sum(-1) != count,
        "below_kth": below.any(-1), "left_out": left_out.any(-1),
    }  # fmt: skip
    bad = torch.stack(list(faults.values())).any(0)
    metrics: dict[str, Number | str] = {name: int(rows.sum()) for name, rows in faults.items()}
    at = {"row": int(bad.nonzero()[0, 0])} if bool(bad.any()) else None
    return [_said(case, "topk", not bool(bad.any()), {**metrics, "rows": len(lens), "by": by}, at)]


def _quant(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    said = []
    for part in ("q", "k"):
        want, got = golden[f"{part}_fp8"].flatten(), run[f"{part}_fp8"].view(torch.uint8).flatten()
        steps = (_order(want) - _order(got)).abs()
        share, most = float((steps > 0).double().mean()), int(steps.max())
        ok = most <= tolerances.value("quant.ulps") and share <= tolerances.value("quant.share")
        said.append(_said(case, f"bytes_{part}", ok, {"max_steps": most, "share": share}, {"value": int(steps.argmax())},
                          {"steps": tolerances.value("quant.ulps"), "share": tolerances.value("quant.share")}))  # fmt: skip
        want_s, got_s = golden[f"{part}_scale"].double().flatten(), run[f"{part}_scale"].double().flatten()
        relative = ((got_s - want_s).abs() / want_s).nan_to_num(nan=math.inf)
        limit = 0.0 if case.facets["scale"] == "ue8m0" else tolerances.value("quant.scale")
        said.append(_said(case, f"scale_{part}", bool((relative <= limit).all()), {"max": float(relative.max())},
                          {"value": int(relative.argmax())}, {"max": limit}))  # fmt: skip
    return said


def _order(codes: Tensor) -> Tensor:
    """Codes of e4m3 as integers in the order of their values: neighbours differ by 1, -0.0 and 0.0 by 0."""
    magnitude = (codes & 0x7F).long()
    return torch.where(codes >= 128, -magnitude, magnitude)


def _metadata(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    """Lengths that reached the scheduler: per token, or one row a sequence with its full or its causal lengths."""
    lens = run["lens"].long()
    accepted = {name: value.long() for name, value in golden.items() if name.startswith("lens_")}
    shown = lens.flatten().tolist()[:32]
    fits = [name for name, want in accepted.items() if want.numel() == lens.numel() and bool((want.flatten() == lens.flatten()).all())]
    return [_said(case, "lens", bool(fits), {"seen": str(shown), "shape": str(tuple(lens.shape)), "as": fits[0] if fits else "none"})]
