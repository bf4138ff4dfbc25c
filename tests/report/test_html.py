"""The page as a string: one file, small enough, complete, and nothing foreign in it but text."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_events import STORIES, check_story, gate_story, large_story, set_story, sha, timeline_story

from dsabisect.report import build, changes, chart, html, page, text

HOSTILE = (
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=1">',
    "</title></style><svg onload=window.hacked=1>",
    "{{ 7*7 }}{% raw %}",
    "javascript:alert(1)",
    "\x1b[31m\u202eevil\u0000",
    "<!--<script>",
)


class Reader(HTMLParser):
    """Tags, addresses and visible text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.events: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "action", "data"):
                self.addresses.append(value or "")
            if name.startswith("on") or name == "style":
                self.events.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(events: list[dict[str, Any]]) -> str:
    return html.render(build.build(events))


@pytest.mark.parametrize("name", STORIES)
def test_every_story_and_every_cut_of_it_has_a_page(name: str) -> None:
    events = STORIES[name]()
    for length in (*range(0, len(events), 7), len(events)):
        shown = page_of(events[:length])
        read = Reader(shown)
        assert read.tags.count("html") == read.tags.count("main") == 1
        assert len(read.ids) == len(set(read.ids))


@pytest.mark.parametrize("name", STORIES)
def test_one_file_and_no_network(name: str) -> None:
    read = Reader(page_of(STORIES[name]()))
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(read.tags)
    assert not read.events
    for address in read.addresses:
        assert address.startswith(("#", "logs/")), address
    for address in read.addresses:
        assert not address.startswith("#") or address[1:] in read.ids, address


def test_the_answer_comes_first() -> None:
    words = " ".join(" ".join(Reader(page_of(gate_story())).words).split())
    order = [
        "Fused prologue (#27705)",
        "Diverges:",
        "0.41 > 0.0021",
        "GATE on rope = neox",
        "Confirmed",
        "Why",
        "Commits and",
    ]
    found = [words.index(word, words.index("Culprit")) for word in order]
    assert found == sorted(found)
    assert "only sm90 was run" in words


def test_one_commit_says_what_is_bad() -> None:
    words = " ".join(" ".join(Reader(page_of(check_story())).words).split())
    assert "Bad bad (exit code 1) fused/e2e-neox: end_to_end diff: 0.41 > 0.0021 allowed (row 3)" in words
    assert "culprit" not in words.lower().split("why")[0].split("bad bad")[1]


def test_unconfirmed_is_never_called_a_culprit() -> None:
    events = [e if e["event"] != "transition" else {**e, "confirmed": False} for e in gate_story()]
    words = " ".join(Reader(page_of(events)).words)
    assert "Suspect, not confirmed" in words
    assert "Culprit" not in words


def test_a_set_of_suspects_is_listed_with_the_rows_that_nobody_measured() -> None:
    words = " ".join(Reader(page_of(set_story())).words)
    assert "One of 4 commits" in words
    assert words.count(sha(5)[:9]) >= 2  # in the list and as a row of the matrix


def test_every_kind_of_change_is_a_step_at_its_commit() -> None:
    document = build.build(timeline_story())
    found = [(s.kind, s.suspects, s.before, s.after, len(s.columns)) for s in changes.steps(document)]
    assert found == [
        ("introduced", (sha(2),), sha(0), sha(2), 2),
        ("masked", (sha(4),), sha(2), sha(4), 1),
        ("exposed", (sha(6),), sha(4), sha(6), 1),
        ("fixed", (sha(8),), sha(6), sha(8), 1),
        ("gated", (sha(8),), sha(6), sha(8), 1),
    ]
    shown = html.render(document)
    for kind in ("introduced", "masked", "exposed", "fixed", "gated"):
        assert f'badge {kind}"' in shown
    full = page.matrix(document, {"default/e2e-neox": ["default/e2e-neox"]}, changes.steps(document))
    told = {row.sha: row.cells[0] for row in full.rows if row.sha}
    assert {s: c.steps for s, c in told.items() if c.steps} == {
        sha(2): ("introduced",), sha(4): ("masked",), sha(6): ("exposed",), sha(8): ("fixed",),
    }  # fmt: skip
    assert [told[sha(p)].word for p in (0, 2, 4, 6, 8)] == ["good", "bad", "good", "bad", "good"]


def test_what_a_person_said_is_shown_as_that() -> None:
    document = build.build(gate_story())
    document["range"]["marked"] = [{"sha": sha(3), "verdict": "skip", "column": ""}]
    words = " ".join(" ".join(Reader(html.render(document)).words).split())
    assert f"Said by a person {sha(3)[:9]} is not testable (by hand)" in words


def test_what_is_not_measured_is_a_gap_not_a_verdict() -> None:
    document = build.build(gate_story())
    rows = page.matrix(document, text.groups(document), changes.steps(document)).rows
    assert [(r.sha[:9], r.gap) for r in rows] == [
        (sha(0)[:9], 0), ("", 3), (sha(4)[:9], 0), (sha(5)[:9], 0), ("", 1), (sha(7)[:9], 0), ("", 1), (sha(9)[:9], 0),
    ]  # fmt: skip
    assert [r.sha for r in rows if r.culprit] == [sha(5)]


def test_the_facet_that_separates_is_named_first() -> None:
    (step,) = changes.steps(build.build(gate_story()))
    assert [(f.name, f.separates, dict(f.counts)) for f in step.facets] == [
        ("rope", True, {"interleaved": (1, 0), "neox": (0, 1)})
    ]
    mixed = changes.FacetCount(name="heads", counts={"32": (1, 1), "64": (1, 0)})
    same = changes.FacetCount(name="data", counts={"a": (2, 0), "b": (1, 0)})
    assert not mixed.separates
    assert not same.separates


