"""Outputs of a path against a golden: mask first, worst row counts, metrics always filled.

`golden` tensors (outside/golden.py): row_start, row_len [rows] i64; logits (valid values, rows concatenated) f32;
condition [rows] f64 (logits: oracle.condition); baseline_err, baseline_regret [rows] f64 (end_to_end: any baseline,
modelled or calibrated); q_fp8, q_scale, k_fp8, k_scale (quant); lens_* i32 (metadata: oracle.scheduled_lens).
Runs are run 0 (poison a), run 1 (poison b), run 2 (poison a again); one to three may be given. Tensors of the runs may
be on a GPU: the golden is taken there, and everything large is compared there.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsabisect.indexer import rows, tolerances
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
    device = runs[0][names[0]].device
    golden = {name: value.to(device) for name, value in golden.items()}
    runs = [{name: value.to(device) for name, value in run.items()} for run in runs]
    faults = [fault for run in runs for fault in _shape_faults(case, golden, run)]
    first.append(_said(case, "shape", not faults, {"fault": faults[0] if faults else ""}))
    if faults:
        return tuple(first)
    rules: dict[Stage, Callable[..., list[Comparison]]] = {
        Stage.QUANT: _quant, Stage.LOGITS: _logits, Stage.TOPK: _topk, Stage.END_TO_END: _end_to_end,
        Stage.METADATA: _metadata,
    }  # fmt: skip
    pairs = zip(runs[1:], ("poison", "repeat"), strict=False)
    across = [_same(case, golden, runs[0], other, name) for other, name in pairs]
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
    """What is wrong with shapes and dtypes, one line each: past here the rules may index without looking."""
    faults = []
    if case.stage in (Stage.LOGITS, Stage.END_TO_END):
        count, width, seen = len(golden["row_len"]), width_of(golden), run["logits"]
        if seen.dim() != 2 or seen.shape[0] != count or seen.shape[1] < width or not seen.is_floating_point():
            faults.append(f"logits {_told(seen)}, wanted ({count}, at least {width}) of floats")
    if "topk" in run and "row_len" in golden:
        count, seen = len(golden["row_len"]), run["topk"]
        if seen.dim() != 2 or seen.shape[0] != count or not seen.shape[1] or not _whole(seen):
            faults.append(f"topk {_told(seen)}, wanted ({count}, K) of integers")
    if case.stage is Stage.QUANT:
        for name in OUTPUTS[Stage.QUANT]:
            one_byte = run[name].element_size() == 1 and run[name].dtype is not torch.bool
            right = one_byte if name.endswith("fp8") else run[name].dtype is torch.float32
            if run[name].shape != golden[name].shape or not right:
                faults.append(f"{name} {_told(run[name])}, wanted {_told(golden[name])}")
    if case.stage is Stage.METADATA and not _whole(run["lens"]):
        faults.append(f"lens {_told(run['lens'])}, wanted integers")
    return faults


def _told(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _whole(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)


def width_of(golden: Golden) -> int:
    """Columns that hold anything valid."""
    return int((golden["row_start"] + golden["row_len"]).max())


def valid(golden: Golden, width: int) -> Tensor:
    """[rows, width] bool: the positions that mean anything."""
    at = torch.arange(width, device=golden["row_len"].device)[None, :]
    start, length = golden["row_start"][:, None], golden["row_len"][:, None]
    return (at >= start) & (at < start + length)


def truth(golden: Golden, width: int) -> Tensor:
    """The golden logits as [rows, width] fp64, 0 outside the valid region."""
    full = torch.zeros(len(golden["row_len"]), width, dtype=torch.float64, device=golden["logits"].device)
    full[valid(golden, width)] = golden["logits"].double()
    return full


def _same(case: Case, golden: Golden, one: Run, other: Run, name: str) -> Comparison:
    """Bitwise equality over what means something. Top-k is compared as a set: its order is free."""
    differing, total, worst = 0, 0, None
    for output in (n for n in one if n in (*OUTPUTS[case.stage], "topk")):
        a, b = one[output], other.get(output, one[output][:0])
        if output == "logits" and _equal_bits(a, b):  # nothing to look for, also outside
            total += int(golden["row_len"].sum())
            continue
        a, b = _meaningful(golden, output, a), _meaningful(golden, output, b)
        total += a.numel()
        if a.shape != b.shape or a.dtype != b.dtype:
            differing += max(1, a.numel())
            continue
        bad = _bits(a) != _bits(b)
        differing += int(bad.sum())
        if worst is None and bool(bad.any()):
            worst = {"value": int(bad.nonzero()[0, 0])}
    return _said(case, name, differing == 0, {"differing": differing, "values": total}, worst)


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(value: Tensor) -> Tensor:
    """The same shape, the bits of each value as an integer."""
    return value.contiguous().view(BITS[value.element_size()])


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def identical(case: Case, golden: Golden, one: Run, other: Run) -> bool:
    """Is everything that means something equal in value? With clean_logits everything does."""
    whole = bool(case.shape.get("clean"))
    pairs = [(value, other[name]) for name, value in one.items()]
    if not whole:
        pairs = [(_meaningful(golden, n, value), _meaningful(golden, n, other[n])) for n, value in one.items()]
    return all(a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs)


def _meaningful(golden: Golden, output: str, value: Tensor) -> Tensor:
    if output == "logits":
        return value[valid(golden, value.shape[1])]
    return value.sort(-1).values.flatten() if output == "topk" else value.flatten()


# ---- rules -------------------------------------------------------------------------------------------------


def _finite(case: Case, golden: Golden, logits: Tensor, summed: rows.RowSums) -> Comparison:
    bad, where = int(summed.bad.sum()), None
    if bad:
        row = int(summed.bad.nonzero()[0, 0])
        low = int(golden["row_start"][row])
        inside = logits[row, low : low + int(golden["row_len"][row])]
        where = _where(case, row, low + int((~torch.isfinite(inside)).nonzero()[0, 0]))
    return _said(case, "finite", not bad, {"bad": bad, "valid": int(golden["row_len"].sum())}, where)


def _masked(golden: Golden, logits: Tensor) -> Tensor:
    clean = torch.where(valid(golden, logits.shape[1]), logits.double(), 0.0)
    return torch.nan_to_num(clean, nan=0.0, posinf=0.0, neginf=0.0)


def _logits(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    logits = run["logits"]
    limit = "logits.diff" if logits.dtype in (torch.float32, torch.float64) else "logits.diff_bf16"
    summed = rows.sums(golden, logits[:, : width_of(golden)])
    # a golden that does not say how much its rows cancel is allowed nothing for it
    condition = golden["condition"].cpu() if "condition" in golden else torch.zeros_like(summed.total)
    cancelling = tolerances.value("logits.accumulation") ** 2 * condition
    said = [_finite(case, golden, logits, summed)]
    if case.shape.get("clean"):
        said.append(_infset(case, golden, logits))
    said.append(_diff(case, golden, logits, summed.errors, cancelling.clamp(min=tolerances.value(limit))))
    return said


def _infset(case: Case, golden: Golden, logits: Tensor) -> Comparison:
    """With clean_logits exactly what is outside is -inf. (Inside, _finite looks.)"""
    outside = ~valid(golden, logits.shape[1])
    wrong = outside & (logits != -math.inf)
    at = _at(case, wrong) if bool(wrong.any()) else None
    return _said(case, "infset", at is None, {"wrong": int(wrong.sum()), "outside": int(outside.sum())}, at)


def _diff(case: Case, golden: Golden, logits: Tensor, errors: Tensor, allowed: Tensor) -> Comparison:
    """The row that is furthest over its own limit, or nearest to it, and there the position that is furthest off."""
    row = int((errors - allowed).argmax())
    metrics: dict[str, Number | str] = {
        "max": float(errors.max()), "mean": float(errors.mean()), "row_error": float(errors[row]),
        "allowed": float(allowed[row]), "rows_over": int((errors > allowed).sum()), "rows": len(errors),
    }  # fmt: skip
    at = _where(case, row, _furthest(golden, logits, row))
    return _said(case, "diff", bool((errors <= allowed).all()), metrics, at, {"max": float(allowed[row])})


def _furthest(golden: Golden, logits: Tensor, row: int) -> int:
    """The position of ``row`` that is furthest from the golden; values that are not finite count as 0."""
    low, count, at = (int(golden["row_start"][row]), int(golden["row_len"][row]), int(golden["row_len"][:row].sum()))
    got = torch.nan_to_num(logits[row, low : low + count].double(), nan=0.0, posinf=0.0, neginf=0.0)
    off = (got - golden["logits"][at : at + count].double()).abs()
    return low + int(off.argmax()) if float(off.max()) > 0 else 0


def _where(case: Case, row: int, position: int | None = None) -> dict[str, int]:
    """{row, sequence, position}: the sequence where rows are ordered by sequence, the position where there is one."""
    at = {"row": row}
    if "extend_lens" in case.shape:
        ends = list(itertools.accumulate(int(n) for n in case.shape["extend_lens"]))
        at["sequence"] = bisect.bisect_right(ends, row)
    elif "context_lens" in case.shape:
        at["sequence"] = row // int(case.facets["next_n"])
    return at if position is None else {**at, "position": position}


def _at(case: Case, bad: Tensor) -> dict[str, int]:
    """Where the first True of [rows, positions] is."""
    row, position = bad.nonzero()[0].tolist()
    return _where(case, row, position)


def _end_to_end(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    logits = run["logits"][:, : width_of(golden)].float()
    want, got, summed = truth(golden, logits.shape[1]), _masked(golden, logits), rows.sums(golden, logits)
    twice = tolerances.value("end_to_end.factor") * golden["baseline_err"].cpu()
    allowed = twice + tolerances.value("end_to_end.floor")
    said = [_finite(case, golden, logits, summed), _diff(case, golden, logits, summed.errors, allowed)]
    if "topk" in run:
        said += _selection(case, golden, run["topk"].long(), got, by="own logits")
    said += _regret(case, golden, run, got, want)
    return said


def _regret(case: Case, golden: Golden, run: Run, got: Tensor, want: Tensor) -> list[Comparison]:
    """How far below the true k-th value the selection reaches, in sigmas of the true row; and the share it hits.

    The selection is the path's own; where it yields none, the top-k of its logits is taken here.
    """
    k, n = int(case.shape["topk"]), golden["row_len"].double()
    mask, count = valid(golden, got.shape[1]), golden["row_len"].clamp(max=k)
    true_set, kth = _largest(want, mask, count)
    picked = _picked(run["topk"].long(), mask) if "topk" in run else _largest(got, mask, count)[0]
    short = torch.where(picked, kth[:, None] - want, torch.zeros_like(want)).clamp(min=0).amax(-1)
    mean = want.sum(-1) / n
    sigma = torch.sqrt((torch.where(mask, want - mean[:, None], torch.zeros_like(want)) ** 2).sum(-1) / n)
    regrets = torch.where(sigma > 0, short / sigma.clamp(min=1e-300), torch.zeros_like(short))
    twice = tolerances.value("regret.factor") * golden["baseline_regret"]
    allowed = twice.clamp(min=tolerances.value("regret.floor"))
    row = int((regrets - allowed).argmax())
    metrics = {"max": float(regrets.max()), "row_error": float(regrets[row]), "allowed": float(allowed[row])}
    overlap = (picked & true_set).sum(-1).double() / count
    worst = int(overlap.argmin())
    shares = {"min": float(overlap[worst]), "mean": float(overlap.mean())}
    ok, limit = bool((regrets <= allowed).all()), {"max": float(allowed[row])}
    return [
        _said(case, "regret", ok, metrics, _where(case, row), limit),
        _said(case, "overlap", True, shares, _where(case, worst)),
    ]


def _largest(scores: Tensor, mask: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The ``count`` largest valid scores of each row: [rows, width] bool; and the smallest of them: [rows]."""
    low = torch.full_like(scores, torch.finfo(torch.float64).min)
    ranked = torch.where(mask, scores, low).topk(int(count.max()), -1)
    within = torch.arange(ranked.indices.shape[1], device=scores.device)[None, :] < count[:, None]
    chosen = torch.zeros_like(mask).scatter(1, ranked.indices, within)
    return chosen, ranked.values.gather(1, (count - 1)[:, None])[:, 0]


