"""What a person with a red CI reads first, and that nothing foreign gets a hold of the terminal."""

from __future__ import annotations

import shlex
import unicodedata

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_events import (
    BROKEN,
    begin,
    change,
    check_story,
    end,
    event,
    gate_story,
    nothing_story,
    observation,
    reach,
    row,
    set_story,
    sha,
)  # fmt: skip

from dsabisect.cli import cli
from dsabisect.report import build, text

HOSTILE = (
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b]8;;http://x\x1b\\link\nsecond line\r\b\x9b1m"
    " \u202eevil\u2066 a\u200bb \x00 end"
)


SAME = "--repo /repo --target demo --path fused --case e2e-neox --suite smoke --device cuda:0"


def lines_of(events: list[dict[str, object]]) -> list[str]:
    return text.render(build.build(events)).splitlines()


def test_the_first_five_lines_answer() -> None:
    assert lines_of(gate_story())[:6] == [
        f"CULPRIT   {sha(5)[:9]} Fused prologue (#27705)",
        f"          Ada Author, 2026-05-06, parent {sha(4)[:9]}",
        "DIVERGES  fused, 1 of 2 cells: end_to_end diff: 0.41 > 0.0021 allowed (row 3)",
        "ADVICE    GATE on rope = neox · stays on: interleaved · goes off: neox",
        "CONFIRMED parent good, culprit bad, parent good, culprit bad; clean builds",
        "",
    ]


def test_the_whole_report() -> None:
    assert lines_of(gate_story())[6:] == [
        "  - 1 cell that is good at the parent is bad here",
        "  - path split: 2 of 2 cells good",
        "  - the switch: FUSION",
        "  missing: only sm90 was run",
        "",
        "A  split (2)",
        "B  fused rope=neox (1)",
        "C  fused rope=interleaved (1)",
        "",
        ". good  X bad  x some bad  ~ does not repeat  ? untestable  - absent",
        "",
        "commit     A  B  C",
        f"{sha(0)[:9]}  .  -  -  Change number 0",
        f"{sha(4)[:9]}  .  -  -  Change number 4",
        f"{sha(5)[:9]}  .  X  .  Fused prologue (#27705)",
        f"{sha(7)[:9]}  .  X  .  Change number 7",
        f"{sha(9)[:9]}  .  X  .  Change number 9",
        "",
        "9 commits in range, 5 touch what matters, 5 measured, 36 cells, 61 s, on cuda:0",
        "(sm90)",
        "note      a note",
        "log       logs/measure/5.log in the run folder",
        "see it again (good, then bad):",
        f"  dsabisect check {sha(4)[:12]} {SAME}",
        f"  dsabisect check {sha(5)[:12]} {SAME}",
    ]


@pytest.mark.parametrize(
    ("predicate", "on", "want"),
    [
        ({"rope": "neox"}, ["fused for rope = interleaved"],
         "GATE on rope = neox · stays on: interleaved · goes off: off"),
        ({"rope": "neox", "heads": 64}, ["fused for rope = neox and heads = 32"],
         "GATE on rope = neox and heads = 64 · stays on: fused for rope = neox and heads = 32 · goes off: off"),
        ({"arch": ["sm100", "sm120"]}, [], "GATE on arch in {sm100, sm120} · stays on: nothing · goes off: off"),
    ],
)  # fmt: skip
def test_advice_line_of_a_gate(predicate: dict[str, object], on: list[str], want: str) -> None:
    gate = {"predicate": predicate, "stays_on": on, "goes_off": ["off"]}
    assert text.advice_line({"action": "gate", "change": "c" * 40, "gate": gate}) == want


@pytest.mark.parametrize(
    ("action", "want"),
    [("revert", "REVERT ccccccccc"), ("revert_hunk", "REVERT ONE HUNK of ccccccccc"), ("hold", "HOLD ccccccccc")],
)
def test_advice_line(action: str, want: str) -> None:
    assert text.advice_line({"action": action, "change": "c" * 40, "gate": None}) == want
    assert text.advice_line({"action": "hold", "change": "", "gate": None}) == "HOLD"


def test_unconfirmed_is_never_called_a_culprit() -> None:
    events = [e if e["event"] != "transition" else {**e, "confirmed": False} for e in gate_story()]
    shown = lines_of(events)
    assert shown[0].startswith("SUSPECT ")
    assert not any("CULPRIT" in line or line.startswith("CONFIRMED") for line in shown)
    assert any(line.startswith("NOT       confirmed") for line in shown[:6])


def test_a_set_of_suspects_is_listed() -> None:
    shown = lines_of(set_story())
    assert shown[0] == "RESULT    narrowed to 4 suspects (exit code 2)"
    assert shown[1] == "SUSPECTS  one of 4 commits:"
    assert shown[2:6] == [f"          {sha(p)[:9]} Change number {p}" for p in (4, 5, 6, 7)]
    assert shown[6] == "ADVICE    HOLD"
    assert not any("CULPRIT" in line for line in shown)
    assert any(line.startswith(f"{sha(4)[:9]}  .  ?") for line in shown)


def test_nothing_diverges() -> None:
    shown = lines_of(nothing_story())
    assert shown[0] == "RESULT    nothing diverges (exit code 0)"
    assert not any(line.startswith("ADVICE") for line in shown)
    assert "  - neither end is bad in 4 columns" in shown