def test_numbers_of_both_sides_and_their_tolerance() -> None:
    steps = changes.steps(build.build(timeline_story()))
    masked = next(s for s in steps if s.kind == "masked")
    (drawn,) = [chart.draw(c) for c in masked.charts]
    line = next(line for line in drawn.lines if line.column == "default/e2e-neox")
    assert line.told == "before 0.41, after 0.41, allowed 0.0021"
    assert (line.ok_before, line.ok_after) == (False, True)
    assert line.before is not None
    assert line.before > line.allowed > chart.LEFT


@pytest.mark.parametrize(
    ("value", "x"), [(1.0, chart.WIDTH - chart.RIGHT), (0.0, chart.LEFT), (float("inf"), chart.WIDTH - chart.RIGHT)]
)
def test_the_scale_is_logarithmic_and_holds_the_extremes(value: float, x: float) -> None:
    def mark(after: float) -> changes.Mark:
        return changes.Mark(column="c", allowed=3e-5, before=None, after=after, after_mean=None)

    drawn = chart.draw(changes.Chart(title="t", marks=(mark(0.8), mark(value), mark(1e-2)), left_out=0))
    at = [line.after for line in drawn.lines]
    assert at[1] == pytest.approx(x, abs=1)
    span = chart.WIDTH - chart.LEFT - chart.RIGHT
    low, high = -5, 0
    assert at[2] == pytest.approx(chart.LEFT + span * (-2 - low) / (high - low), abs=1)


def test_words_for_nan_and_infinity_count_as_infinite() -> None:
    assert [changes.number(v) for v in ("nan", "inf", "x", 0.5, 3)] == [float("inf")] * 3 + [0.5, 3.0]


@cache
def large_page() -> str:
    return page_of(large_story())


def test_a_hundred_commits_of_two_hundred_columns_fit_in_a_megabyte() -> None:
    large = large_page()
    assert len(large.encode()) <= 1_000_000
    assert large.count("<td class=") >= 100 * 200
    assert "Change 99: a title" in large


@pytest.mark.parametrize("foreign", HOSTILE)
def test_hostile_text_is_text(foreign: str) -> None:
    plain, document = gate_story(title="T", author="A"), gate_story(title=foreign, author=foreign)
    for e in document:
        if e["event"] == "observation":
            e.update(detail=foreign, log=foreign, notes=[foreign])
            e["facets"]["rope"] = e["facets"]["rope"] + foreign
        if e["event"] == "note":
            e["text"] = foreign
        if e["event"] == "run":
            e.update(repo=foreign, suite=foreign, command=[foreign], environment={foreign: foreign})
        if e["event"] == "recommendation":
            e.update(because=[foreign], missing=[foreign])
            e["gate"].update(switch=foreign, stays_on=[foreign], goes_off=[foreign])
    shown, harmless = Reader(page_of(document)), Reader(page_of(plain))
    dangerous = {"script", "style", "img", "svg", "title", "meta"}
    assert {t: shown.tags.count(t) for t in dangerous - {"title", "svg"}} == {
        t: harmless.tags.count(t) for t in dangerous - {"title", "svg"}
    }
    assert not shown.events
    assert all(address.startswith(("#", "logs/")) for address in shown.addresses)
    assert "\u202e" not in page_of(document)


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=120))
def test_any_title_leaves_the_markup_as_it_is(foreign: str) -> None:
    assert Reader(page_of(gate_story(title=foreign))).tags == Reader(page_of(gate_story(title="T"))).tags


@pytest.mark.parametrize(
    ("name", "path"),
    [("measure/ab-1.log", "measure/ab-1.log"), ("../x", ""), ("/etc/passwd", ""), ("a//b", ""), ("javascript:x", ""),
     ("a/..", "")],
)  # fmt: skip
def test_a_log_lies_below_the_folder_of_logs(name: str, path: str) -> None:
    assert page.log_path(name) == path


def test_every_log_is_reachable() -> None:
    document = build.build(gate_story())
    addresses = Reader(html.render(document, logs="../run/logs/")).addresses
    assert {f"../run/logs/{o['log']}" for o in document["observations"]} <= set(addresses)


def test_the_policy_names_the_hash_of_what_is_there() -> None:
    shown = page_of(gate_story())
    (script,) = re.findall(r"<script>(.*?)</script>", shown, re.S)
    (style,) = re.findall(r"<style>(.*?)</style>", shown, re.S)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', shown)
    assert policy is not None
    assert html._hash(script).replace("'", "&#39;") in policy[1]
    assert html._hash(style).replace("'", "&#39;") in policy[1]
    assert "unsafe" not in policy[1]


def test_the_proof_of_an_action_stands_in_the_third_column() -> None:
    document = build.build(gate_story())
    assert "was not carried out" in html.render(document)
    document["recommendation"]["verified"] = {
        "old": {"fused/e2e-neox": "absent"}, "new": {"fused/e2e-neox": "bad"},
        "action_applied": {"fused/e2e-neox": "good"}, "conflicts": ["a.py"], "dependents": [],
    }  # fmt: skip
    sides = page.sides(document)
    assert sides is not None
    row = next(r for r in sides["rows"] if r["name"] == "fused rope=neox")
    assert row["sides"] == [[("absent", 1)], [("bad", 1)], [("good", 1)]]
    assert "was not carried out" not in html.render(document)
