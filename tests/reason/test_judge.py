"""From outcomes and comparisons to verdicts, from verdicts at both ends to what is searched."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_cells import cell, failed, said

from dsabisect.model import Column, Measurement, Observation, Outcome, Reason, Stage, Verdict
from dsabisect.reason import judge
from dsabisect.reason.judge import EndpointStatus

COMPLETED = Measurement(path="fused", case="c", outcome=Outcome.COMPLETED)


# ---- one cell -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "verdict", "reason"),
    [
        (Outcome.NOT_EXERCISED, Verdict.SKIP, Reason.NOT_EXERCISED),
        (Outcome.ABSENT, Verdict.GOOD, Reason.ABSENT),
        (Outcome.BUILD_FAILED, Verdict.SKIP, Reason.BUILD_FAILED),
        (Outcome.RAISED, Verdict.BAD, Reason.RAISED),
        (Outcome.CRASHED, Verdict.BAD, Reason.CRASHED),
        (Outcome.TIMED_OUT, Verdict.BAD, Reason.TIMED_OUT),
        (Outcome.OUT_OF_MEMORY, Verdict.BAD, Reason.OUT_OF_MEMORY),
    ],
)
def test_outcome_decides_when_nothing_completed(outcome: Outcome, verdict: Verdict, reason: Reason) -> None:
    measurement = replace(COMPLETED, outcome=outcome, failure=failed("E", "line one\nline two"))
    assert judge.judge(measurement, ()) == (verdict, reason, "E: line one line two")
    assert judge.judge(replace(measurement, failure=None, detail="why"), ()) == (verdict, reason, "why")


def test_every_outcome_has_a_verdict() -> None:
    assert {Outcome.COMPLETED, *judge.OF_OUTCOME} == set(Outcome)


def test_nothing_compared_is_never_good() -> None:
    assert judge.judge(COMPLETED, ())[:2] == (Verdict.SKIP, Reason.NOT_EXERCISED)


def test_every_comparison_holds() -> None:
    verdict, reason, detail = judge.judge(COMPLETED, (said("repeat"), said("diff", max=0.00084)))
    assert (verdict, reason) == (Verdict.GOOD, Reason.MATCHED)
    assert detail == "end_to_end: worst row 0.00084"


REASONS = {
    "missing": Reason.MISSING_OUTPUT, "shape": Reason.MISSING_OUTPUT, "repeat": Reason.NONDETERMINISTIC,
    "poison": Reason.POISONED, "finite": Reason.DIVERGED, "infset": Reason.DIVERGED, "diff": Reason.DIVERGED,
    "bytes_q": Reason.DIVERGED, "lens": Reason.DIVERGED, "topk": Reason.DIVERGED, "regret": Reason.DIVERGED,
}  # fmt: skip


@pytest.mark.parametrize("name", [*REASONS, "a_new_rule"])
def test_one_failing_comparison_is_bad(name: str) -> None:
    verdict, reason, detail = judge.judge(COMPLETED, (said("overlap", min=0.9), said(name, False, max=0.5)))
    assert (verdict, reason) == (Verdict.BAD, REASONS.get(name, Reason.DIVERGED))
    assert name in detail
    assert "row 3" in detail


@pytest.mark.parametrize(("first", "second"), [*combinations([*REASONS, "a_new_rule"], 2)])
def test_the_failure_nearest_to_the_cause_decides(first: str, second: str) -> None:
    """A missing output before garbage in it, an unrepeatable one before its distance from the oracle."""
    for order in ((first, second), (second, first)):
        failing = judge.decisive([said(name, False) for name in order])
        assert failing is not None
        assert failing.name == first


def test_the_detail_has_the_numbers() -> None:
    failing = said("diff", False, row_error=0.4123, max=0.4123, allowed=0.0021)
    assert judge.describe(failing) == "end_to_end diff: 0.412 > 0.0021 allowed (row 3)"
    plain = said("diff", False, Stage.LOGITS, max=0.41)
    assert judge.describe(plain) == "logits diff: 0.41 > 0.0021 allowed (row 3)"
    assert judge.describe(said("topk", False, Stage.TOPK, twice=2, rows=5)) == "topk topk: twice 2, rows 5 (row 3)"


def test_a_candidates_message_stays_on_one_line() -> None:
    loud = replace(COMPLETED, outcome=Outcome.RAISED, failure=failed("E", "a\n" * 5000))
    detail = judge.judge(loud, ())[2]
    assert "\n" not in detail
    assert len(detail) <= 300


# ---- the wrong-failure guard --------------------------------------------------------------------------------


def test_signatures() -> None:
    assert judge.signature(cell("diverged", error=0.41)) == "diverged|end_to_end|diff|e-1"
    assert judge.signature(cell("nondeterministic")) == "nondeterministic|end_to_end|repeat"
    assert judge.signature(cell("raised", failure=failed(signature="E: size N"))) == "raised|E: size N"
    assert judge.signature(cell("build_failed", failure=failed(signature="x.cu: error"))) == "build_failed|x.cu: error"
    assert judge.signature(cell("not_exercised")) == "not_exercised"
    assert judge.signature(cell("timed_out")) == "timed_out"


BAD_CELLS = {
    "e-1": cell("diverged", error=0.41), "e-2": cell("diverged", error=0.056), "e-3": cell("diverged", error=0.0041),
    "other stage": cell("diverged", error=0.41, stage=Stage.LOGITS), "unrepeatable": cell("nondeterministic"),
    "raised": cell("raised"), "raised otherwise": cell("raised", failure=failed("KeyError", "k")),
    "crashed": cell("crashed"), "timed out": cell("timed_out"),
}  # fmt: skip
ALIKE = {("e-1", "e-2"), ("e-2", "e-3")}


@pytest.mark.parametrize(("one", "other"), [(a, b) for a in BAD_CELLS for b in BAD_CELLS])
def test_only_the_sought_failure_is_bad(one: str, other: str) -> None:
    same = one == other or (one, other) in ALIKE or (other, one) in ALIKE
    answer = judge.answer(BAD_CELLS[one], judge.signature(BAD_CELLS[other]))
    if same:
        assert answer == (Verdict.BAD, BAD_CELLS[one].reason)
    else:
        assert answer == (Verdict.SKIP, Reason.OTHER_FAILURE)
    assert judge.against(BAD_CELLS[one], judge.signature(BAD_CELLS[other])) is answer[0]


@pytest.mark.parametrize("kind", ["good", "absent", "build_failed", "not_exercised"])
def test_what_is_not_bad_stays_what_it_is(kind: str) -> None:
    assert judge.answer(cell(kind), "diverged|end_to_end|diff|e-1") == (cell(kind).verdict, cell(kind).reason)


def test_the_same_exception_with_other_sizes_agrees() -> None:
    six = cell("raised", failure=failed("RuntimeError", "size (6) and (4)", "RuntimeError: size (N) and (N)"))
    twelve = cell("raised", failure=failed("RuntimeError", "size (12) and (4)", "RuntimeError: size (N) and (N)"))
    assert judge.against(twelve, judge.signature(six)) is Verdict.BAD


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_two_foreign_signatures_can_be_compared(one: str, other: str) -> None:
    """What a candidate says may look like a magnitude (`|e1`), or begin with the same letter."""
    assert judge.agree(f"raised|{one}", f"raised|{other}") is (one == other)
    assert not judge.agree("raised|expected 3", "raised|error 3")
    assert not judge.agree("raised|diverged|a|b|e1", "raised|diverged|a|b|e2")


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_agreement_is_mutual_and_bounded(one: float, other: float) -> None:
    a, b = (judge.signature(cell("diverged", error=e)) for e in (one, other))
    assert judge.agree(a, b) is judge.agree(b, a)
    assert judge.agree(a, a)
    ratio = max(one, other) / min(one, other)
    assert ratio >= 100 or judge.agree(a, b) or ratio > 10
    assert ratio <= 100 or not judge.agree(a, b)


# ---- endpoints ----------------------------------------------------------------------------------------------


def ends(*pairs: tuple[str, str]) -> judge.Endpoints:
    """One column, c0, c1, …, for each pair of answers at the good and the bad end."""
    good = [cell(old, case=f"c{i}", sha="a" * 40) for i, (old, _) in enumerate(pairs)]
    bad = [cell(new, case=f"c{i}", sha="b" * 40) for i, (_, new) in enumerate(pairs)]
    return judge.endpoints(good, bad)


def names(columns: tuple[Column, ...]) -> list[str]:
    return [column.case for column in columns]


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ([("good", "diverged")], EndpointStatus.SEARCHABLE),
        ([("absent", "diverged")], EndpointStatus.SEARCHABLE),
        ([("good", "raised"), ("raised", "raised")], EndpointStatus.SEARCHABLE),
        ([("good", "good")], EndpointStatus.NOTHING_DIVERGES),
        ([("absent", "good")], EndpointStatus.NOTHING_DIVERGES),
        ([("good", "good"), ("build_failed", "good")], EndpointStatus.NOTHING_DIVERGES),
        ([("diverged", "diverged")], EndpointStatus.GOOD_END_IS_BAD),
        ([("diverged", "good")], EndpointStatus.GOOD_END_IS_BAD),
        ([("raised", "crashed")], EndpointStatus.GOOD_END_IS_BAD),
        ([("raised", "raised"), ("good", "good")], EndpointStatus.GOOD_END_IS_BAD),
        ([("raised", "raised")], EndpointStatus.BOTH_FAIL_ALIKE),
        ([("crashed", "crashed"), ("absent", "absent")], EndpointStatus.BOTH_FAIL_ALIKE),
        ([("timed_out", "timed_out"), ("build_failed", "not_exercised")], EndpointStatus.BOTH_FAIL_ALIKE),
        ([("build_failed", "diverged")], EndpointStatus.UNTESTABLE),
        ([("good", "build_failed")], EndpointStatus.UNTESTABLE),
        ([("absent", "absent")], EndpointStatus.UNTESTABLE),
        ([("not_exercised", "not_exercised")], EndpointStatus.UNTESTABLE),
        ([], EndpointStatus.UNTESTABLE),
    ],
)
def test_endpoint_status(pairs: list[tuple[str, str]], status: EndpointStatus) -> None:
    found = ends(*pairs)
    assert found.status is status
    if status is EndpointStatus.SEARCHABLE:
        assert bool(found.hint) is bool(found.broken)
    else:
        assert found.hint
        assert found.remedy
        assert "\n" not in found.hint + found.remedy


def test_columns_are_sorted_by_both_ends() -> None:
    found = ends(
        ("good", "diverged"), ("good", "good"), ("raised", "raised"), ("raised", "good"), ("build_failed", "good"),
        ("absent", "absent"), ("raised", "absent"), ("good", "absent"),
    )  # fmt: skip
    assert names(found.diverging) == ["c0"]
    assert names(found.steady) == ["c1", "c7"]
    assert names(found.broken) == ["c2", "c3", "c6"]
    assert names(found.mended) == ["c3"]  # a path that went away is not mended
    assert names(found.untestable) == ["c4", "c5"]


def test_each_column_is_in_one_sort() -> None:
    kinds = ("good", "absent", "diverged", "raised", "build_failed", "not_exercised")
    pairs = [(old, new) for old in kinds for new in kinds]
    found = ends(*pairs)
    sorts = (*found.diverging, *found.steady, *found.broken, *found.untestable)
    assert sorted(names(sorts)) == sorted(f"c{i}" for i in range(len(pairs)))
    assert set(found.mended) <= set(found.broken)


def test_a_column_of_one_end_only_is_untestable() -> None:
    found = judge.endpoints([cell(case="x")], [cell("diverged", case="y")])
    assert found.status is EndpointStatus.UNTESTABLE
    assert names(found.untestable) == ["x", "y"]


# ---- confirmation -------------------------------------------------------------------------------------------

SOUGHT = judge.signature(cell("diverged"))


def confirm(parent: list[str], culprit: list[str]) -> str | None:
    return judge.confirmed([cell(a) for a in parent], [cell(a) for a in culprit], SOUGHT)


def test_confirmed() -> None:
    assert confirm(["good", "good"], ["diverged", "diverged"]) is None
    assert confirm(["absent", "absent"], ["diverged", "diverged"]) is None


@pytest.mark.parametrize(
    ("parent", "culprit", "word"),
    [
        (["good", "diverged"], ["diverged", "diverged"], "parent"),
        (["good", "build_failed"], ["diverged", "diverged"], "build_failed"),
        (["good", "good"], ["diverged", "good"], "good"),
        (["good", "good"], ["diverged", "raised"], "raised"),
        (["good", "good"], ["diverged", "build_failed"], "build_failed"),
        (["good"], ["diverged", "diverged"], "twice"),
        (["good", "good"], ["diverged"], "twice"),
        ([], [], "twice"),
    ],
)
def test_not_confirmed(parent: list[str], culprit: list[str], word: str) -> None:
    why = confirm(parent, culprit)
    assert why is not None
    assert word in why


def test_made_cells_survive_the_journal() -> None:
    from dsabisect.model import to_json

    for observation in BAD_CELLS.values():
        again = Observation.from_json(to_json(observation))
        assert judge.signature(again) == judge.signature(observation)
