"""Negative controls: planted faults that every case must reject, and legitimate differences that it must accept.

A golden that accepts one of the faults would give false verdicts: BadOracle. The faults are made from the oracle's own
pieces, or on the right outputs where the fault is one of positions (DOMAIN section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dsabisect.indexer import compare, oracle
from dsabisect.model import Case, Stage

Run = dict[str, Tensor]
Inputs = Mapping[str, Tensor]


def right(case: Case, inputs: Inputs, golden: Mapping[str, Tensor]) -> Run:
    """Outputs of a faultless path."""
    if case.stage is Stage.QUANT:
        return {name: golden[name].clone() for name in compare.OUTPUTS[Stage.QUANT]}
    if case.stage is Stage.METADATA:
        return {"lens": next(iter(golden.values())).clone()}
    if case.stage is Stage.TOPK:
        return {"topk": select(inputs["logits"], inputs["row_lens"].long(), int(case.shape["topk"]))}
    rows = (
        oracle.rounded_end_to_end(case, inputs, split=True)
        if case.stage is Stage.END_TO_END
        else oracle.logits_of_quantised(case, inputs)
    )
    return _outputs(case, golden, rows)


def _outputs(case: Case, golden: Mapping[str, Tensor], rows: list[Tensor]) -> Run:
    start, width = golden["row_start"], int((golden["row_start"] + golden["row_len"]).max())
    fill = -torch.inf if case.shape.get("clean") else torch.nan
    logits = torch.full((len(rows), width), fill)
    for r, row in enumerate(rows):
        logits[r, int(start[r]) : int(start[r]) + len(row)] = row.float()
    return {"logits": logits}


def select(logits: Tensor, lens: Tensor, k: int) -> Tensor:
    """[rows,K] int32 positions of the K largest valid values, -1 where there are fewer."""
    width = logits.shape[1]
    mask = torch.arange(width)[None, :] < lens[:, None]
    low = torch.where(mask, logits.double(), torch.full((), -torch.inf, dtype=torch.float64))
    order = low.topk(min(k, width), -1).indices
    chosen = torch.where(torch.arange(order.shape[1])[None, :] < lens.clamp(max=k)[:, None], order, -1)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1).int()


# ---- planted faults ----------------------------------------------------------------------------------------


def planted(case: Case, inputs: Inputs, golden: Mapping[str, Tensor]) -> Iterator[tuple[str, Run]]:
    """(name, outputs) of every fault that has meaning for this case."""
    good = right(case, inputs, golden)
    if case.stage in (Stage.LOGITS, Stage.END_TO_END):
        yield from _planted_outputs(case, golden, good)
        yield from _planted_pieces(case, inputs, golden)
    elif case.stage is Stage.TOPK:
        yield from _planted_topk(inputs, good)
    elif case.stage is Stage.QUANT:
        yield "scale times two", {**good, "k_scale": good["k_scale"] * 2}
        yield "scales of two tokens swapped", {**good, "k_scale": good["k_scale"].roll(1, 0)}
        yield "codes of two tokens swapped", {**good, "q_fp8": good["q_fp8"].roll(1, 0)}
    else:
        yield "lengths off by one", {"lens": good["lens"] + 1}
        yield "one row too few", {"lens": good["lens"].flatten()[:-1]}
        yield "one row too many", {"lens": torch.cat([good["lens"].flatten(), torch.ones(1, dtype=torch.int32)])}


def _planted_outputs(case: Case, golden: Mapping[str, Tensor], good: Run) -> Iterator[tuple[str, Run]]:
    logits, start, length = good["logits"], golden["row_start"], golden["row_len"]
    yield "times two", {"logits": logits * 2}
    row = int(length.argmax())
    low, high = int(start[row]), int(start[row] + length[row])
    one = logits.clone()
    one[row, low] = torch.nan
    yield "NaN in one valid position", {"logits": one}
    if high - low >= 8:
        one = logits.clone()
        one[row, low:high] = one[row, low:high].roll(1)
        yield "one bad row", {"logits": one}
    if high - low >= 2 * oracle.PAGE:
        one = logits.clone()
        first, second = slice(low, low + oracle.PAGE), slice(low + oracle.PAGE, low + 2 * oracle.PAGE)
        one[:, first], one[:, second] = logits[:, second], logits[:, first]
        if not torch.equal(one[row, low:high], logits[row, low:high]):
            yield "two pages swapped", {"logits": one}
    if case.shape.get("clean"):
        one = logits.clone()
        outside = ~compare.valid(golden, logits.shape[1])
        if bool(outside.any()):
            one[outside] = 0
            yield "cleaned with zeros", {"logits": one}
    one = logits.clone()
    one[torch.arange(len(length)), start + length - 1] = -torch.inf
    yield "causal off by one", {"logits": one}


def _planted_pieces(case: Case, inputs: Inputs, golden: Mapping[str, Tensor]) -> Iterator[tuple[str, Run]]:
    if case.stage is Stage.END_TO_END:
        other = "interleaved" if case.facets["rope"] == "neox" else "neox"
        turned = Case(id=case.id, stage=case.stage, facets={**case.facets, "rope": other}, shape=case.shape)
        yield "rope swapped", _outputs(case, golden, oracle.rounded_end_to_end(turned, inputs, split=False))
        q, k, g = oracle.project(inputs, neox=case.facets["rope"] == "neox")
        w = g * q.shape[1] ** -0.5 * oracle.D**-0.5
        for name, fault in (
            ("hadamard on k only", (q, oracle.hadamard(k), w)),
            ("k rolled by one token", (q, k.roll(1, 0), w)),
            ("head weights swapped", (q, k, w.roll(1, 1))),
            ("q scale left out", (q, k, w / oracle.scale_of(q, "fp32"))),
        ):
            yield name, _outputs(case, golden, oracle._by_sequence(inputs, *fault))
        return
    changed: dict[str, Callable[[], dict[str, Tensor]]] = {
        "head weights swapped": lambda: {"weights": inputs["weights"][:, _swap(inputs["weights"].shape[1])]},
        "k scale off by one token": lambda: _rolled_scale(case, inputs),
    }
    for name, change in changed.items():
        rows = oracle.logits_of_quantised(case, {**inputs, **change()})
        yield name, _outputs(case, golden, rows)


def _swap(heads: int) -> Tensor:
    order = torch.arange(heads)
    order[:2] = torch.tensor([1, 0])
    return order


def _rolled_scale(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    if case.facets["layout"] == "ragged":
        return {"k_scale": inputs["k_scale"].roll(1, 0)}
    cache = inputs["kv_cache"].clone()
    tail = cache[:, oracle.PAGE * oracle.D :].reshape(-1, oracle.PAGE, 4)
    # within the page, so that a scale never comes from poison but at the page's first token
    tail = torch.cat([tail[:, 1:2], tail[:, :-1]], 1)
    cache[:, oracle.PAGE * oracle.D :] = tail.reshape(len(cache), -1)
    return {"kv_cache": cache}


def _planted_topk(inputs: Inputs, good: Run) -> Iterator[tuple[str, Run]]:
    topk, lens = good["topk"], inputs["row_lens"].long()
    many = int(lens.argmax())
    one = topk.clone()
    one[many, 1] = one[many, 0]
    yield "duplicate index", {"topk": one}
    one = topk.clone()
    one[many, 0] = int(lens[many])
    yield "stale tail read as valid", {"topk": one}
    one = topk.clone()
    one[many, int((one[many] >= 0).sum()) - 1] = -1
    yield "one too few", {"topk": one}
    if int(lens[many]) > topk.shape[1]:
        logits = inputs["logits"][many, : int(lens[many])]
        one = topk.clone()
        one[many, 0] = int(logits.argmin())
        yield "smallest instead of largest", {"topk": one}


# ---- legitimate differences --------------------------------------------------------------------------------


def legitimate(case: Case, inputs: Inputs, golden: Mapping[str, Tensor]) -> Iterator[tuple[str, Run]]:
    """Outputs that differ from the golden's in ways that a right implementation may."""
    good = right(case, inputs, golden)
    yield "itself", good
    if case.stage in (Stage.LOGITS, Stage.END_TO_END):
        yield "negative zero", {"logits": torch.where(good["logits"] == 0, -0.0, good["logits"])}
        noise = 1 + 2.0**-22 * torch.sin(torch.arange(good["logits"].numel()).reshape(good["logits"].shape))
        yield "order of accumulation", {"logits": good["logits"] * noise}
    if case.stage is Stage.END_TO_END:
        yield "fused numerics", _outputs(case, golden, oracle.rounded_end_to_end(case, inputs, split=False))
    if case.stage is Stage.TOPK:
        order = torch.arange(good["topk"].shape[1] - 1, -1, -1)
        yield "index order", {"topk": good["topk"][:, order]}


def rejections(case: Case, inputs: Inputs, golden: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """(fault, name of the comparison that rejects it, "" when none does).

    A fault that changes no meaningful bit (doubling where every valid logit is exactly 0) has no meaning for the case.
    """
    good = right(case, inputs, golden)
    for name, outputs in planted(case, inputs, golden):
        if compare.identical(golden, good, outputs):
            continue
        yield name, next((c.name for c in compare.compare(case, golden, [outputs]) if not c.ok), "")
