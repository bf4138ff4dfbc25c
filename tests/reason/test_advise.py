"""The known answers of REALWORLD section 3 from hand-made cells, and the rules behind them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_cells import cell, failed

from dsabisect.model import Action, Change, Observation, PathSpec, Recommendation, Verdict
from dsabisect.reason import advise

CULPRIT = Change(id="c" * 40, title="A change", author="Ada", date="2026-05-20T00:00:00+00:00")


def told(
    observations: Sequence[Observation],
    path: str = "fused",
    switch: str = "FUSION",
    broken: Sequence[Observation] | None = None,
    **more: Any,
) -> Recommendation:
    """Advice when every bad cell diverges here, unless ``broken`` says which do."""
    diverging = [o.column for o in (observations if broken is None else broken) if o.verdict is Verdict.BAD]
    given_ = {"suspects": (CULPRIT.id,), "confirmed": True, "arch": "cpu", **more}
    return advise.advise(
        culprit=CULPRIT, observations=observations, diverging=diverging, switch=switch,
        path=PathSpec(name=path, title=path, default_selection=path == "default"), **given_,
    )  # fmt: skip


def grid(path: str, bad: Any, answer: str = "diverged", **facets: Sequence[Any]) -> list[Observation]:
    """A cell for each combination of facets; ``bad(facets)`` says which are bad."""
    found = []
    for number, values in enumerate(product(*facets.values())):
        one = dict(zip(facets, values, strict=True))
        found.append(cell(answer if bad(one) else "good", path=path, case=f"{path}-{number}", **one))
    return found


ROPE, HEADS, NEXT_N = ("neox", "interleaved"), (32, 64), (1, 2, 4)


def neox(facets: dict[str, Any]) -> bool:
    return facets["rope"] == "neox"


# ---- the known answers --------------------------------------------------------------------------------------


def story_a(arch: str = "sm90") -> list[Observation]:
    facets = {"rope": ROPE, "heads": HEADS, "next_n": NEXT_N, "arch": (arch,)}
    return [
        *grid("fused", neox, **facets), *grid("split", lambda _: False, **facets), *grid("default", neox, **facets)
    ]  # fmt: skip


def test_story_a_gates_the_fused_path_on_neox() -> None:
    given_ = told(story_a(), arch="sm90")
    assert given_.action is Action.GATE
    assert given_.gate is not None
    assert given_.gate.predicate == {"rope": "neox"}
    assert given_.gate.alternatives == ()
    assert given_.gate.switch == "FUSION"
    assert given_.gate.stays_on == ("fused for rope = interleaved",)
    assert given_.gate.goes_off == ("fused for rope = neox",)
    because = "\n".join(given_.because)
    assert "path split: 12 of 12 cells good" in because
    assert "rope = neox holds for all 6 bad cells of fused and for none of its 6 good ones" in because
    assert "0.41 > 0.0021 allowed" in because
    assert "sm100" in given_.missing[0]


def story_b() -> list[Observation]:
    found = []
    modes = (("decode", 1), ("target_verify", 2), ("draft_extend", 2), ("draft_extend", 4))
    for arch, (mode, next_n) in product(("sm90", "sm100"), modes):
        message = f"The size of tensor a ({3 * next_n}) must match"
        failure = failed("RuntimeError", message, "RuntimeError: size (N)")
        answer = "raised" if mode == "draft_extend" else "good"
        found.append(
            cell(answer, path="metadata", case=f"{mode}-{next_n}-{arch}",
                 failure=failure if answer == "raised" else None, mode=mode, next_n=next_n, arch=arch, graph="replay")
        )  # fmt: skip
    return found


def test_story_b_reverts_what_depends_on_the_batch() -> None:
    given_ = told(story_b(), path="metadata", switch="")
    assert given_.action is Action.REVERT
    assert given_.gate is None
    assert given_.change == CULPRIT.id
    because = "\n".join(given_.because)
    assert "mode = draft_extend: it changes from batch to batch" in because
    assert "no switch" in because
    assert "size of tensor a (6) must match" in because
    assert given_.missing == ()  # both archs were run


def test_story_b_reverts_even_with_a_switch() -> None:
    assert told(story_b(), path="metadata", switch="X").action is Action.REVERT


def test_story_c_missing_deep_gemm_is_a_line_and_no_accusation() -> None:
    note = "an ImportError object stands in for deep_gemm: its AttributeError hides the missing package"
    missing = [
        cell("raised", path="split", case=f"nodg-{rope}", failure=failed("AttributeError", "no get_num_sms"),
             notes=(note,), rope=rope, deep_gemm="missing", heads=64, arch="cpu")
        for rope in ROPE
    ]  # fmt: skip
    others = [
        *grid("fused", neox, rope=ROPE, heads=HEADS, arch=("cpu",), deep_gemm=("present",)),
        *grid("split", lambda _: False, rope=ROPE, heads=HEADS, arch=("cpu",), deep_gemm=("present",)),
    ]
    given_ = told([*others, *missing], broken=others, known_notes={note})
    assert given_.action is Action.GATE
    assert given_.gate is not None
    assert given_.gate.predicate == {"rope": "neox"}
    assert f"{note} (at the parent too)" in given_.because
    beside = [line for line in given_.because if line.startswith("not laid to this change")]
    assert len(beside) == 1
    assert "2 more bad cell(s) (raised)" in beside[0]
    assert "AttributeError: no get_num_sms" in beside[0]


def story_d() -> list[Observation]:
    assertion = failed("RuntimeError", 'static assertion failed with "Invalid block size"')
    ragged = [
        cell("raised", path="ragged", case=f"r{heads}", failure=assertion, heads=heads, layout="ragged", arch="sm90")
        for heads in HEADS
    ]
    return [*ragged, *grid("paged", lambda _: False, heads=HEADS, next_n=(1, 2), layout=("native",), arch=("sm90",))]


def test_story_d_reverts_and_says_what_sm100_would_show() -> None:
    given_ = told(story_d(), path="ragged", switch="", arch="sm90")
    assert given_.action is Action.REVERT
    because, missing = "\n".join(given_.because), "\n".join(given_.missing)
    assert "Invalid block size" in because
    assert "every cell of ragged that could be run is bad" in because
    assert "path paged: 4 of 4 cells good" in because
    assert "only sm90 was run" in missing
    assert "a gate on arch, needs an sm100 run" in missing
    assert f"dsabisect check {CULPRIT.id[:12]} --path ragged --device cuda:0" in missing


def test_a_bundled_flip_is_reverted_alone() -> None:
    facets = {"rope": ROPE, "heads": HEADS}
    cells = [
        *grid("default", neox, **facets), *grid("split", lambda _: False, **facets), *grid("fused", neox, **facets)
    ]  # fmt: skip
    flip = "FUSION = False → FUSION = True"
    moved = told(cells, path="default", broken=cells[:4], flips=(flip,), forced_unchanged=True)
    assert moved.action is Action.REVERT_HUNK
    assert any(flip in line for line in moved.because)
    assert told(cells, flips=(flip,), forced_unchanged=False).action is Action.GATE  # the path itself changed
    assert told(cells, flips=(), forced_unchanged=True, path="default", switch="").action is Action.REVERT


# ---- evidence that is short ---------------------------------------------------------------------------------


def test_hold_while_suspects_are_a_set() -> None:
    given_ = told(story_a(), suspects=tuple(f"{i:x}" * 40 for i in range(9)))
    assert given_.action is Action.HOLD
    assert given_.change == ""
    assert "9 commits" in given_.because[0]
    assert "and 3 more" in given_.missing[0]


def test_hold_while_unconfirmed() -> None:
    given_ = told(story_a(), confirmed=False, context=("already reverted by x",))
    assert given_.action is Action.HOLD
    assert given_.change == CULPRIT.id
    assert "--good ccccccccc~1 --bad ccccccccc" in given_.missing[0]
    assert "already reverted by x" in given_.because


def test_hold_when_the_diverging_cells_were_not_measured() -> None:
    assert told(story_a()[:0]).action is Action.HOLD
    assert told([cell("good")], broken=[cell("diverged")]).action is Action.HOLD


def test_hold_names_the_case_that_tells_confounded_facets_apart() -> None:
    cells = [cell("diverged", case="a", rope="neox", heads=64), cell("good", case="b", rope="interleaved", heads=32)]
    given_ = told(cells)
    assert given_.action is Action.HOLD
    assert given_.gate is not None
    found = [given_.gate.predicate, *given_.gate.alternatives]
    assert found == [{"rope": "neox"}, {"heads": 64}]
    missing = "\n".join(given_.missing)
    assert "rope = neox and heads = 32" in missing
    assert "heads = 64 and rope = interleaved" in missing
    # and the case that it asks for settles it
    settled = told([*cells, cell("diverged", case="c", rope="neox", heads=32)])
    assert settled.action is Action.GATE
    assert settled.gate is not None
    assert settled.gate.predicate == {"rope": "neox"}


# ---- when a gate would not do -------------------------------------------------------------------------------


def test_without_a_switch_it_is_a_revert() -> None:
    given_ = told(story_a(), switch="")
    assert given_.action is Action.REVERT
    assert any("no switch" in line and "fused" in line for line in given_.because)


def test_an_unrepeatable_path_is_reverted() -> None:
    cells = grid("fused", neox, answer="nondeterministic", rope=ROPE, heads=HEADS)
    given_ = told(cells)
    assert given_.action is Action.REVERT
    assert any("not repeatable" in line for line in given_.because)


def test_a_gate_that_leaves_default_cells_bad_is_no_gate() -> None:
    cells = [*grid("fused", neox, rope=ROPE, heads=HEADS), *grid("default", lambda _: True, rope=ROPE, heads=HEADS)]
    given_ = told(cells)
    assert given_.action is Action.REVERT
    assert any("2 of 4 bad default cells stay bad" in line for line in given_.because)


def test_a_gate_on_one_path_does_not_mend_another() -> None:
    cells = [*grid("fused", neox, rope=ROPE, heads=HEADS), *grid("split", neox, rope=ROPE, heads=HEADS)]
    given_ = told(cells)
    assert given_.action is Action.REVERT
    assert any(line.startswith("split diverges too") for line in given_.because)


def test_cells_that_could_not_be_tested_are_said() -> None:
    cells = [*grid("fused", neox, rope=ROPE, heads=HEADS), cell("not_exercised", case="z", rope="neox", heads=64)]
    given_ = told(cells)
    assert given_.action is Action.GATE
    assert any("1 cell(s) of fused could not be tested (not_exercised)" in line for line in given_.missing)


def test_absent_cells_count_for_nothing() -> None:
    cells = [*grid("fused", lambda _: True, rope=ROPE), cell("absent", case="z", rope="interleaved")]
    given_ = told(cells)
    assert given_.action is Action.REVERT
    assert any("nothing to keep on" in line for line in given_.because)


# ---- predicates ---------------------------------------------------------------------------------------------


def test_a_conjunction_when_no_single_facet_separates() -> None:
    cells = grid("fused", lambda f: f["rope"] == "neox" and f["heads"] == 64, rope=ROPE, heads=HEADS, page=(64,))
    given_ = told(cells)
    assert given_.gate is not None
    assert given_.gate.predicate == {"rope": "neox", "heads": 64}
    assert given_.gate.stays_on == (
        "fused for rope = interleaved and heads = 32", "fused for rope = interleaved and heads = 64",
        "fused for rope = neox and heads = 32",
    )  # fmt: skip


def test_a_set_of_values() -> None:
    cells = grid("fused", lambda f: f["arch"] != "sm90", arch=("sm90", "sm100", "sm120"), heads=HEADS)
    given_ = told(cells, arch="sm90")
    assert given_.action is Action.GATE
    assert given_.gate is not None
    assert given_.gate.predicate == {"arch": ("sm100", "sm120")}
    assert any("arch in {sm100, sm120} holds for all 4 bad cells" in line for line in given_.because)


def test_a_facet_that_some_cells_do_not_name_is_left_out() -> None:
    cells = [cell("diverged", case="a", scale="fp32", rope="neox"), cell("good", case="b", rope="interleaved")]
    assert advise.separating(cells[:1], cells[1:], advise.STATIC) == [{"rope": "neox"}]


def test_exclusive_or_separates_by_nothing() -> None:
    cells = grid("fused", lambda f: (f["rope"] == "neox") != (f["heads"] == 64), rope=ROPE, heads=HEADS)
    given_ = told(cells)
    assert given_.action is Action.REVERT
    assert any("no condition over the facets separates" in line for line in given_.because)


FACETS = {"rope": ("neox", "interleaved"), "heads": (32, 64), "arch": ("sm90", "sm100", "sm120")}
CORNERS = [dict(zip(FACETS, values, strict=True)) for values in product(*FACETS.values())]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["good", "diverged", None]), min_size=len(CORNERS), max_size=len(CORNERS)))
def test_every_smallest_predicate_and_no_other(answers: list[str | None]) -> None:
    """Against all conjunctions of all sets of values, tried one by one."""
    cells = [cell(a, case=str(i), **f) for i, (a, f) in enumerate(zip(answers, CORNERS, strict=True)) if a]
    bad, good = [o for o in cells if o.verdict is Verdict.BAD], [o for o in cells if o.verdict is Verdict.GOOD]
    found = advise.separating(bad, good, tuple(FACETS))
    if not bad or not good:
        assert found == []
        return
    for predicate in found:
        assert all(advise.holds(predicate, o) for o in bad)
        assert not any(advise.holds(predicate, o) for o in good)
    subsets = {f: [s for n in range(1, len(v) + 1) for s in combinations(v, n)] for f, v in FACETS.items()}
    facets = chain.from_iterable(combinations(FACETS, n) for n in range(1, len(FACETS) + 1))
    separates = {
        names
        for names in facets
        for sets in product(*(subsets[f] for f in names))
        if all(advise.holds(dict(zip(names, sets, strict=True)), o) for o in bad)
        and not any(advise.holds(dict(zip(names, sets, strict=True)), o) for o in good)
    }
    smallest = min(map(len, separates), default=0)
    assert {tuple(p) for p in found} == {names for names in separates if len(names) == smallest}


# ---- what a patch does beside its purpose -------------------------------------------------------------------


def test_threshold_edits() -> None:
    patch = """diff --git a/test/test_gsm8k.py b/test/test_gsm8k.py
--- a/test/test_gsm8k.py
+++ b/test/test_gsm8k.py
@@ -1,3 +1,3 @@
 class Test:
-    accuracy_threshold = 0.935
+    accuracy_threshold = 0.93
-    batch = 4
+    batch = 8
@@ -9,2 +9,2 @@
-    score = old_name(0.1)
+    score = new_name(0.1)
"""
    edits = advise.threshold_edits(patch)
    assert edits == ("test/test_gsm8k.py: accuracy_threshold = 0.935 → accuracy_threshold = 0.93",)


@pytest.mark.parametrize("facets", [("rope",), ("rope", "heads")])
def test_text_of_a_predicate(facets: tuple[str, ...]) -> None:
    values = {"rope": "neox", "heads": (32, 64)}
    text = advise.text_of({f: values[f] for f in facets})
    assert text == " and ".join({"rope": "rope = neox", "heads": "heads in {32, 64}"}[f] for f in facets)
