"""Whole runs on made histories: nobody is accused wrongly, nothing is measured twice, what a person says counts.

A history is a string, one letter a commit: `.` good, `X` raises, `Y` raises something else, `a` does not build,
`F` raises two times out of three, `R` removes its own checkout and raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dsabisect import conclude, engine, marking, session
from dsabisect.errors import EnvironmentFault, RepositoryError, UsageError
from dsabisect.outside import golden
from dsabisect.report import html, markdown, text
from dsabisect.session import Request
from dsabisect.targets import demo

if TYPE_CHECKING:
    from tests.conftest import MadeRepo

    Make = Callable[..., MadeRepo]

CASE = "e2e-interleaved-h32-decode"
FAULT, BUILD, SPLIT = "miniindexer/fault.py", "miniindexer/build.py", "miniindexer/split.py"


@dataclass
class Made:
    repo: MadeRepo
    shas: list[str]
    out: Path
    said: list[str]

    def request(self, **changed: Any) -> Request:
        given = {
            "repo": self.repo.path, "target": "demo", "good": self.shas[0], "bad": self.shas[-1], "paths": ("split",),
            "cases": (CASE,), "suite": "smoke", "out": self.out, "window": 4,
        }  # fmt: skip
        return Request(**{**given, **changed})

    def run(self, **changed: Any) -> engine.Answer:
        return engine.run(self.request(**changed), self.said.append)

    def at(self, *positions: int) -> list[str]:
        return [self.shas[p] for p in positions]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of the demo's last commit, with one more module that :data:`FAULT` fills."""
    written = demo.write_history(tmp_path_factory.mktemp("base") / "repo")
    files = {str(p.relative_to(written.path)): p.read_text() for p in written.path.rglob("*.py")}
    files |= {str(p.relative_to(written.path)): p.read_text() for p in written.path.rglob("*.ini")}
    files[SPLIT] += "\n\nfrom miniindexer import fault\n\nfault.act()\n"
    return files


def fault(letter: str, position: int, counter: Path) -> str:
    """Source of the module that decides what a commit does; never the same text twice, as in a real history."""
    head = f'"""Commit {position}."""\n\n\ndef act():\n'
    if letter == "F":
        return head + (
            f"    with open({str(counter)!r}, 'a') as file:\n        file.write('x')\n        many = file.tell()\n"
            "    if many % 3:\n        raise RuntimeError('broken here')\n"
        )
    if letter == "R":
        return head + (
            "    import pathlib, shutil\n    shutil.rmtree(pathlib.Path(__file__).resolve().parent.parent)\n"
            "    raise RuntimeError('broken here')\n"
        )
    raises = {"X": "raise RuntimeError('broken here')", "Y": "raise ValueError('something else')"}
    return head + f"    {raises.get(letter, 'pass')}\n"


@pytest.fixture
def make(base: dict[str, str], make_repo: Make, tmp_path: Path) -> Callable[..., Made]:
    def made(history: str, titles: dict[int, str] | None = None, same: dict[int, int] | None = None) -> Made:
        """``same``: position → an earlier one whose files it has again."""
        repo = make_repo()
        texts, shas = [], []
        for position, letter in enumerate(history):
            broken = {BUILD: "raise SystemExit('no table')\n"} if letter == "a" else {BUILD: base[BUILD]}
            texts.append({FAULT: fault(letter, position, tmp_path / "counter"), **broken})
            files = texts[(same or {}).get(position, position)]
            start = {k: v for k, v in base.items() if k != BUILD} if position == 0 else {}
            shas.append(repo.commit((titles or {}).get(position, f"Change {position}"), {**start, **files}))
        return Made(repo=repo, shas=shas, out=tmp_path / "out", said=[])

    return made


def told(answer: engine.Answer) -> list[tuple[str, list[str], bool]]:
    return [(t["kind"], t["suspects"], t["confirmed"]) for t in answer.report["transitions"]]


def measured(answer: engine.Answer) -> list[str]:
    return [o["sha"] for o in answer.report["observations"] if o["source"] == "measured" and o["purpose"] != "confirm"]


