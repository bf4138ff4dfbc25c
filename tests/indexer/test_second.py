"""The oracle against a second derivation that shares no line with it: on random small cases, and on the goldens."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsabisect.indexer import controls, generate, oracle, second
from dsabisect.model import Case, Stage
from dsabisect.outside import golden

SET = golden.load()
QUICK = settings(max_examples=25, deadline=None, derandomize=True)
DATA = ("gaussian", "correlated", "negative", "duplicated", "tiny", "saturating")


def plain(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (t.float() if t.dtype is torch.bfloat16 else t).numpy() for name, t in inputs.items()}


def close(ours: list[torch.Tensor], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        size = float(one.abs().max()) if one.numel() else 0.0
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-9, atol=1e-12 * size)


def made(stage: Stage, facets: dict[str, Any], shape: dict[str, Any]) -> Case:
    seed = int(hashlib.sha256(repr((facets, shape)).encode()).hexdigest()[:8], 16)
    return Case(id="made", stage=stage, facets=facets, shape=shape, seed=seed)


def test_every_code_of_e4m3() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(second.e4m3(codes), oracle.fp8(torch.from_numpy(codes)).numpy())


def test_the_hadamard_matrix() -> None:
    unit = np.eye(128)
    np.testing.assert_allclose(second.walsh(unit), oracle.hadamard(torch.from_numpy(unit)).numpy(), atol=1e-15)


@QUICK
@given(
    heads=st.sampled_from([1, 32, 64]), next_n=st.integers(1, 4), data=st.sampled_from(DATA),
    lens=st.lists(st.integers(4, 200), min_size=1, max_size=3),
)  # fmt: skip
def test_paged_logits(heads: int, next_n: int, data: str, lens: list[int]) -> None:
    facets = {"layout": "native", "heads": heads, "next_n": next_n, "data": data}
    case = made(Stage.LOGITS, facets, {"context_lens": lens})
    inputs = generate.inputs(case)
    close(oracle.logits_of_quantised(case, inputs), second.logits_of_quantised(facets, plain(inputs)))


@QUICK
@given(
    heads=st.sampled_from([1, 32, 64]), data=st.sampled_from(DATA), tokens=st.integers(3, 9), keys=st.integers(16, 150)
)
def test_ragged_logits(heads: int, data: str, tokens: int, keys: int) -> None:
    facets = {"layout": "ragged", "heads": heads, "data": data}
    case = made(Stage.LOGITS, facets, {"tokens": tokens, "keys": keys})
    inputs = generate.inputs(case)
    close(oracle.logits_of_quantised(case, inputs), second.logits_of_quantised(facets, plain(inputs)))


@QUICK
@given(
    heads=st.sampled_from([1, 4, 32]), rope=st.sampled_from(["neox", "interleaved"]), rotated=st.booleans(),
    data=st.sampled_from(["gaussian", "correlated"]),
    lens=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 3)), min_size=1, max_size=3),
)  # fmt: skip
def test_end_to_end(heads: int, rope: str, rotated: bool, data: str, lens: list[tuple[int, int]]) -> None:
    facets = {"rope": rope, "heads": heads, "data": data}
    shape = {
        "seq_lens": [n + e for n, e in lens], "extend_lens": [e for _, e in lens], "hidden": 64, "q_lora_rank": 32,
        "topk": 16, "max_position": 96,
    }  # fmt: skip
    case = made(Stage.END_TO_END, facets, shape)
    inputs = generate.inputs(case)
    close(oracle.end_to_end(case, inputs), second.end_to_end(facets, plain(inputs), rotated=rotated))


@QUICK
@given(
    row=st.lists(st.integers(-3, 3), min_size=1, max_size=40), k=st.integers(1, 50), last_first=st.booleans()
)  # few values: many ties
def test_top_k(row: list[int], k: int, last_first: bool) -> None:
    values = torch.tensor(row, dtype=torch.float64)
    must, may = second.largest(values.numpy(), k)
    chosen = controls.select(values[None], torch.tensor([len(row)]), k, last_first=last_first)[0]
    picked = set(chosen[chosen >= 0].tolist())
    assert len(picked) == min(k, len(row)) and must <= picked <= may
    assert oracle.kth_value(values, k) == min(row[p] for p in picked)


IDS = [c.id for c in SET.cases("smoke") if c.stage in (Stage.LOGITS, Stage.END_TO_END)][::3]


@pytest.mark.parametrize("id", IDS)
def test_stored_goldens(id: str) -> None:
    case, kept = SET.by_id[id], SET.golden(id)
    inputs = plain(generate.inputs(case))
    derive = second.end_to_end if case.stage is Stage.END_TO_END else second.logits_of_quantised
    rows = derive(case.facets, inputs)
    assert [len(row) for row in rows] == kept["row_len"].tolist()
    both = zip(rows, kept["logits"].split(kept["row_len"].tolist()), strict=True)
    errors = [oracle.row_error(torch.from_numpy(np.ascontiguousarray(row)), stored) for row, stored in both]
    assert max(errors) < 1e-13  # stored in fp32


def test_a_wrong_rotation_would_be_noticed() -> None:
    case = SET.by_id["e2e-neox-h32-decode"]
    inputs = plain(generate.inputs(case))
    rows = second.end_to_end({**case.facets, "rope": "interleaved"}, inputs)
    stored = SET.golden(case.id)["logits"][: len(rows[0])]
    assert oracle.row_error(torch.from_numpy(np.ascontiguousarray(rows[0])), stored) > 0.05
