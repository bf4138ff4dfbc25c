"""Every negative control is rejected, every legitimate difference accepted, on every case of smoke."""

from __future__ import annotations

import pytest
import torch

from dsabisect.indexer import compare, controls, generate
from dsabisect.model import Stage
from dsabisect.outside import golden

SET = golden.load()
SMOKE = {case.id: case for case in SET.cases("smoke")}
WANTED = {
    Stage.END_TO_END: {
        "rope swapped", "hadamard on k only", "k scale off by one token", "q scale left out", "head weights swapped",
        "times two", "two pages swapped", "one bad row", "causal off by one", "NaN in one valid position",
        "duplicate index", "stale tail read as valid",
    },
    Stage.LOGITS: {
        "k scale off by one token", "head weights swapped", "times two", "two pages swapped", "one bad row",
        "causal off by one", "NaN in one valid position", "ReLU left out",
    },
    Stage.TOPK: {"duplicate index", "causal off by one", "one too few", "smallest instead of largest",
                 "stale tail read as valid"},
    Stage.QUANT: {"scales of two tokens swapped", "scale times two", "NaN instead of the largest value"},
    Stage.METADATA: {"causal off by one", "lengths of the capture", "one row too many"},
}  # fmt: skip


@pytest.mark.parametrize("id", SMOKE)
def test_controls_are_rejected_and_legitimate_differences_accepted(id: str) -> None:
    case = SMOKE[id]
    rejected, unsound = controls.examine(case, generate.inputs(case), SET.golden(id))
    assert not unsound
    assert rejected and all(rejected.values())
    assert rejected == SET.manifest["cases"][id]["controls"]
    if case.facets.get("data") == "gaussian" and max(case.shape.get("context_lens", [999])) > 128:
        paged = case.facets.get("layout") != "ragged" or case.stage is Stage.END_TO_END
        wanted = WANTED[case.stage] - (set() if paged else {"two pages swapped"})
        wanted -= {"scales of two tokens swapped"} if case.facets.get("scale") == "ue8m0" else set()
        assert wanted <= set(rejected)


def test_clean_cases_have_a_control_of_the_infinite_set() -> None:
    found = SET.manifest["cases"]["logits-ragged-h64-clean"]["controls"]
    assert found["cleaned with zeros"] == found["stale tail read as valid"] == "infset"


def test_a_stale_tail_is_selected_from_the_page_and_found_by_its_positions() -> None:
    """Rows of 3 and of one whole page: what lies behind either end comes before everything that is valid."""
    logits = torch.zeros(2, 64)
    logits[:, 0] = 1
    topk = controls._with_tails(logits, torch.tensor([3, 64]), 65)
    assert set(topk[0].tolist()) == {*range(64), -1}
    assert set(topk[1, :64].tolist()) == set(range(64, 128)) and topk[1, 64] == 0


def test_one_bad_row_among_thousands_is_rejected() -> None:
    assert SET.manifest["cases"]["logits-native-h32-n2-rows4096"]["controls"]["one bad row of 4096"] == "diff"


def test_one_position_is_a_control_only_where_it_shows() -> None:
    """One value of 65,537 is less than the tolerance: it is left out there, and rejected in every shorter row."""
    said = {id: entry["controls"] for id, entry in SET.manifest["cases"].items() if id.startswith("logits-native")}
    deepest = {id for id in said if id.endswith("deepest")}
    assert len(deepest) == 2 and all("last position not written" not in said[id] for id in deepest)
    assert all(said[id]["last position not written"] == "diff" for id in said if id.endswith(("deep", "causal")))


def test_a_golden_too_lax_is_found_out() -> None:
    """With a baseline as bad as a fault nothing would be noticed: the controls say so."""
    case = SMOKE["e2e-neox-h64-decode"]
    lax = {**SET.golden(case.id)}
    lax["baseline_err"], lax["baseline_regret"] = torch.ones(3), torch.full((3,), 100.0)
    _, unsound = controls.examine(case, generate.inputs(case), lax)
    assert any("rope swapped" in line for line in unsound)


def test_a_golden_too_strict_is_found_out() -> None:
    case = SMOKE["e2e-neox-h64-decode"]
    strict = {**SET.golden(case.id)}
    strict["baseline_err"] = torch.zeros(3)
    _, unsound = controls.examine(case, generate.inputs(case), strict)
    assert any("fused numerics" in line for line in unsound)


def test_a_golden_of_the_wrong_rotation_is_found_out() -> None:
    """The oracle sharing the fault (sglang #27705's own test rotated as its kernel did)."""
    case = SMOKE["e2e-neox-h64-decode"]
    wrong = SET.golden("e2e-interleaved-h64-decode")
    _, unsound = controls.examine(case, generate.inputs(case), wrong)
    assert any("itself" in line for line in unsound)


def test_selection_breaks_ties_either_way() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, torch.nan]])
    first = controls.select(logits, torch.tensor([4]), 2)
    last = controls.select(logits, torch.tensor([4]), 2, last_first=True)
    assert set(first[0].tolist()) == {1, 2} and set(last[0].tolist()) == {2, 3}
    assert controls.select(logits, torch.tensor([1]), 3).tolist() == [[0, -1, -1]]


def test_faults_without_meaning_are_left_out() -> None:
    """Doubling zeros changes nothing: it is no control of such a case, and others remain."""
    case = SMOKE["logits-expanded-h64-n2-negative"]
    rejected, unsound = controls.examine(case, generate.inputs(case), SET.golden(case.id))
    assert "times two" not in rejected and "ReLU left out" in rejected and not unsound
    good = controls.right(case, generate.inputs(case), SET.golden(case.id))
    assert compare.identical(case, SET.golden(case.id), good, {"logits": good["logits"] * 2})
