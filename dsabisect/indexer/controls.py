"""Negative controls: planted faults that every case must reject, and legitimate differences that it must accept.

A golden that accepts one of the faults would give false verdicts: BadOracle. The faults are made from the oracle's own
pieces, on quantised data, or on the right outputs where the fault is one of positions (DOMAIN section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dsabisect.indexer import compare, oracle
from dsabisect.model import Case, Stage

Run = dict[str, Tensor]
Inputs = Mapping[str, Tensor]
Golden = Mapping[str, Tensor]
SHOWS = 16385  # keys in a row: in longer ones less than what is allowed are one value (logits), two pages (end to end)
MANY_ROWS = 4096


def right(case: Case, inputs: Inputs, golden: Golden) -> Run:
    """Outputs of a faultless path."""
    if case.stage is Stage.QUANT:
        return {name: golden[name].clone() for name in compare.OUTPUTS[Stage.QUANT]}
    if case.stage is Stage.METADATA:
        return {"lens": next(golden[name].clone() for name in sorted(golden))}
    if case.stage is Stage.TOPK:
        return {"topk": select(inputs["logits"], inputs["row_lens"].long(), int(case.shape["topk"]))}
    if case.stage is Stage.END_TO_END:
        return _rows(case, golden, oracle.rounded_end_to_end(case, inputs, split=True))
    return _rows(case, golden, oracle.logits_of_quantised(case, inputs))


def _rows(case: Case, golden: Golden, rows: list[Tensor]) -> Run:
    """Valid logits of each row → outputs: what is outside is -inf where the case asks for that, else NaN."""
    start, width = golden["row_start"], int((golden["row_start"] + golden["row_len"]).max())
    logits = torch.full((len(rows), width), -torch.inf if case.shape.get("clean") else torch.nan)
    for r, row in enumerate(rows):
        logits[r, int(start[r]) : int(start[r]) + len(row)] = row.float()
    return _answer(case, golden, logits)


def _answer(case: Case, golden: Golden, logits: Tensor) -> Run:
    """The logits and, end to end, what is selected by them."""
    if case.stage is not Stage.END_TO_END:
        return {"logits": logits}
    return {"logits": logits, "topk": select(logits, golden["row_len"], int(case.shape["topk"]))}


def select(logits: Tensor, lens: Tensor, k: int, *, last_first: bool = False) -> Tensor:
    """[rows,K] int32 positions of the K largest valid values, -1 where there are fewer.

    Among equal values the first positions are taken, or with ``last_first`` the last ones.
    """
    width = logits.shape[1]
    mask = torch.arange(width)[None, :] < lens[:, None]
    low = torch.where(mask, logits.double(), torch.full((), -torch.inf, dtype=torch.float64))
    ranked = low.flip(-1) if last_first else low
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : min(k, width)]
    order = width - 1 - order if last_first else order
    chosen = torch.where(torch.arange(order.shape[1])[None, :] < lens.clamp(max=k)[:, None], order, -1)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1).int()


# ---- planted faults ----------------------------------------------------------------------------------------


def planted(case: Case, inputs: Inputs, golden: Golden, good: Run) -> Iterator[tuple[str, Run]]:
    """(name, outputs) of every fault that has meaning for this case; ``good`` are its right outputs."""
    if case.stage is Stage.TOPK:
        yield from _planted_topk(case, inputs, good)
    elif case.stage is Stage.QUANT:
        yield from _planted_quant(case, golden, good)
    elif case.stage is Stage.METADATA:
        yield from _planted_lens(case, inputs, good)
    else:
        yield from _planted_outputs(case, golden, good)
        pieces = _planted_pieces if case.stage is Stage.END_TO_END else _planted_quantised
        yield from pieces(case, inputs, golden)


def _planted_outputs(case: Case, golden: Golden, good: Run) -> Iterator[tuple[str, Run]]:
    """Faults of position and size, planted into right logits."""
    logits, start, length = good["logits"], golden["row_start"], golden["row_len"]
    rows, row = torch.arange(len(length)), int(length.argmax())
    low, high, last = int(start[row]), int(start[row] + length[row]), start + length - 1
    edits: dict[str, Callable[[Tensor], Tensor]] = {
        "times two": lambda x: x * 2,
        "NaN in one valid position": lambda x: _in_rows(x, rows == row, torch.full_like(x, torch.nan), low, low + 1),
        "causal off by one": lambda x: x.index_put((rows, last), torch.tensor(-torch.inf)),
    }
    if case.stage is Stage.LOGITS and int(length.max()) <= SHOWS:
        edits["last position not written"] = lambda x: x.index_put((rows, last), torch.tensor(0.0))
    if high - low >= 8:
        many = f" of {MANY_ROWS}" if len(length) >= MANY_ROWS else ""
        edits[f"one bad row{many}"] = lambda x: _in_rows(x, rows == row, x.roll(1, -1), low + 1, high)
    paged = (length >= 2 * oracle.PAGE) & (start == 0) & ((length <= SHOWS) | (case.stage is Stage.LOGITS))
    if bool(paged.any()):
        order = torch.arange(logits.shape[1])
        order[: 2 * oracle.PAGE] = order[: 2 * oracle.PAGE].roll(oracle.PAGE)
        edits["two pages swapped"] = lambda x: _in_rows(x, paged, x[:, order], 0, 2 * oracle.PAGE)
    if case.shape.get("clean"):
        edits["cleaned with zeros"] = lambda x: torch.where(compare.valid(golden, x.shape[1]), x, 0.0)
        edits["stale tail read as valid"] = lambda x: torch.where(compare.valid(golden, x.shape[1]), x, STALE)
    for name, edit in edits.items():
        yield name, _answer(case, golden, edit(logits))
    if "topk" in good and int(length.max()) > 1:
        yield "duplicate index", {**good, "topk": _duplicated(good["topk"], row)}
    if "topk" in good:
        yield "stale tail read as valid", {**good, "topk": _with_tails(logits, length, int(case.shape["topk"]))}


STALE = 1e30  # what an earlier request left where nothing may be read


def _with_tails(logits: Tensor, lens: Tensor, k: int) -> Tensor:
    """Top-k of rows [rows, width] that are taken to end with their page: what is behind their end is selected too."""
    width = oracle.PAGE * (1 + int(lens.max()) // oracle.PAGE)
    wide = torch.nn.functional.pad(logits, (0, max(0, width - logits.shape[1])))
    stale = torch.where(torch.arange(wide.shape[1])[None, :] < lens[:, None], wide, STALE)
    return select(stale, oracle.PAGE * (1 + lens // oracle.PAGE), k)


def _in_rows(x: Tensor, rows: Tensor, other: Tensor, low: int, high: int) -> Tensor:
    """x with ``other`` in these rows [rows] bool, positions low to high."""
    at = torch.arange(x.shape[1])
    return torch.where(rows[:, None] & (at >= low) & (at < high), other, x)


def _planted_pieces(case: Case, inputs: Inputs, golden: Golden) -> Iterator[tuple[str, Run]]:
    """Faults of an end-to-end path, in fp8 arithmetic without Hadamard."""
    neox = case.facets["rope"] == "neox"
    other = "interleaved" if neox else "neox"
    turned = Case(id=case.id, stage=case.stage, facets={**case.facets, "rope": other}, shape=case.shape)
    yield "rope swapped", _rows(case, golden, oracle.rounded_end_to_end(turned, inputs, split=False))
    q, k, g = oracle.project(inputs, neox=neox)
    (q8, q_scale), (k8, k_scale) = oracle.quantise(q, "fp32"), oracle.quantise(k, "fp32")
    h8, h_scale = oracle.quantise(oracle.hadamard(k), "fp32")
    keys, rotated = k8.double() * k_scale[:, None], h8.double() * h_scale[:, None]
    gate = g * q.shape[1] ** -0.5 * oracle.D**-0.5
    w = gate * q_scale
    faults = {
        "hadamard on k only": (rotated, w),
        "k scale off by one token": (k8.double() * k_scale.roll(1, 0)[:, None], w),
        "keys off by one token": (keys.roll(1, 0), w),
        "head weights rotated": (keys, gate.roll(1, 1) * q_scale),
        "q scale left out": (keys, gate),
    }
    if case.facets["data"] == "gaussian":  # where heads resemble each other two swapped ones stay below fp8's own error
        faults["head weights swapped"] = (keys, gate[:, _swap(gate.shape[1])] * q_scale)
    for name, (with_keys, weights) in faults.items():
        yield name, _rows(case, golden, oracle.by_sequence(inputs, q8.double(), with_keys, weights))


def _planted_quantised(case: Case, inputs: Inputs, golden: Golden) -> Iterator[tuple[str, Run]]:
    """Faults of a logits kernel, in its inputs."""
    swapped = {"weights": inputs["weights"][:, _swap(inputs["weights"].shape[1])]}
    for name, change in (("head weights swapped", swapped), ("k scale off by one token", _rolled_scale(case, inputs))):
        yield name, _rows(case, golden, oracle.logits_of_quantised(case, {**inputs, **change}))
    negative = oracle.logits_of_quantised(case, {**inputs, "q": inputs["q"] ^ 0x80})  # relu(x) - relu(-x) = x
    rows = zip(oracle.logits_of_quantised(case, inputs), negative, strict=True)
    yield "ReLU left out", _rows(case, golden, [a - b for a, b in rows])


def _swap(heads: int) -> Tensor:
    order = torch.arange(heads)
    order[:2] = torch.tensor([1, 0])
    return order


def _rolled_scale(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    if case.facets["layout"] == "ragged":
        seen = int(inputs["ke"].max())
        return {"k_scale": torch.cat([inputs["k_scale"][:seen].roll(1, 0), inputs["k_scale"][seen:]])}
    cache = inputs["kv_cache"].clone()
    tail = cache[:, oracle.PAGE * oracle.D :].reshape(-1, oracle.PAGE, 4)
    tail = torch.cat([tail[:, :1], tail[:, :-1]], 1)  # within the page, so that no scale comes from poison
    cache[:, oracle.PAGE * oracle.D :] = tail.reshape(len(cache), -1)
    return {"kv_cache": cache}


def _planted_topk(case: Case, inputs: Inputs, good: Run) -> Iterator[tuple[str, Run]]:
    topk, lens = good["topk"], inputs["row_lens"].long()
    row = int(lens.argmax())
    yield "stale tail read as valid", {"topk": _with_tails(inputs["logits"], lens, int(case.shape["topk"]))}
    yield "duplicate index", {"topk": _duplicated(topk, row)}
    one = topk.clone()
    one[row, 0] = int(lens[row])
    yield "causal off by one", {"topk": one}
    one = topk.clone()
    one[row, int((one[row] >= 0).sum()) - 1] = -1
    yield "one too few", {"topk": one}
    short = lens < topk.shape[1]
    if bool(short.any()):
        yield "padding is not -1", {"topk": torch.where(short[:, None] & (topk == -1), 0, topk)}
    if int(lens[row]) > topk.shape[1]:
        one = topk.clone()
        one[row, 0] = int(inputs["logits"][row, : int(lens[row])].argmin())
        yield "smallest instead of largest", {"topk": one}


def _duplicated(topk: Tensor, row: int) -> Tensor:
    one = topk.clone()
    one[row, 1] = one[row, 0]
    return one


def _planted_quant(case: Case, golden: Golden, good: Run) -> Iterator[tuple[str, Run]]:
    yield "scale times two", {**good, "k_scale": good["k_scale"] * 2}
    yield "scales of two tokens swapped", {**good, "k_scale": good["k_scale"].roll(1, 0)}
    yield "codes of two tokens swapped", {**good, "q_fp8": good["q_fp8"].roll(1, 0)}
    codes = good["k_fp8"].clone()
    codes.flatten()[int((codes & 0x7F).flatten().argmax())] |= 0x7F
    yield "NaN instead of the largest value", {**good, "k_fp8": codes}


def _planted_lens(case: Case, inputs: Inputs, good: Run) -> Iterator[tuple[str, Run]]:
    lens = good["lens"]
    flat = lens.flatten()
    yield "causal off by one", {"lens": lens + 1}
    yield "one row too few", {"lens": flat[:-1]}
    yield "one row too many", {"lens": torch.cat([flat, torch.ones(1, dtype=torch.int32)])}
    yield "lengths of the capture", {"lens": torch.full_like(lens, int(inputs["capture_seq_lens"].max()))}
    if case.facets["mode"] == "target_verify" and len(flat):
        full = inputs["seq_lens"].repeat_interleave(int(case.facets["next_n"]))
        yield "every token sees the whole context", {"lens": full[:, None]}


# ---- legitimate differences --------------------------------------------------------------------------------


def legitimate(case: Case, inputs: Inputs, golden: Golden, good: Run) -> Iterator[tuple[str, Run]]:
    """Outputs that differ from ``good``, the right ones, in ways that a right implementation may."""
    yield "itself", good
    if case.stage in (Stage.LOGITS, Stage.END_TO_END):
        logits = good["logits"]
        yield "negative zero", {"logits": torch.where(logits == 0, -0.0, logits)}
        if not case.shape.get("clean"):
            garbage = logits.masked_fill(~compare.valid(golden, logits.shape[1]), 1e30)
            yield "garbage outside", {"logits": torch.nn.functional.pad(garbage, (0, oracle.PAGE), value=1e30)}
    if case.stage is Stage.LOGITS:
        yield "order of accumulation", _rows(case, golden, _summed_in_fp32(case, inputs))
    if case.stage is Stage.END_TO_END:
        yield "fused numerics", _rows(case, golden, oracle.rounded_end_to_end(case, inputs, split=False))
    if case.stage is Stage.TOPK:
        yield "index order", {"topk": good["topk"].flip(-1)}
        yield (
            "other ones of equal values",
            {"topk": select(inputs["logits"], inputs["row_lens"].long(), int(case.shape["topk"]), last_first=True)},
        )
    if case.stage is Stage.QUANT and case.facets["scale"] == "ue8m0":
        yield "ue8m0 scale by bits", _quantised_by_bits(inputs)
    if case.stage is Stage.METADATA:
        yield from ((name, {"lens": golden[name]}) for name in golden)


def _quantised_by_bits(inputs: Inputs) -> Run:
    """ue8m0 as kernels make it (DeepGEMM, ceil_to_ue8m0): one exponent up unless the mantissa is 0."""
    made: Run = {}
    for part in ("q", "k"):
        x = inputs[part].float()
        scale = x.abs().amax(-1).clamp(min=oracle.AMAX_FLOOR) / oracle.FP8_MAX
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        codes = (x / scale[..., None]).clamp(-oracle.FP8_MAX, oracle.FP8_MAX).to(torch.float8_e4m3fn)
        made |= {f"{part}_fp8": codes.view(torch.uint8), f"{part}_scale": scale}
    return made


def _summed_in_fp32(case: Case, inputs: Inputs) -> list[Tensor]:
    """Logits of four groups of heads, each rounded to fp32, added up in fp32 from the last group on."""
    heads = torch.arange(inputs["weights"].shape[1])
    total: list[Tensor] = []
    for group in (3, 2, 1, 0):
        weights = torch.where(heads % 4 == group, inputs["weights"], 0.0)
        part = [row.float() for row in oracle.logits_of_quantised(case, {**inputs, "weights": weights})]
        total = [a + b for a, b in zip(total, part, strict=True)] if total else part
    return total


# ---- verdicts ----------------------------------------------------------------------------------------------


def faults(case: Case, inputs: Inputs, golden: Golden, good: Run) -> Iterator[tuple[str, list[Run]]]:
    """(fault, the runs that show it) of all that have meaning; ``good`` are the right outputs.

    A fault that changes no meaningful bit (doubling where every valid logit is exactly 0) has no meaning for the case.
    """
    for name, outputs in planted(case, inputs, golden, good):
        if not compare.identical(case, golden, good, outputs):
            yield name, [outputs]
    other = _one_bit_off(golden, good)
    if other:
        yield "changes with poison", [good, other, good]
        yield "changes when repeated", [good, good, other]


def rejections(case: Case, inputs: Inputs, golden: Golden, good: Run) -> Iterator[tuple[str, str]]:
    """(fault, name of the comparison that rejects it, "" when none does)."""
    for name, runs in faults(case, inputs, golden, good):
        yield name, _rejected_by(case, golden, runs)


def examine(case: Case, inputs: Inputs, golden: Golden) -> tuple[dict[str, str], list[str]]:
    """({fault: comparison that rejects it}, what is unsound: a line for each fault accepted or difference refused)."""
    good = right(case, inputs, golden)
    rejected = dict(rejections(case, inputs, golden, good))
    differences = legitimate(case, inputs, golden, good)
    refused = {name: by for name, outputs in differences if (by := _rejected_by(case, golden, [outputs]))}
    unsound = [f"accepts the fault {name!r}" for name, by in rejected.items() if not by]
    return rejected, unsound + [f"rejects the legitimate difference {name!r} ({by})" for name, by in refused.items()]


def _rejected_by(case: Case, golden: Golden, runs: list[Run]) -> str:
    return next((c.name for c in compare.compare(case, golden, runs) if not c.ok), "")


def _one_bit_off(golden: Golden, good: Run) -> Run | None:
    """The right outputs with the last bit of one meaningful value turned; None where there is none."""
    name = next(iter(good))
    value = good[name].clone().contiguous()
    if not value.numel():
        return None
    at = int(compare.valid(golden, value.shape[1]).flatten().nonzero()[-1]) if name == "logits" else 0
    value.view(torch.uint8).flatten()[at * value.element_size()] ^= 1
    return {**good, name: value}
