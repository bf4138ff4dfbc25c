"""The comparator: what it must not look at, what it must not miss, and what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsabisect.indexer import compare, controls, generate, tolerances
from dsabisect.model import Case, Comparison, to_json
from dsabisect.outside import golden

SET = golden.load()
Run = dict[str, Tensor]


class Asked:
    """A case with its inputs, golden and right outputs."""

    def __init__(self, id: str) -> None:
        self.case: Case = SET.by_id[id]
        self.inputs, self.golden = generate.inputs(self.case), SET.golden(id)
        self.good: Run = controls.right(self.case, self.inputs, self.golden)

    def __call__(self, *runs: Run, required: tuple[str, ...] = ()) -> dict[str, Comparison]:
        said = compare.compare(self.case, self.golden, runs or [self.good], required)
        for comparison in said:  # whatever is said is JSON and survives a journal
            again = Comparison.from_json(json.loads(json.dumps(to_json(comparison), allow_nan=False)))
            assert to_json(again) == to_json(comparison)
        return {comparison.name: comparison for comparison in said}


def failing(said: dict[str, Comparison]) -> set[str]:
    return {name for name, comparison in said.items() if not comparison.ok}


@pytest.fixture(scope="module")
def paged() -> Asked:
    return Asked("logits-native-h64-n2-causal")


@pytest.fixture(scope="module")
def clean() -> Asked:
    return Asked("logits-ragged-h64-clean")


@pytest.fixture(scope="module")
def end() -> Asked:
    return Asked("e2e-neox-h64-verify-n2")


@pytest.fixture(scope="module")
def quant() -> Asked:
    return Asked("quant-fp32-h64-edges")


# ---- missing and misshapen -----------------------------------------------------------------------------------


def test_no_run_is_missing_output(paged: Asked) -> None:
    said = compare.compare(paged.case, paged.golden, [])
    assert [(c.name, c.ok) for c in said] == [("missing", False)]


def test_an_output_missing_in_one_run_only_is_named(end: Asked) -> None:
    said = end(end.good, {"logits": end.good["logits"]}, required=("logits", "topk"))
    assert set(said) == {"missing"} and said["missing"].metrics["missing"] == "topk"
    assert not failing(end({"logits": end.good["logits"]}))  # not required: its top-k is taken from its logits


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x[:-1], lambda x: x[:, :100], lambda x: x[None], lambda x: x.flatten(), lambda x: x.to(torch.int32),
        lambda x: x.to(torch.complex64),
    ],
)  # fmt: skip
def test_misshapen_logits(paged: Asked, wrong: object) -> None:
    assert failing(paged({"logits": wrong(paged.good["logits"])})) == {"shape"}  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_topk_and_lens_must_be_integers(end: Asked, dtype: torch.dtype) -> None:
    assert failing(end({**end.good, "topk": end.good["topk"].to(dtype)})) == {"shape"}
    lens = Asked("meta-target_verify-n2-sm90")
    assert failing(lens({"lens": lens.good["lens"].to(dtype)})) == {"shape"}


def test_quantised_outputs_must_be_bytes_and_fp32(quant: Asked) -> None:
    good = quant.good
    assert failing(quant({**good, "q_fp8": good["q_fp8"].float()})) == {"shape"}
    assert failing(quant({**good, "k_scale": good["k_scale"].double()})) == {"shape"}
    assert not failing(quant({**good, "q_fp8": good["q_fp8"].view(torch.float8_e4m3fn)}))


# ---- regions that mean nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, 0.0])
def test_outside_the_valid_region_anything_may_stand_and_change(paged: Asked, garbage: float) -> None:
    outside = ~compare.valid(paged.golden, paged.good["logits"].shape[1])
    assert bool(outside.any())
    pad, logits = torch.nn.functional.pad, paged.good["logits"]
    filled = {"logits": pad(logits.masked_fill(outside, garbage), (0, 99), value=garbage)}
    other = {"logits": pad(logits.masked_fill(outside, 7.0), (0, 99))}
    assert not failing(paged(filled, other, filled))


def test_clean_logits_need_minus_infinity_exactly_outside(clean: Asked) -> None:
    assert not failing(clean())
    outside = ~compare.valid(clean.golden, clean.good["logits"].shape[1])
    row, position = outside.nonzero()[5].tolist()
    for wrong in (0.0, math.nan, math.inf, -1e38):
        changed = clean.good["logits"].clone()
        changed[row, position] = wrong
        said = clean({"logits": changed})
        assert failing(said) == {"infset"}
        assert said["infset"].metrics["wrong"] == 1 and said["infset"].worst_at == {"row": row, "position": position}


def test_minus_infinity_inside_is_not_finite(clean: Asked) -> None:
    changed = clean.good["logits"].clone()
    inside = compare.valid(clean.golden, changed.shape[1]).nonzero()[3].tolist()
    changed[inside[0], inside[1]] = -math.inf
    assert "finite" in failing(clean({"logits": changed}))


# ---- one bad value, one bad row --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found_and_placed(paged: Asked, bad: float) -> None:
    changed = paged.good["logits"].clone()
    changed[3, 77] = bad
    said = paged({"logits": changed})
    assert not said["finite"].ok and said["finite"].metrics["bad"] == 1
    assert said["finite"].worst_at == {"row": 3, "sequence": 1, "position": 77}


def test_one_bad_row_is_not_hidden_by_the_good_ones(paged: Asked) -> None:
    changed = paged.good["logits"].clone()
    length = int(paged.golden["row_len"][2])
    changed[2, :length] = changed[2, :length].roll(1)
    said = paged({"logits": changed})
    assert failing(said) == {"diff"}
    assert said["diff"].metrics["rows_over"] == 1
    assert said["diff"].worst_at is not None and said["diff"].worst_at["row"] == 2


def test_metrics_are_there_when_all_is_well(paged: Asked, end: Asked) -> None:
    diff = paged()["diff"]
    assert diff.ok and 0 <= float(diff.metrics["max"]) < 1e-12 and diff.metrics["rows"] == 8
    assert diff.tolerance["max"] == pytest.approx(5e-6) or float(diff.tolerance["max"]) > 5e-6
    said = end()
    assert set(said) == {"missing", "shape", "finite", "diff", "topk", "regret", "overlap"}
    assert 0.5 < float(said["overlap"].metrics["min"]) <= 1


def test_the_tolerance_of_logits_lies_between_rounding_and_the_smallest_fault(paged: Asked) -> None:
    logits = paged.good["logits"]
    assert not failing(paged({"logits": logits * (1 + 1e-6)}))
    assert failing(paged({"logits": logits * 1.01})) == {"diff"}  # 5e-5


def test_sixteen_bit_logits_have_their_own_tolerance(paged: Asked) -> None:
    assert not failing(paged({"logits": paged.good["logits"].bfloat16()}))
    assert tolerances.value("logits.diff") < tolerances.value("logits.diff_bf16") < 4e-5


def test_negative_zero_is_zero_as_a_value_but_not_as_a_repeat() -> None:
    zeros = Asked("logits-expanded-h64-n2-negative")
    minus = {"logits": -zeros.good["logits"]}
    assert not failing(zeros(minus))
    assert failing(zeros(zeros.good, zeros.good, minus)) == {"repeat"}


def test_a_row_of_zeros_must_be_zeros() -> None:
    zeros = Asked("logits-expanded-h64-n2-negative")
    changed = torch.where(zeros.good["logits"] == 0, 1e-20, zeros.good["logits"])
    assert failing(zeros({"logits": changed})) == {"diff"}


# ---- repeats and poison ------------------------------------------------------------------------------------------


def test_a_last_bit_that_changes_is_poison_or_a_race(paged: Asked) -> None:
    changed = paged.good["logits"].clone()
    changed.view(torch.int32)[1, 0] ^= 1
    other = {"logits": changed}
    assert failing(paged(paged.good, other, paged.good)) == {"poison"}
    assert failing(paged(paged.good, paged.good, other)) == {"repeat"}
    assert paged(paged.good, paged.good, other)["repeat"].metrics["differing"] == 1


def test_another_order_of_the_same_topk_is_no_race(end: Asked) -> None:
    turned = {**end.good, "topk": end.good["topk"].flip(-1)}
    assert not failing(end(end.good, turned, turned))


# ---- top-k ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["topk-gaussian", "topk-ties", "topk-plateau", "topk-short", "topk-2048"])
def test_selections(id: str) -> None:
    asked = Asked(id)
    topk, lens = asked.good["topk"], asked.inputs["row_lens"]
    assert not failing(asked())
    for turned in (topk.flip(-1), topk[:, torch.randperm(topk.shape[1], generator=torch.Generator().manual_seed(1))]):
        assert not failing(asked({"topk": turned}))
    assert not failing(asked({"topk": topk.long()}))
    row = int(lens.argmax())
    for wrong in (int(lens[row]), 2**31 - 1, -2, -(2**31)):
        changed = topk.clone()
        changed[row, 0] = wrong
        said = asked({"topk": changed})
        assert failing(said) == {"topk"} and int(said["topk"].metrics["out_of_range"]) == 1
        assert said["topk"].worst_at == {"row": row}


@pytest.mark.parametrize("id", ["topk-ties", "topk-plateau"])
def test_ties_at_the_border_are_free_and_values_below_it_are_not(id: str) -> None:
    asked = Asked(id)
    rows = [(row, asked.inputs["logits"][row, : int(n)]) for row, n in enumerate(asked.inputs["row_lens"]) if n > 64]
    ranked = [(row, logits, logits.topk(64).values[-1]) for row, logits in rows]
    row, logits, kth = next((r, x, v) for r, x, v in ranked if int((x >= v).sum()) > 64)  # more candidates than places
    above, tied = (logits > kth).nonzero()[:, 0], (logits == kth).nonzero()[:, 0]
    changed = asked.good["topk"].clone()
    for places in (tied[: 64 - len(above)], tied[len(above) - 64 :]):
        changed[row] = torch.cat([above, places]).int()
        assert not failing(asked({"topk": changed}))
    wrong = (logits < kth).nonzero()[:, 0]
    if len(wrong):
        changed[row, -1] = wrong[0]
        said = asked({"topk": changed})
        assert failing(said) == {"topk"} and said["topk"].metrics["below_kth"] == 1
    changed[row] = torch.cat([above, tied[:1], tied[: 63 - len(above)]]).int()  # one of them twice: nothing is left out
    said = asked({"topk": changed})
    assert failing(said) == {"topk"} and [said["topk"].metrics[n] for n in ("twice", "left_out", "count")] == [1, 0, 0]
    changed[row] = torch.cat([above[1:], tied[: 65 - len(above)]]).int()
    said = asked({"topk": changed})
    assert failing(said) == {"topk"} and said["topk"].metrics["left_out"] == 1


def test_topk_of_a_path_is_held_against_its_own_logits(end: Asked) -> None:
    changed = end.good["topk"].clone()
    changed[0, 0] = int(end.good["logits"][0, : int(end.golden["row_len"][0])].argmin())
    said = end({**end.good, "topk": changed})
    assert "topk" in failing(said) and said["topk"].metrics["by"] == "own logits"


def test_wild_indices_are_a_fault_of_the_path_and_no_crash_of_ours(end: Asked) -> None:
    changed = end.good["topk"].clone()
    changed[:] = 2**31 - 1
    assert "topk" in failing(end({**end.good, "topk": changed}))
    changed[:] = -1
    assert "topk" in failing(end({**end.good, "topk": changed}))


def test_unselected_padding_first_is_no_fault_of_overlap() -> None:
    short = Asked("e2e-neox-h64-decode")
    wide = torch.nn.functional.pad(short.good["topk"], (400, 0), value=-1)  # -1 in front, more columns than logits
    said = short({**short.good, "topk": wide})
    assert not failing(said)
    assert said["overlap"].metrics == short()["overlap"].metrics


# ---- end to end ---------------------------------------------------------------------------------------------------


def test_error_may_be_twice_the_baseline(end: Asked) -> None:
    allowed = 2 * end.golden["baseline_err"] + 1e-5
    want = compare.truth(end.golden, end.good["logits"].shape[1])
    inside = compare.valid(end.golden, want.shape[1])
    for share, verdict in ((0.9, set()), (1.1, {"diff"})):
        # a factor f makes a row error of (f - 1)² / (1 + f²)
        e = share * allowed[:, None]
        f = (1 + torch.sqrt(1 - (1 - e) ** 2)) / (1 - e)
        said = end({"logits": torch.where(inside, want * f, torch.nan).float()})
        assert failing(said) == verdict
        assert said["regret"].metrics["max"] == pytest.approx(0, abs=1e-6)


def test_regret_is_gated_and_overlap_is_not(end: Asked) -> None:
    want = compare.truth(end.golden, end.good["logits"].shape[1])
    lowest = int(want[0, : int(end.golden["row_len"][0])].argmin())
    changed = end.good["topk"].clone()
    changed[0, 0] = lowest
    said = end({**end.good, "topk": changed})
    assert {"topk", "regret"} == failing(said)
    assert said["overlap"].ok
    assert said["regret"].worst_at == {"row": 0, "sequence": 0}


# ---- quant ----------------------------------------------------------------------------------------------------------


def test_one_step_on_one_value_in_a_thousand_is_free(quant: Asked) -> None:
    codes = quant.good["q_fp8"].clone().flatten()
    mid = ((codes & 0x7F) > 8) & ((codes & 0x7F) < 0x70)
    at = mid.nonzero()[:, 0]
    few, many = at[: len(codes) // 1000], at[: len(codes) // 900]
    for chosen, step, verdict in ((few, 1, set()), (many, 1, {"bytes_q"}), (few[:1], 2, {"bytes_q"})):
        changed = codes.clone()
        changed[chosen] += step
        assert failing(quant({**quant.good, "q_fp8": changed.view_as(quant.good["q_fp8"])})) == verdict


def test_nan_is_no_neighbour_of_448(quant: Asked) -> None:
    for code, nan in ((0x7E, 0x7F), (0xFE, 0xFF)):
        codes = quant.good["q_fp8"].clone()
        at = (codes == code).flatten().nonzero()[0, 0]
        codes.flatten()[at] = nan
        said = quant({**quant.good, "q_fp8": codes})
        assert failing(said) == {"bytes_q"} and said["bytes_q"].metrics["nan"] == 1


def test_codes_of_zero_are_equal(quant: Asked) -> None:
    codes = torch.where(quant.good["q_fp8"] == 0, 0x80, quant.good["q_fp8"].int()).to(torch.uint8)
    assert not failing(quant({**quant.good, "q_fp8": codes}))


def test_scales(quant: Asked) -> None:
    for factor, verdict in ((1 + 2.0**-23, set()), (1 + 2.0**-20, {"scale_k"}), (math.nan, {"scale_k"})):
        assert failing(quant({**quant.good, "k_scale": quant.good["k_scale"] * factor})) == verdict
    powers = Asked("quant-ue8m0-h64-edges")
    assert failing(powers({**powers.good, "k_scale": powers.good["k_scale"] * (1 + 2.0**-23)})) == {"scale_k"}


# ---- metadata: lengths seen at sglang 99da43b90, 13852d3f3, 73b53e7a8, 3b62286fc ---------------------------------

LENS = [
    ("meta-decode-n1-sm90", [[300], [129], [64]], True),
    ("meta-decode-n1-sm90", [300, 129, 64], True),
    ("meta-decode-n1-sm90", [299, 128, 63], False),
    ("meta-target_verify-n2-sm90", [[299], [300], [128], [129], [63], [64]], True),
    ("meta-target_verify-n2-sm90", [299, 300, 128, 129, 63, 64], True),
    ("meta-target_verify-n2-sm100", [[299, 300], [128, 129], [63, 64]], True),
    ("meta-target_verify-n2-sm100", [[300, 300], [129, 129], [64, 64]], True),
    ("meta-target_verify-n2-sm90", [[300], [300], [129], [129], [64], [64]], False),  # each token sees later drafts
    ("meta-target_verify-n2-sm90", [300, 129, 64], False),
    ("meta-target_verify-n2-sm90", [[300, 129, 64], [300, 129, 64]], False),
    ("meta-draft_extend-n2-sm90", [[300], [128], [129], [64]], True),
    ("meta-draft_extend-n2-sm90", [[300], [128], [129], [64], [513], [514]], True),  # a padded graph buffer
    ("meta-draft_extend-n4-sm90", [300, 128, 129, 64, 513, 514, 515, 516, 513, 514, 515, 516], True),
    ("meta-draft_extend-n2-sm90", [300, 128, 129, 64, -1, 514], False),  # lengths below 0: sglang #30274
    ("meta-draft_extend-n2-sm90", [300, 128, 129, 64, 513], False),
    ("meta-draft_extend-n2-sm90", [513, 514, 300, 128, 129, 64], False),
    ("meta-decode-indexer-without-deep-gemm", [], True),
    ("meta-decode-indexer-without-deep-gemm", [300, 129, 64], False),
]


@pytest.mark.parametrize(("id", "lens", "right"), LENS)
def test_lengths_that_reach_the_scheduler(id: str, lens: list[int], right: bool) -> None:
    said = Asked(id)({"lens": torch.tensor(lens, dtype=torch.int32)})
    assert failing(said) == (set() if right else {"lens"})
    assert said["lens"].metrics["shape"] == str(tuple(torch.tensor(lens).shape))


# ---- tolerances ----------------------------------------------------------------------------------------------


def test_each_tolerance_has_a_reason_and_is_used() -> None:
    source = Path(compare.__file__).read_text(encoding="utf-8")
    for name, tolerance in tolerances.TABLE.items():
        assert len(tolerance.reason) > 12 and tolerance.value > 0
        assert f'"{name}"' in source, f"{name} is used nowhere"
