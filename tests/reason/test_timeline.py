from __future__ import annotations

from itertools import pairwise, product

import pytest

from dsabisect.model import Reason, Verdict
from dsabisect.reason.timeline import transitions

OF = {".": Verdict.GOOD, "X": Verdict.BAD, "?": Verdict.SKIP, "-": Verdict.GOOD}


def steps(history: str) -> list[str]:
    """`+3..5` introduced after 3, up to 5; `-7..8` fixed. A blank was not measured."""
    seen = {p: OF[c] for p, c in enumerate(history) if c != " "}
    reasons = {p: Reason.ABSENT for p, c in enumerate(history) if c == "-"}
    found = transitions(seen, reasons)
    return [f"{'+' if s.kind.value == 'introduced' else '-'}{s.after}..{s.upto}" for s in found]


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
    seen = {5: Verdict.BAD, 0: Verdict.GOOD, 9: Verdict.GOOD}
    assert transitions(seen) == transitions(dict(sorted(seen.items())))