def test_timeline_and_cache(make: Callable[..., Made]) -> None:
    """Introduced, mended, introduced: a plain bisection would name one of them. A second run measures nothing."""
    made = make("..XXXX....XX", titles={6: "Revert change 2", 10: "Reland change 2"})
    answer = made.run()
    assert answer.exit_code == conclude.EXIT_CONFIRMED
    assert told(answer) == [
        ("introduced", made.at(2), True), ("fixed", made.at(6), False), ("introduced", made.at(10), True),
    ]  # fmt: skip
    assert answer.report["first_diverging"]["sha"] == made.shas[2]
    assert answer.report["recommendation"]["action"] == "revert"
    why = {c["sha"]: c["why"] for c in answer.report["range"]["must_look"]}
    assert set(why) == set(made.at(6, 10))
    assert len(measured(answer)) == len(set(measured(answer))) <= 12

    again = made.run(out=made.out.with_name("again"))
    assert {o["source"] for o in again.report["observations"]} == {"cache"}
    assert told(again) == told(answer)
    anew = made.run(out=made.out.with_name("anew"), rerun=True, first=True)
    assert anew.report["first_diverging"]["sha"] in made.at(2, 10)
    assert {o["source"] for o in anew.report["observations"]} == {"measured"}


def test_a_window_between_two_good_ends(make: Callable[..., Made]) -> None:
    made = make("....XXXXXX....")
    answer = made.run()
    assert answer.exit_code == conclude.EXIT_CONFIRMED
    assert told(answer) == [("introduced", made.at(4), True), ("fixed", made.at(10), False)]


def test_a_good_head_accuses_nobody(make: Callable[..., Made]) -> None:
    made = make(".......")
    for first in (False, True):
        answer = made.run(first=first, out=made.out.with_name(f"out-{first}"))
        assert (answer.exit_code, told(answer)) == (conclude.EXIT_CLEAN, [])
        assert answer.report["recommendation"]["action"] == "none"


def test_a_path_that_came_and_was_gated_between_the_ends(tmp_path: Path) -> None:
    """Absent at the good end, not taken at the bad end: neither can be tested, and all of the story lies between."""
    written = demo.write_history(tmp_path / "repo")
    request = Request(
        repo=written.path, target="demo", good=written.story2_good, bad=written.tip, paths=("fused",),
        cases=("e2e-neox-h32-decode",), suite="smoke", out=tmp_path / "out",
    )  # fmt: skip
    answer = engine.run(request, lambda line: None)
    assert answer.exit_code == conclude.EXIT_CONFIRMED
    assert told(answer) == [("introduced", [written.culprit2], True), ("gated", [written.gated], False)]


def test_nothing_can_be_tested(make: Callable[..., Made]) -> None:
    made = make("aaa")
    answer = made.run()
    assert (answer.exit_code, told(answer)) == (conclude.EXIT_SUSPECTS, [])
    assert answer.report["status"] == "untestable"


def test_both_ends_bad(make: Callable[..., Made]) -> None:
    """Alike: the machine is at fault. Unlike: the good end does not hold, and an older commit is named."""
    made = make("..YYYXX")
    with pytest.raises(EnvironmentFault, match="same way at both ends"):
        made.run(good=made.shas[5])
    answer = made.run(good=made.shas[3], out=made.out.with_name("unlike"))
    assert answer.exit_code == conclude.EXIT_GOOD_END
    assert told(answer) == []
    assert any(f"try --good {made.shas[0][:12]}" in line for line in made.said)


def test_a_bad_end_that_was_mended(make: Callable[..., Made]) -> None:
    made = make("XXXX....")
    answer = made.run()
    assert answer.exit_code == conclude.EXIT_GOOD_END
    assert told(answer) == [("fixed", made.at(4), False)]


def test_an_unrelated_second_failure(make: Callable[..., Made]) -> None:
    """A plain bisection for the failure of the bad end takes the other failure for untestable: a set."""
    made = make("...YYYXXX")
    plain = made.run(first=True)
    assert plain.exit_code == conclude.EXIT_SUSPECTS
    assert told(plain) == [("introduced", made.at(3, 4, 5, 6), False)]
    whole = made.run(out=made.out.with_name("whole"))
    assert told(whole) == [("introduced", made.at(3), True), ("introduced", made.at(6), True)]


def test_a_culprit_inside_an_unbuildable_block(make: Callable[..., Made]) -> None:
    made = make("...aaaXXX")
    answer = made.run()
    assert answer.exit_code == conclude.EXIT_SUSPECTS
    assert told(answer) == [("introduced", made.at(3, 4, 5, 6), False)]
    assert answer.report["recommendation"]["action"] == "hold"


def test_a_flaky_parent_is_not_trusted(make: Callable[..., Made]) -> None:
    """The true change is 5; 4 fails now and then. Whatever is accused is one of the two, with its posterior said."""
    made = make("....FXXX")
    answer = made.run(first=True)
    ((kind, suspects, confirmed),) = told(answer)
    assert kind == "introduced"
    assert set(suspects) & set(made.at(4, 5))
    if confirmed:
        assert suspects in ([made.shas[4]], [made.shas[5]])