def _picked(topk: Tensor, mask: Tensor) -> Tensor:
    """[rows, K] positions → [rows, width] bool. What is no valid position is left out here: the rule topk names it."""
    real = (topk >= 0) & (topk < mask.shape[1])
    times = torch.zeros_like(mask, dtype=torch.int64).scatter_add(1, torch.where(real, topk, 0), real.long())
    return (times > 0) & mask


def _topk(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    return _selection(case, golden, run["topk"].long(), truth(golden, width_of(golden)), by="golden logits")


def _selection(case: Case, golden: Golden, topk: Tensor, scores: Tensor, by: str) -> list[Comparison]:
    """In range, unique, right count, -1 elsewhere; nothing below the k-th value, nothing above it left out."""
    lens = golden["row_len"]
    count, real = lens.clamp(max=int(case.shape["topk"])), topk >= 0
    mask = valid(golden, scores.shape[1])
    kth = _largest(scores, mask, count)[1][:, None]
    safe = topk.clamp(min=0, max=scores.shape[1] - 1)
    times = torch.zeros_like(scores).scatter_add(1, safe, real.double())
    faults = {
        "out_of_range": ((topk >= lens[:, None]) | (topk < -1)).any(-1),
        "twice": (times > 1).any(-1),
        "count": real.sum(-1) != count,
        "below_kth": (real & (scores.gather(1, safe) < kth)).any(-1),
        "left_out": (mask & (scores > kth) & (times == 0)).any(-1),
    }
    bad = torch.stack(list(faults.values())).any(0)
    metrics: dict[str, Number | str] = {name: int(found.sum()) for name, found in faults.items()}
    at = _where(case, int(bad.nonzero()[0, 0])) if bool(bad.any()) else None
    return [_said(case, "topk", at is None, {**metrics, "rows": len(lens), "by": by}, at)]


def _quant(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    return [rule(case, golden, run, part) for part in ("q", "k") for rule in (_codes, _scales)]


def _codes(case: Case, golden: Golden, run: Run, part: str) -> Comparison:
    want, got = golden[f"{part}_fp8"].flatten(), run[f"{part}_fp8"].view(torch.uint8).flatten()
    steps = (_order(want) - _order(got)).abs()
    nan = int(((got & 0x7F) == 0x7F).sum())  # NaN's code follows that of 448: never counted as its neighbour
    limits = {"steps": tolerances.value("quant.ulps"), "share": tolerances.value("quant.share")}
    share, most = float((steps > 0).double().mean()), int(steps.max())
    ok = not nan and most <= limits["steps"] and share <= limits["share"]
    metrics: dict[str, Number | str] = {"max_steps": most, "share": share, "nan": nan}
    return _said(case, f"bytes_{part}", ok, metrics, {"value": int(steps.argmax())}, limits)


def _scales(case: Case, golden: Golden, run: Run, part: str) -> Comparison:
    want, got = golden[f"{part}_scale"].double().flatten(), run[f"{part}_scale"].double().flatten()
    relative = ((got - want).abs() / want).nan_to_num(nan=math.inf)
    limit = 0.0 if case.facets["scale"] == "ue8m0" else tolerances.value("quant.scale")
    metrics, at = {"max": float(relative.max())}, {"value": int(relative.argmax())}
    return _said(case, f"scale_{part}", bool((relative <= limit).all()), metrics, at, {"max": limit})


def _order(codes: Tensor) -> Tensor:
    """Codes of e4m3 as integers in the order of their values: neighbours differ by 1, -0.0 and 0.0 by 0."""
    magnitude = (codes & 0x7F).long()
    return torch.where(codes >= 128, -magnitude, magnitude)


def _metadata(case: Case, golden: Golden, run: Run) -> list[Comparison]:
    """Lengths that reached the scheduler: any form of them that the golden names (oracle.scheduled_lens)."""
    lens = run["lens"].long()
    forms = {name: value.long() for name, value in sorted(golden.items()) if name.startswith("lens_")}
    fits = [name for name, want in forms.items() if _fits(case, name, want, lens)]
    shown = {"seen": str(lens.flatten().tolist()[:32]), "shape": str(tuple(lens.shape)), "as": (*fits, "none")[0]}
    return [_said(case, "lens", bool(fits), shown)]


def _fits(case: Case, name: str, want: Tensor, lens: Tensor) -> bool:
    """Does ``lens`` say the same as the golden form ``want``?

    lens_full only as [B, next_n]: said of each token by itself it would let a draft see later ones. lens_accepted may
    be followed by padding up to next_n a sequence (a graph's buffer): any lengths, but none below 0.
    """
    if name == "lens_full":
        return torch.equal(lens, want)
    flat, wanted = lens.flatten(), want.flatten()
    padded = len(case.shape["seq_lens"]) * int(case.facets["next_n"]) if name == "lens_accepted" else len(wanted)
    if len(flat) not in (len(wanted), padded):
        return False
    return torch.equal(flat[: len(wanted)], wanted) and bool((flat >= 0).all())
