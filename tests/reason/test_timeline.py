from __future__ import annotations

from itertools import pairwise, product

import pytest
from made_cells import cell, failed

from dsabisect.model import Column, TransitionKind
from dsabisect.reason import timeline
from dsabisect.reason.timeline import Kind, State, Step, kind_of, partners, state_at, state_of

SKIP = State(kind=Kind.SKIP, signature="build_failed|a")
OF = {
    ".": timeline.GOOD, "X": State(kind=Kind.BAD, signature="x"), "Y": State(kind=Kind.BAD, signature="y"),
    "?": SKIP, "-": timeline.ABSENT, "~": timeline.OFF,
}  # fmt: skip


def series(history: str) -> dict[int, State]:
    """A blank was not measured."""
    return {p: OF[c] for p, c in enumerate(history) if c != " "}


def steps(history: str) -> list[str]:
    """`+3..5` broken after 3, up to 5; `-7..8` mended, `o7..8` switched off."""
    sign = {Kind.BAD: "+", Kind.GOOD: "-", Kind.OFF: "o"}
    return [f"{sign[s.new.kind]}{s.after}..{s.upto}" for s in timeline.steps(series(history))]


@pytest.mark.parametrize(
    ("history", "want"),
    [
        ("", []),
        ("....", []),
        ("..XX", ["+1..2"]),
        (".  X", ["+0..3"]),
        (".?X?.", ["+0..2", "-2..4"]),
        ("..X..X.", ["+1..2", "-2..3", "+4..5", "-5..6"]),
        ("--XX", ["+1..2"]),  # the path appeared, and was bad
        ("XX--", []),  # the path went away: that mends nothing
        ("XX--..", ["-1..4"]),
        ("XX--XX", ["+3..4"]),
        ("X-.X", ["-0..2", "+2..3"]),
        (".X~~", ["+0..1", "o1..2"]),  # gated
        (".~X", ["+1..2"]),
        ("~~..", []),
        ("X~.", ["o0..1"]),  # it was gated; that it is good later is no second change
        ("XXYY", ["+1..2"]),  # another failure is another change
        ("XY.", ["+0..1", "-1..2"]),
    ],
)
def test_steps(history: str, want: list[str]) -> None:
    assert steps(history) == want


def test_steps_alternate_and_cover_what_changed() -> None:
    for letters in product(".X?", repeat=7):
        history = "".join(letters)
        told = history.replace("?", "")
        found = steps(history)
        assert len(found) == sum(a != b for a, b in pairwise(told))
        assert all(a[0] != b[0] for a, b in pairwise(found))
        for step in found:
            after, upto = map(int, step[1:].split(".."))
            assert history[after] + history[upto] == (".X" if step[0] == "+" else "X.")
            assert set(history[after + 1 : upto]) <= {"?"}


def test_the_order_of_measuring_does_not_matter() -> None:
    seen = {5: OF["X"], 0: OF["."], 9: OF["."]}
    assert timeline.steps(seen) == timeline.steps(dict(sorted(seen.items())))


@pytest.mark.parametrize(
    ("history", "position", "want"),
    [("X  X", 2, "X"), ("X  .", 2, None), (". ?.", 2, "."), ("X?  ", 3, None), ("  .", 0, None), ("X.X", 1, ".")],
)
def test_state_between_neighbours(history: str, position: int, want: str | None) -> None:
    assert state_at(series(history), position) == (None if want is None else OF[want])


@pytest.mark.parametrize(
    ("default", "forced", "want"),
    [
        # the story of sglang #27705: introduced, off, on again by another commit, off, gated
        ("..XX..XX..", ["--XXXXXXX~"], "introduced masked exposed masked"),
        ("..XX..", ["..XX.."], "introduced fixed"),
        ("..XX..", ["......"], "introduced fixed"),  # the selection itself was at fault
        ("..XX", ["XXXX"], "exposed"),
        ("XX..", ["XXX~"], "masked"),
        ("XX..", ["XX~~"], "gated"),
        ("..XX", [], "introduced"),
        ("..XX", ["....", "XXXX"], "exposed"),
    ],
)
def test_names_of_the_default_selection(default: str, forced: list[str], want: str) -> None:
    named = [kind_of(step, [series(f) for f in forced]).value for step in timeline.steps(series(default))]
    assert " ".join(named) == want


def test_names_of_a_forced_path() -> None:
    named = [kind_of(step, []).value for step in timeline.steps(series("--XX..X~X"))]
    assert named == ["introduced", "fixed", "introduced", "gated", "exposed"]


def test_partners_are_the_forced_paths_on_the_same_case() -> None:
    of = {Column(path=p, case=c): {0: OF["."]} for p in ("fused", "split", "default") for c in ("a", "b")}
    assert len(partners(Column(path="default", case="a"), of, ["default"])) == 2
    assert partners(Column(path="fused", case="a"), of, ["default"]) == []


@pytest.mark.parametrize(
    ("observation", "want"),
    [
        (cell("good"), timeline.GOOD),
        (cell("absent"), timeline.ABSENT),
        (cell("not_exercised"), timeline.OFF),
        (cell("diverged", error=0.4), State(kind=Kind.BAD, signature="diverged|end_to_end|diff")),
        (cell("diverged", error=4e-6), State(kind=Kind.BAD, signature="diverged|end_to_end|diff")),
        (cell("build_failed", failure=failed("E", "a")), State(kind=Kind.SKIP, signature="build_failed|E: a")),
    ],
)
def test_state_of_a_cell(observation: object, want: State) -> None:
    assert state_of(observation) == want  # type: ignore[arg-type]


def test_a_step_breaks_when_it_ends_bad() -> None:
    step = Step(after=0, upto=1, old=OF["~"], new=OF["X"])
    assert step.breaks
    assert kind_of(step, []) is TransitionKind.EXPOSED
