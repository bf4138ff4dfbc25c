"""What a proof says of three measured trees, and what the speed lines say of timed ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dsabisect.model import Action, Column, Observation, Outcome, Reason, Verdict
from dsabisect.propose import prove, pulltext, speed

SEEN = {
    "good": (Outcome.COMPLETED, Verdict.GOOD, Reason.MATCHED),
    "bad": (Outcome.COMPLETED, Verdict.BAD, Reason.DIVERGED),
    "raised": (Outcome.RAISED, Verdict.BAD, Reason.RAISED),
    "absent": (Outcome.ABSENT, Verdict.GOOD, Reason.ABSENT),
    "off": (Outcome.NOT_EXERCISED, Verdict.SKIP, Reason.NOT_EXERCISED),
    "unbuilt": (Outcome.BUILD_FAILED, Verdict.SKIP, Reason.BUILD_FAILED),
}
Trees = dict[str, dict[str, str]]  # sha → column → answer


def observed(sha: str, column: Column, answer: str, median: float = 0.0, way: str = "") -> Observation:
    outcome, verdict, reason = SEEN[answer]
    timed = {"calls": 30, "median": median, "low": median, "high": median} if median else {}
    return Observation(
        sha=sha, build=sha, path=column.path, case=column.case, outcome=outcome, verdict=verdict, reason=reason,
        facets={"rope": column.case}, proof={"path": way} if way else {}, speed=timed,
    )  # fmt: skip


def proof(action: Action, **columns: str) -> prove.Proof:
    """``fused_neox="absent bad off"``: answers at old, new and applied."""
    names = {name: Column(path=name.split("_")[0], case=name.split("_")[1]) for name in columns}
    at = {"old": 0, "new": 1, "applied": 2}

    def measure(sha: str, asked: Sequence[Column]) -> Sequence[Observation]:
        told = {names[name]: answers.split()[at[sha]] for name, answers in columns.items()}
        return [observed(sha, c, told[c]) for c in asked]

    return prove.prove(action=action, old="old", new="new", applied="applied", columns=list(names.values()),
                       measure=measure)  # fmt: skip


HOLDS = [
    (Action.REVERT, {"default_neox": "good raised good", "split_neox": "good good good"}),
    (Action.REVERT, {"default_neox": "good bad good", "native_neox": "absent good absent"}),  # the path goes with it
    (Action.GATE, {"default_neox": "good bad good", "fused_neox": "absent bad off", "fused_inter": "absent good good"}),
    (Action.REVERT_HUNK, {"default_neox": "good bad good", "default_inter": "good good good"}),
    (Action.REVERT, {"default_neox": "good bad good", "paged_long": "bad bad bad"}),  # not this change's doing
]


@pytest.mark.parametrize(("action", "columns"), HOLDS)
def test_a_proof_that_holds(action: Action, columns: dict[str, str]) -> None:
    found = proof(action, **columns)
    assert found.holds and found.why_not == ""
    assert found.words.endswith("mended, none broken")


FAILS = [
    (Action.REVERT, {"default_neox": "good bad bad"}, "default/neox is not mended"),
    (Action.REVERT, {"default_neox": "good bad unbuilt"}, "not mended"),  # what could not be measured is not mended
    (Action.REVERT, {"default_neox": "good bad off"}, "not mended"),  # only a gate may turn a path off
    (Action.REVERT, {"default_neox": "good bad good", "split_neox": "good good bad"}, "split/neox is broken"),
    (Action.GATE, {"default_neox": "good bad good", "fused_inter": "absent good off"}, "fused/inter is broken"),
    (
        Action.GATE,
        {"fused_neox": "absent bad bad", "default_neox": "good bad bad"},
        "fused/neox, default/neox are not mended",
    ),
    (Action.REVERT, {"default_neox": "good good good"}, "nothing that it could mend"),
]


@pytest.mark.parametrize(("action", "columns", "words"), FAILS)
def test_a_proof_that_fails(action: Action, columns: dict[str, str], words: str) -> None:
    found = proof(action, **columns)
    assert not found.holds
    assert words in found.why_not and found.words == found.why_not


def test_what_is_lost_and_what_stays_bad() -> None:
    found = proof(
        Action.REVERT, default_neox="good bad good", native_neox="absent good absent", paged_long="bad bad bad"
    )
    assert (found.lost, found.still_bad) == (
        (Column(path="native", case="neox"),), (Column(path="paged", case="long"),)
    )  # fmt: skip
    assert pulltext.lost_lines(found) == ["path native is not taken any more in 1 cell"]


def test_dependents_are_later_changes_whose_columns_need_the_culprit() -> None:
    column = Column(path="native", case="x")
    answers = {"parent": "absent", "later": "good", "without": "raised", "other": "good", "other-without": "good"}

    def measure(sha: str, columns: Sequence[Column]) -> Sequence[Observation]:
        return [observed(sha, c, answers[sha]) for c in columns]

    without = {"later": "without", "other": "other-without", "conflict": ""}
    plain = {"later": "parent", "other": "parent", "conflict": "parent"}
    found = prove.dependents(plain=plain, reverted=without.__getitem__, columns=[column], measure=measure)
    assert found == {"later": (column,)}


# ---- speed --------------------------------------------------------------------------------------------------


def test_speed_by_the_ways_that_were_taken() -> None:
    """neox: fused 2 ms → split 3 ms; interleaved stays fused. The better turn counts, the spread is told."""
    columns = [Column(path="default", case=c) for c in ("neox", "inter")]
    times = {
        ("new", "neox"): (0.002, 0.0022), ("applied", "neox"): (0.0033, 0.003),
        ("new", "inter"): (0.002, 0.002), ("applied", "inter"): (0.002, 0.002),
    }  # fmt: skip
    ways = {("new", "neox"): "fused", ("applied", "neox"): "split"}

    def timed(sha: str, asked: Sequence[Column], turn: int) -> Sequence[Observation]:
        return [observed(sha, c, "good", times[sha, c.case][turn], ways.get((sha, c.case), "fused")) for c in asked]

    found = {(s.without, s.applied): s for s in speed.measure("new", "applied", columns, timed)}
    assert list(found) == [("fused", "split"), ("fused", "fused")]
    lost = found["fused", "split"]
    assert (lost.cells, lost.without_ms, lost.applied_ms) == (1, pytest.approx(2.0), pytest.approx(3.0))
    assert (lost.ratio, lost.spread) == (pytest.approx(1.5), pytest.approx(0.1))
    assert pulltext.speed_lines([lost]) == [
        "fused → split, 1 cell: 1.50 times the time (2.000 → 3.000 ms a call; turns differ by up to 10 %)"
    ]


def test_a_probe_that_times_nothing_gives_no_speed() -> None:
    columns = [Column(path="default", case="neox")]
    assert speed.measure("new", "applied", columns, lambda sha, cs, turn: [observed(sha, c, "good") for c in cs]) == ()


def test_columns_to_time_run_in_both_trees_and_are_the_costly_ones() -> None:
    made = {f"default_c{n}": "good good good" for n in range(6)}
    found = proof(Action.REVERT, **made, default_broken="good raised good", split_c0="good good good")
    chosen = speed.columns_of(found, {"default"}, lambda case: int(case[1:]) if case[1:].isdigit() else 99)
    assert [c.case for c in chosen] == ["c5", "c4", "c3", "c2"]
    assert {c.path for c in chosen} == {"default"}


def test_groups_of_the_table_are_told_apart() -> None:
    rows = proof(Action.GATE, default_neox="good bad good", default_inter="good good good", split_neox="good good good")
    assert [(r["name"], r["count"], r["old"], r["new"], r["applied"]) for r in pulltext.table(rows.rows)] == [
        ("default rope=neox", 1, "good", "bad: diverged", "good"),
        ("default rope=inter", 1, "good", "good", "good"),
        ("split", 1, "good", "good", "good"),
    ]
