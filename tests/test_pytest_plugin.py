"""A kernel author's view: a fresh small package tests its own kernels against the goldens, through the plugin."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from dsabisect.errors import GoldenError
from dsabisect.outside import golden
from dsabisect.pytest_plugin import assert_matches_golden

pytest_plugins = ("pytester",)

KERNELS = '''
"""The logits of the indexer, written by somebody who has never seen the oracle."""
import torch


def paged_logits(q, kv_cache, weights, row_lens, block_table, context_lens, *, head_shift=0):
    batch, next_n, heads, dim = q.shape
    codes = kv_cache[:, : 64 * 128].reshape(-1, 64, 128).view(torch.float8_e4m3fn).float()
    scales = kv_cache[:, 64 * 128 :].contiguous().view(torch.float32)
    out = torch.full((batch * next_n, block_table.shape[1] * 64), float("nan"))
    for b in range(batch):
        pages = block_table[b, : -(-int(context_lens[b]) // 64)].long()
        k, s = codes[pages].reshape(-1, 128), scales[pages].reshape(-1)
        for j in range(next_n):
            dots = (q[b, j].view(torch.float8_e4m3fn).float() @ k.T).relu()
            out[b * next_n + j, : len(s)] = weights[b * next_n + j].roll(head_shift) @ dots * s
    return out


def wrong_paged_logits(*given, **named):
    """Deliberately wrong: each head takes its neighbour's weight."""
    return paged_logits(*given, **named, head_shift=1)
'''
TESTS = """
import pytest
from dsabisect.pytest_plugin import assert_matches_golden
from smallkernels import paged_logits, wrong_paged_logits

CASES = ["logits-native-h64-n2-causal", "logits-native-h64-n2-full", "logits-expanded-h32-n1-causal"]

@pytest.mark.parametrize("kernel", [paged_logits, wrong_paged_logits])
@pytest.mark.parametrize("id", CASES)
def test_kernel(kernel, id, dsabisect_goldens):
    case = dsabisect_goldens.by_id[id]
    assert_matches_golden(case, logits=kernel(**dsabisect_goldens.inputs(case)))
"""


def test_a_wrong_kernel_fails_with_row_position_facets_and_stage_and_the_right_one_passes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(golden.__file__).parents[2]))
    pytester.makepyfile(smallkernels=KERNELS, test_small=TESTS)
    result = pytester.runpytest_subprocess("-p", "dsabisect.pytest_plugin", "-q")
    result.assert_outcomes(passed=3, failed=3)
    text = result.stdout.str()
    for id in ("logits-native-h64-n2-causal", "logits-native-h64-n2-full", "logits-expanded-h32-n1-causal"):
        assert f"{id}-wrong_paged_logits" in text and f"{id} does not match its golden" in text
        assert f"[{id}-paged_logits]" not in text
    result.stdout.re_match_lines_random(
        [
            r"E +stage logits, rule diff: worst at row \d+, sequence \d+, position \d+",
            r"E +seen \d\.\d+, allowed 5e-06",
            r"E +logits\[\d+, \d+\] is -?[\d.e-]+, golden -?[\d.e-]+ \(valid from 0\)",
            r"E +facets: layout=native, heads=64, next_n=2, lens=causal, page=64, data=gaussian",
        ]
    )
    assert "def assert_matches_golden" not in text  # the reader's test is shown, not our insides


def test_topk_and_wrong_shapes_and_unknown_cases() -> None:
    goldens = golden.load()
    case = goldens.by_id["topk-gaussian"]
    inputs = goldens.inputs(case)
    lens, topk = inputs["row_lens"], inputs["logits"].clone()
    for row, n in enumerate(lens.tolist()):
        topk[row, n:] = float("-inf")
    picked = topk.topk(64).indices
    for row, n in enumerate(lens.tolist()):
        picked[row, n:] = -1
    assert_matches_golden(case, topk=picked, goldens=goldens)
    picked[2, 0] = 64
    with pytest.raises(AssertionError, match=r"stage topk, rule topk: worst at row 2") as caught:
        assert_matches_golden(case.id, topk=picked, goldens=goldens)
    assert "out_of_range 1" in str(caught.value)
    with pytest.raises(AssertionError, match="rule missing"):
        assert_matches_golden(case, logits=inputs["logits"], goldens=goldens)
    with pytest.raises(GoldenError, match="no golden for case"):
        assert_matches_golden("nothing", logits=inputs["logits"], goldens=goldens)


def test_the_entry_point_names_the_plugin() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(golden.__file__).parents[2] / "setup.cfg")
    assert setup["options.entry_points"]["pytest11"].strip() == "dsabisect.pytest_plugin = dsabisect.pytest_plugin"