def test_what_does_not_repeat_is_searched_by_repetition(make: Callable[..., Made]) -> None:
    """From 5 on a run fails two times out of three."""
    made = make(".....FFFFFFF")
    answer = made.run()
    turns = [o for o in answer.report["observations"] if o["purpose"] == "flake"]
    assert turns, "the confirmation disagreed with the search, so that runs are repeated"
    introduced = [t for t in answer.report["transitions"] if t["kind"] == "introduced"]
    assert introduced
    assert made.shas[5] in introduced[0]["suspects"]
    assert introduced[0]["confidence"] < 1
    assert any("does not repeat" in note for note in answer.report["notes"])


def test_a_candidate_that_removes_its_checkout(make: Callable[..., Made]) -> None:
    """It is measured, confirmed twice and accused like any other; its files are made anew each time."""
    made = make("...RRR")
    answer = made.run(first=True)
    assert answer.exit_code == conclude.EXIT_CONFIRMED
    assert told(answer) == [("introduced", made.at(3), True)]


def test_a_merge_is_accused_as_a_whole(make: Callable[..., Made], base: dict[str, str], tmp_path: Path) -> None:
    """First parents only: the culprit came in through a merge, and the merge is what main got."""
    made = make("...")
    repo = made.repo
    repo.git("checkout", "-q", "-b", "side", made.shas[1])
    side = repo.commit("Break it on the side", {FAULT: fault("X", 90, tmp_path)})
    repo.git("checkout", "-q", "main")
    repo.minutes += 1
    repo.git("merge", "-q", "--no-ff", "-X", "theirs", "-m", "Merge side", "side")
    merge = repo.git("rev-parse", "HEAD")
    repo.commit("After the merge", {FAULT: fault("X", 91, tmp_path)})
    answer = made.run(bad=repo.git("rev-parse", "HEAD"), first=True)
    assert told(answer) == [("introduced", [merge], True)]
    assert answer.report["first_diverging"]["parent"] == made.shas[2]
    said = f"--good {made.shas[1][:12]} --bad {side[:12]}"
    assert any(said in line for line in answer.report["recommendation"]["because"])

    # a good commit that is not on the first-parent line: what takes its place is said aloud
    aside = made.run(good=side + "~1", bad=repo.git("rev-parse", "HEAD"), out=made.out.with_name("aside"), first=True)
    assert told(aside) == [("introduced", [merge], True)]
    repo.git("checkout", "-q", "-b", "elsewhere", made.shas[0])
    other = repo.commit("Elsewhere", {FAULT: fault(".", 92, tmp_path)})
    odd = made.run(good=other, bad="main", out=made.out.with_name("odd"), first=True)
    assert told(odd) == [("introduced", [merge], True)]
    assert "is not an ancestor" in odd.report["range"]["note"]


def test_budget_leaves_the_best_set(make: Callable[..., Made]) -> None:
    made = make(".........XXXXXXX")
    answer = made.run(first=True, max_evals=4)
    assert answer.exit_code == conclude.EXIT_SUSPECTS
    ((_, suspects, confirmed),) = told(answer)
    assert not confirmed
    assert made.shas[9] in suspects
    assert 1 < len(suspects) < 15
    assert any("budget" in note for note in answer.report["notes"])


def test_a_revert_shares_the_answer_of_what_it_returns_to(make: Callable[..., Made]) -> None:
    made = make("..X...", titles={3: "Revert change 2"}, same={3: 1})
    answer = made.run()
    assert told(answer) == [("introduced", made.at(2), True), ("fixed", made.at(3), False)]
    assert not {made.shas[1], made.shas[3]} <= set(measured(answer))


def test_marks_and_undo(make: Callable[..., Made]) -> None:
    """A mark counts from the next resume on; what was taken back does not."""
    made = make("....XXXX")
    made.run(first=True, max_evals=2)
    marking.mark(made.out, made.shas[2], "bad", "")
    marking.undo(made.out)
    marking.mark(made.out, made.shas[4][:10], "skip", "")
    answer = made.run(first=True, resume=True)
    assert answer.report["range"]["marked"] == [{"sha": made.shas[4], "verdict": "skip", "column": ""}]
    assert told(answer) == [("introduced", made.at(4, 5), False)]
    with pytest.raises(UsageError, match="no commit"):
        marking.mark(made.out, "f" * 40, "good", "")
    with pytest.raises(UsageError, match="no column"):
        marking.mark(made.out, made.shas[4], "good", "fused/none")
    marking.undo(made.out)
    with pytest.raises(UsageError, match="no mark"):
        marking.undo(made.out)
    assert told(made.run(first=True, resume=True)) == [("introduced", made.at(4), True)]


