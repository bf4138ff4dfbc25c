"""What CI systems read: JUnit XML against its schema, GitHub's summary by parsing it, annotations that stay in line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import xmlschema
from hypothesis import given, settings
from hypothesis import strategies as st
from made_events import STORIES, change, gate_story, large_story, reach, set_story, sha, timeline_story
from markdown_it import MarkdownIt
from test_html import HOSTILE

from dsabisect.outside import store
from dsabisect.report import build, github, junit

SCHEMA = xmlschema.XMLSchema(resources.files("dsabisect.report").joinpath("junit.xsd").read_text())
COMMANDS = "::warning title=x::y \n::add-mask::z\r\n  ::error::w ##[add-matcher]x %0A::error::"


def tree(events: list[dict[str, Any]]) -> ET.Element:
    shown = junit.render(build.build(events))
    SCHEMA.validate(shown)
    return ET.fromstring(shown)


# ---- JUnit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORIES)
def test_every_cut_of_a_story_is_valid(name: str) -> None:
    events = STORIES[name]()
    for length in range(0, len(events) + 1, 5):
        tree(events[:length])


def test_a_suite_a_path_a_case_a_column_judged_at_the_newest_commit() -> None:
    root = tree(gate_story())
    assert [(s.get("name"), s.get("tests"), s.get("failures"), s.get("skipped")) for s in root] == [
        ("dsabisect.split", "2", "0", "0"), ("dsabisect.fused", "2", "1", "0"),
    ]  # fmt: skip
    failed = [case for case in root.iter("testcase") if case.find("failure") is not None]
    assert [(c.get("classname"), c.get("name")) for c in failed] == [("dsabisect.fused", "e2e-neox")]
    failure = failed[0].find("failure")
    assert failure is not None
    assert failure.get("type") == "diverged"
    assert failure.get("message") == "end_to_end diff: 0.41 > 0.0021 allowed (row 3)"
    told = (failure.text or "").splitlines()
    assert told[0].startswith(f"bad at {sha(9)[:12]} Change number 9")
    assert told[1] == f"introduced by {sha(5)[:12]} Fused prologue (#27705)"
    assert told[2].startswith("advice: GATE on rope = neox")
    assert told[3].startswith(f"see it again: dsabisect check {sha(9)[:12]}")
    assert "--case e2e-neox" in told[3]


def test_what_is_not_there_has_not_passed() -> None:
    root = tree(gate_story()[:6])  # the good end alone: fused is absent there
    assert [(s.get("name"), s.get("skipped")) for s in root] == [("dsabisect.split", "0"), ("dsabisect.fused", "2")]


def test_a_fault_that_is_mended_later_is_no_failure() -> None:
    root = tree(timeline_story())
    assert sum(int(suite.get("failures", "")) for suite in root) == 0


def test_the_schema_notices() -> None:
    shown = junit.render(build.build(gate_story()))
    for old, new in (('tests="2"', 'tests="two"'), ("<failure ", "<broken "), (' classname="dsabisect.split"', "")):
        assert old in shown
        assert not SCHEMA.is_valid(
            shown.replace(old, new).replace("</failure>", "</failure>" if new != "<broken " else "</broken>")
        )


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(), max_size=200))
def test_any_text_is_xml(foreign: str) -> None:
    events = gate_story(title=foreign)
    for e in events:
        if e["event"] == "observation":
            e.update(detail=foreign, case=foreign)
    tree(events)


# ---- GitHub -------------------------------------------------------------------------------------------------


def parsed(events: list[dict[str, Any]]) -> list[Any]:
    return MarkdownIt("commonmark", {"html": True}).enable("table").parse(github.summary(build.build(events)))


@pytest.mark.parametrize("name", STORIES)
def test_the_summary_parses_as_tables_of_even_rows(name: str) -> None:
    tokens = parsed(STORIES[name]())
    widths: list[list[int]] = []
    for token in tokens:
        if token.type == "table_open":
            widths.append([])
        if token.type == "tr_open":
            widths[-1].append(0)
        if token.type in ("td_open", "th_open"):
            widths[-1][-1] += 1
    assert widths  # at least the matrix
    assert all(len(set(table)) == 1 and len(table) > 1 for table in widths)
    kinds = {child.type for token in tokens for child in token.children or []} | {token.type for token in tokens}
    assert not kinds & {"html_block", "html_inline", "image", "link_open"}


def test_the_matrix_of_the_summary_shows_the_verdicts_and_the_change() -> None:
    rows = [t.content for t in parsed(gate_story()) if t.type == "inline"]
    at = next(i for i, content in enumerate(rows) if content == f"`{sha(5)[:9]}` Fused prologue (#&#8203;27705)")
    assert rows[at + 1 : at + 4] == ["🟢", "🔴 introduced", "🟢"]


def test_a_large_summary_stays_below_githubs_limit() -> None:
    shown = github.summary(build.build(large_story(100, 40)))
    assert len(shown.encode()) < 1 << 20
    assert "40 earlier commits" in shown


def test_annotations() -> None:
    assert github.commands(build.build(gate_story())) == [
        f"::error title=dsabisect%3A introduced::introduced by {sha(5)[:9]} Fused prologue (#27705), 1 column: "
        "end_to_end diff",
        "::notice title=dsabisect%3A advice::GATE on rope = neox · stays on: interleaved · goes off: neox",
    ]
    doubt = github.commands(build.build(set_story()))
    assert doubt[0].startswith(
        "::warning title=dsabisect%3A introduced%2C not confirmed::introduced by one of 4 commits"
    )


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.sampled_from([*HOSTILE, COMMANDS]), st.text(max_size=100)))
def test_one_annotation_is_one_command(foreign: str) -> None:
    for line in github.commands(build.build(gate_story(title=foreign))):
        assert line.splitlines() == [line]
        assert line.startswith("::")
        assert "\n" not in line


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from(":#[ \n\rab\t"), max_size=40))
def test_quiet_text_has_no_command(foreign: str) -> None:
    for line in github.quiet(foreign).replace("\r", "\n").split("\n"):
        assert not line.lstrip().startswith("::")
        assert "##[" not in line


def test_quiet_json_has_the_same_values() -> None:
    raw = json.dumps({"a": "##[group]x", "b": ["##[", "#"]})
    assert "##[" not in github.quiet_json(raw)
    assert json.loads(github.quiet_json(raw)) == json.loads(raw)


# ---- through the command line -------------------------------------------------------------------------------


def run_folder(folder: Path, events: list[dict[str, Any]]) -> Path:
    with store.Journal.create(folder) as journal:
        for e in events:
            journal.append(e["event"], {k: v for k, v in e.items() if k != "event"})
    return folder


def report(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dsabisect", "report", str(folder), *words]
    return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **env})


def test_report_writes_each_format(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "my run", gate_story())
    done = report(folder, "--format", "junit", "--output", str(tmp_path / "junit.xml"))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    SCHEMA.validate(str(tmp_path / "junit.xml"))
    out = tmp_path / "elsewhere"
    out.mkdir()
    assert report(folder, "--format", "html", "-o", str(out / "r.html")).returncode == 0
    assert 'href="../my%20run/logs/measure/5.log"' in (out / "r.html").read_text()
    assert f'href="{(folder / "logs").as_uri()}/measure/5.log"' in report(folder, "--format", "html").stdout
    failed = report(folder, "--format", "html", "-o", str(tmp_path / "none" / "r.html"))
    assert failed.returncode == 128
    assert "Traceback" not in failed.stderr


def test_in_github_actions_no_title_is_a_command(tmp_path: Path) -> None:
    events = gate_story(title="##[add-matcher]x", author="::error::x")
    events[1] = reach([change(p, "##[group]" * (p == 5)) for p in range(10)])
    for e in events:
        if e["event"] == "recommendation":
            e["because"] = ["word " * 13 + "::add-mask::secret"]
    folder = run_folder(tmp_path / "run", events)
    for form in ("text", "md", "json"):
        plain, actions = report(folder, "--format", form), report(folder, "--format", form, GITHUB_ACTIONS="true")
        assert "##[" not in actions.stdout
        assert not [line for line in actions.stdout.splitlines() if line.lstrip().startswith("::")]
        if form == "json":
            assert json.loads(actions.stdout) == json.loads(plain.stdout)