def test_check_says_what_is_bad() -> None:
    shown = lines_of(check_story())
    assert shown[:2] == [
        "RESULT    bad (exit code 1)",
        "BAD       fused/e2e-neox: end_to_end diff: 0.41 > 0.0021 allowed (row 3)",
    ]


def test_an_empty_journal_has_a_report() -> None:
    assert lines_of([])[0] == "RESULT    unfinished"


def test_the_commands_are_commands() -> None:
    for line in lines_of(gate_story()):
        if line.startswith("  dsabisect "):
            words = shlex.split(line)[1:]
            with click.Context(cli) as parent:
                cli.commands[words[0]].make_context(words[0], words[1:], parent=parent)


# ---- matrix -------------------------------------------------------------------------------------------------


def test_columns_that_always_agree_share_a_group() -> None:
    """Twelve cells that differ by rope alone become two groups, whatever their other facets."""
    events = [begin(), reach([change(0), change(9)])]
    for heads in (32, 64):
        for next_n in (1, 2, 4):
            for rope in ("neox", "interleaved"):
                cell = observation(9, BROKEN[rope], "fused", rope)
                more = {"facets": {"rope": rope, "heads": heads, "next_n": next_n}, "case": f"{rope}-{heads}-{next_n}"}
                events.append({**event("observation", cell), **more})
    found = text.groups(build.build(events))
    sizes = {name: len(columns) for name, columns in found.items()}
    assert sizes == {"fused rope=neox": 6, "fused rope=interleaved": 6}


def test_columns_that_no_facet_tells_apart_are_marked_mixed() -> None:
    events = [begin(), reach([change(9)])]
    for number, answer in enumerate(("good", "bad")):
        events.append({**event("observation", observation(9, answer, "fused", "neox")), "case": f"c{number}"})
    shown = lines_of([*events, end("bad", 1)])
    assert any(line.startswith(f"{sha(9)[:9]}  x") for line in shown)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["good", "bad", "absent", "skip", "raised"]), min_size=8, max_size=8))
def test_every_column_is_in_one_group(answers: list[str]) -> None:
    events = [begin(), reach([change(0), change(9)])]
    for number, answer in enumerate(answers):
        position, column = (0, 9)[number % 2], number // 2
        facets = {"rope": ("neox", "interleaved")[column % 2], "heads": (32, 64)[column // 2]}
        cell = event("observation", observation(position, answer, "fused", "neox"))
        events.append({**cell, "case": f"c{column}", "facets": facets})
    report = build.build(events)
    found = text.groups(report)
    assert sorted(c for columns in found.values() for c in columns) == [f"fused/c{i}" for i in range(4)]
    rows = text.latest(report["observations"]).values()
    marks = [text.mark(row, columns) for row in rows for columns in found.values()]
    assert "x" not in marks  # the facets tell all columns apart


# ---- foreign text -------------------------------------------------------------------------------------------


def harmless(shown: str) -> bool:
    return all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown.replace("\n", ""))


def test_a_hostile_title_is_one_harmless_line() -> None:
    shown = lines_of(gate_story(title=HOSTILE, author="\x1b[2JAda\n"))
    assert len(shown) == len(lines_of(gate_story()))
    assert all(map(harmless, shown))
    assert shown[0] == f"CULPRIT   {sha(5)[:9]} red link second line 1m evil a b end"
    assert shown[1].startswith("          Ada, 2026-05-06")


def test_hostile_details_notes_and_logs() -> None:
    events = gate_story()
    for e in events:
        if e["event"] == "observation":
            e["detail"] = HOSTILE
            e["log"] = HOSTILE
        if e["event"] == "note":
            e["text"] = HOSTILE
    assert all(map(harmless, lines_of(events)))


@settings(max_examples=80, deadline=None)
@given(st.text(st.characters(), max_size=300))
def test_any_title_and_author(foreign: str) -> None:
    shown = lines_of(gate_story(title=foreign, author=foreign))
    assert "".join(shown).encode("utf-8")
    assert len(shown) == len(lines_of(gate_story()))
    assert all(len(line) <= text.WIDTH for line in shown if not line.startswith("  dsabisect "))
    assert not any(c in "".join(shown) for c in "\x1b\r\x07\u202e\u2028")


def test_a_hostile_repository_folder_stays_one_word() -> None:
    run = {**begin(), "repo": "/tmp/a b; rm -rf ~ $(x)\n`y`"}
    report = build.build([run, *gate_story()[1:]])
    words = shlex.split(text.again(report, sha(5)))
    assert words[words.index("--repo") + 1] == "/tmp/a b; rm -rf ~ $(x) `y`"
    assert "\n" not in text.again(report, sha(5))


def test_the_command_has_what_else_decides_the_answer() -> None:
    settings = {"golden": {"value": ["my set"], "source": "option"}, "build-env": {"value": ["CC=/usr/bin/gcc"]}}
    report = build.build([{**begin(), "settings": settings}, *gate_story()[1:]])
    words = shlex.split(text.again(report, sha(5)))
    assert words[words.index("--golden") + 1] == "my set" and words[words.index("--build-env") + 1] == "CC=/usr/bin/gcc"


def test_long_titles_are_cut_not_wrapped() -> None:
    shown = lines_of(gate_story(title="word " * 100))
    assert len(shown[0]) == text.WIDTH
    assert shown[0].endswith("…")


def test_rows_of_the_story() -> None:
    assert len(row(5, BROKEN)) == 4  # the helper of these tests gives what they count on