def test_skips_and_suspects(make: Callable[..., Made]) -> None:
    made = make("......XXXXXX")
    skipped = made.run(first=True, skip=tuple(made.at(5, 6)))
    assert told(skipped) == [("introduced", made.at(5, 6, 7), False)]
    looked = made.run(first=True, suspect=(made.shas[6],), out=made.out.with_name("suspect"), rerun=True)
    assert told(looked) == [("introduced", made.at(6), True)]
    assert set(measured(looked)) == set(made.at(0, 5, 6, 11)), "the suspect and its parent, and both ends"


def test_an_end_cannot_be_skipped(make: Callable[..., Made]) -> None:
    made = make("..XX")
    with pytest.raises(UsageError, match="end of the range"):
        made.run(skip=(made.shas[3],))
    made.run(out=made.out.with_name("marked"), max_evals=2)
    for sha in made.at(0, 3):
        with pytest.raises(UsageError, match="cannot be marked"):
            marking.mark(made.out.with_name("marked"), sha, "skip", "")


def test_no_all_clear_from_what_was_not_looked_at(make: Callable[..., Made]) -> None:
    """Both ends good, and the budget ends, or everything between is skipped: that proves nothing."""
    made = make("....XXXXXX....")
    spent = made.run(max_evals=2)
    assert (spent.exit_code, told(spent)) == (conclude.EXIT_SUSPECTS, [])
    assert "budget" in spent.report["status"]
    skipped = made.run(out=made.out.with_name("skipped"), skip=tuple(made.shas[1:-1]))
    assert (skipped.exit_code, skipped.report["status"]) == (conclude.EXIT_SUSPECTS, "untestable between the ends")


def test_a_mark_against_the_measurements_is_no_flake(make: Callable[..., Made]) -> None:
    """The culprit called good: nobody else is accused for it, and the contradiction is said."""
    made = make("...XXX")
    made.run(first=True, max_evals=2)
    marking.mark(made.out, made.shas[3], "good", "")
    answer = made.run(first=True, resume=True)
    assert answer.exit_code == conclude.EXIT_SUSPECTS
    assert [(t["confirmed"], t["confidence"]) for t in answer.report["transitions"]] == [(False, 1.0)]
    assert any("contradicts" in note for note in answer.report["notes"])
    assert not any("does not repeat" in note for note in answer.report["notes"])


def test_two_devices_give_the_same_answer(make: Callable[..., Made]) -> None:
    made = make("..XXXX....", titles={6: "Revert change 2"})
    one = made.run(rerun=True)
    two = made.run(device="cpu,cpu", out=made.out.with_name("two"), rerun=True)
    assert told(two) == told(one)
    assert two.exit_code == one.exit_code == conclude.EXIT_CONFIRMED
    names = [o["sha"] for o in two.report["observations"] if o["purpose"] == "search" and o["source"] == "measured"]
    assert len(names) == len(set(names))


def test_resume_refuses_other_options(make: Callable[..., Made]) -> None:
    made = make("..XX")
    made.run(first=True)
    with pytest.raises(UsageError, match="other cases"):
        engine.run(replace(made.request(resume=True), cases=()), made.said.append)
    journal = [json.loads(line) for line in (made.out / "journal.jsonl").read_text().splitlines()]
    assert journal[0]["event"] == "run"


# ---- what does not repeat -----------------------------------------------------------------------------------


def test_what_fails_now_and_then_is_reverted_with_its_evidence(make: Callable[..., Made]) -> None:
    """Headline, confirmation and advice speak of the runs that fail, and of how many."""
    made = make(".....FFFFFFF")
    answer = made.run()
    first = answer.report["first_diverging"]
    assert first is not None
    assert first["reason"] == "raised" and "broken here" in first["detail"]
    shown = text.render(answer.report)
    assert re.search(r"^CONFIRMED posterior 0\.\d\d: \d+ of \d+ of its runs fail, 0 of \d+ at the parent$", shown, re.M)
    assert f"{first['sha'][:9]}  ~" in shown
    assert "~ does not repeat" in shown
    advice = answer.report["recommendation"]
    assert (answer.exit_code, advice["action"], advice["change"]) == (conclude.EXIT_CONFIRMED, "revert", first["sha"])
    assert any(re.search(r"\(flaky\).*: \d+ of \d+ runs fail: .*broken here", line) for line in advice["because"])
    assert any("not repeatable" in line for line in advice["because"])
    assert "does not repeat" in html.render(answer.report)
    assert "bad in some runs" in markdown.render(answer.report)


def test_a_fault_after_one_that_does_not_repeat_is_said(make: Callable[..., Made]) -> None:
    """The posterior knows one change; what fails in another way later is named, and not as confirmed."""
    made = make("....FFFFFFFFYY")
    answer = made.run()
    assert told(answer)[0][:2] == ("introduced", made.at(4))
    (note,) = [note for note in answer.report["notes"] if "fails in another way" in note]
    assert f"something else) from {made.shas[12][:9]} on at the latest" in note and "not confirmed" in note


# ---- what the answer leaves open ----------------------------------------------------------------------------


def test_an_all_clear_says_what_it_rests_on(make: Callable[..., Made]) -> None:
    made = make(".............")
    answer = made.run(window=4)
    assert answer.exit_code == conclude.EXIT_CLEAN
    (note,) = [note for note in answer.report["notes"] if "would be missed" in note]
    left = 13 - len({o["sha"] for o in answer.report["observations"]})
    assert note.startswith(f"{left} relevant commits") and "fewer than 4 of them" in note and "--window 1" in note
    each = made.run(window=1, out=made.out.with_name("each"))
    assert not any("would be missed" in note for note in each.report["notes"])


def test_an_answer_given_anew_keeps_no_note_of_the_old_one(make: Callable[..., Made]) -> None:
    """A mark that contradicts is noted; once it is taken back, nothing speaks of it, and the skip is gone too."""
    made = make("...XXX")
    made.run(first=True, max_evals=2)
    marking.mark(made.out, made.shas[3], "good", "")
    answer = made.run(first=True, resume=True, skip=(made.shas[1],))
    assert any("contradicts" in note for note in answer.report["notes"])
    assert answer.report["range"]["skipped"] == [made.shas[1]]
    assert f"{made.shas[3][:9]} is good (by hand)" in text.render(answer.report)
    assert f"{made.shas[3][:9]} is good (by hand)" in markdown.render(answer.report)
    assert f"{made.shas[3][:9]} is good (by hand)" in html.render(answer.report)
    marking.undo(made.out)
    after = made.run(first=True, resume=True)
    assert told(after) == [("introduced", made.at(3), True)]
    assert after.report["notes"] == [] and after.report["range"]["skipped"] == []
    assert "by hand" not in text.render(after.report)


def test_a_mark_takes_any_name_of_a_commit(make: Callable[..., Made]) -> None:
    made = make("....XXXX")
    made.run(first=True, max_evals=2)
    made.repo.git("branch", "suspect", made.shas[4])
    assert marking.mark(made.out, "suspect", "bad", "").startswith(f"marked {made.shas[4][:9]} bad")
    assert marking.mark(made.out, "HEAD~4", "good", "").startswith(f"marked {made.shas[3][:9]} good")
    for rev in ("HEAD~70", "--all", "nothing-of-that-name"):
        with pytest.raises(RepositoryError):
            marking.mark(made.out, rev, "good", "")


def test_what_many_columns_or_commits_share_is_said_once(make: Callable[..., Made]) -> None:
    made = make("...X..", titles={4: "Docs"})
    outside = [made.repo.commit(f"Docs {n}", {"notes.txt": f"{n}\n"}) for n in range(5)]
    end = made.repo.commit("The end", {FAULT: fault(".", 99, made.out)})
    answer = made.run(bad=end, skip=tuple(outside), suspect=tuple(outside), max_evals=2)
    assert len([note for note in answer.report["notes"] if "nothing that matters changes there" in note]) == 2
    assert all("and 2 more" in note for note in answer.report["notes"] if "nothing that matters" in note)


def test_a_whole_case_id_is_that_case_and_a_beginning_is_all_of_them() -> None:
    whole = golden.load()
    (one,) = session.choose_cases(whole, "default", ["e2e-neox-h32-decode"])
    assert one.id == "e2e-neox-h32-decode"
    begun = session.choose_cases(whole, "default", ["e2e-neox-h32-dec", "topk-ties"])
    assert {c.id for c in begun} == {
        c.id for c in whole.cases("default") if c.id.startswith("e2e-neox-h32-dec") or c.id == "topk-ties"
    }
    with pytest.raises(UsageError, match="nothing-like-it"):
        session.choose_cases(whole, "default", ["topk-ties", "nothing-like-it"])
