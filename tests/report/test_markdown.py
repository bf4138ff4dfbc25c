"""A pull request's text, in which nothing foreign is markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_events import STORIES, gate_story, set_story, sha

from dsabisect.report import build, markdown


def shown(**more: str) -> str:
    return markdown.render(build.build(gate_story(**more)))


def test_a_gate() -> None:
    lines = shown().splitlines()
    assert lines[0] == "## GATE on rope = neox · stays on: interleaved · goes off: neox"
    assert lines[2] == (
        f"**First diverging change:** `{sha(5)[:12]}` Fused prologue (#&#8203;27705)"
        f" (Ada Author, 2026-05-06; parent `{sha(4)[:12]}`)"
    )
    assert "**Diverges:** fused, 1 of 2 cells: end\\_to\\_end diff: 0.41 &gt; 0.0021 allowed (row 3)" in lines
    assert "**Confirmed:** parent good, culprit bad, parent good, culprit bad; clean builds" in lines
    assert "**Switch:** `FUSION`. Stays on: fused for rope = interleaved. Goes off: fused for rope = neox." in lines
    assert "- missing: only sm90 was run" in lines
    assert "| fused rope=neox (1) | absent | bad: `end_to_end diff: 0.41 > 0.0021 allowed (row 3)` |" in lines
    assert "| split (2) | good | good |" in lines


@pytest.mark.parametrize("name", STORIES)
def test_every_story_renders(name: str) -> None:
    for length in range(len(STORIES[name]()) + 1):
        assert markdown.render(build.build(STORIES[name]()[:length])).endswith("\n")


def test_suspects() -> None:
    text = markdown.render(build.build(set_story()))
    assert text.startswith("## HOLD\n")
    assert "One of 4 commits:" in text
    assert f"- `{sha(6)[:12]}` Change number 6" in text


@pytest.mark.parametrize(
    ("foreign", "want"),
    [
        ("plain words, 0.41 > 0.0021", "plain words, 0.41 &gt; 0.0021"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("&lt;b&gt;", "&amp;lt;b&amp;gt;"),
        ("[text](http://x) ![i](j)", "\\[text\\](http:&#8203;//x) \\!\\[i\\](j)"),
        ("**bold** _it_ ~~no~~ `code`", "\\*\\*bold\\*\\* \\_it\\_ \\~\\~no\\~\\~ \\`code\\`"),
        ("a | b", "a \\| b"),
        ("@everyone fixes #1", "@&#8203;everyone fixes #&#8203;1"),
        ("# heading", "\\#&#8203; heading"),
        ("- item", "\\- item"),
        ("12. item", "12\\. item"),
        ("2026-05-01", "2026-05-01"),
        ("$x$ \\", "\\$x\\$ \\\\"),
        ("two\n\nparagraphs\x1b[31m", "two paragraphs"),
        ("", ""),
    ],
)
def test_safe(foreign: str, want: str) -> None:
    assert markdown.safe(foreign) == want


@pytest.mark.parametrize("foreign", ["`", "``a`` b", "a`", "```\ncode", "x\ny", "plain"])
def test_a_code_span_is_not_ended_by_its_content(foreign: str) -> None:
    span = markdown.code(foreign)
    opening = re.match(r"`+", span)
    assert opening is not None
    fence = opening[0]
    inner = span[len(fence) : -len(fence)]
    assert span.endswith(fence)
    assert fence not in re.findall(r"`+", inner)
    assert "\n" not in span


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)

    def handle_comment(self, data: str) -> None:
        self.found.append("comment")


def html_in(text: str) -> list[str]:
    """Tags outside of code, as a reader of the Markdown would take them."""
    outside = re.sub(r"(?<!\\)(`+)(?!`).*?(?<!`)\1(?!`)", "", re.sub(r"```.*?```", "", text, flags=re.S))
    parser = Tags()
    parser.feed(outside)
    parser.close()
    return parser.found


def test_the_tag_finder_finds_tags() -> None:
    assert html_in("a <img src=x> `<b>` <!-- c -->") == ["img", "comment"]


@settings(max_examples=80, deadline=None)
@given(st.text(st.one_of(st.characters(), st.sampled_from("`*_<>|[]()#@\\&-\n")), max_size=80))
def test_any_title_keeps_the_shape(foreign: str) -> None:
    text, plain = shown(title=foreign, author=foreign), shown()
    assert len(text.splitlines()) == len(plain.splitlines())
    assert html_in(text) == []
    assert text.encode("utf-8")
    starts = [line[:3] for line in plain.splitlines()]
    assert [line[:3] for line in text.splitlines()] == starts  # no new heading, list, table row or fence
    assert not re.search(r"[@#](?=\w)", text.replace("&#8203;", "\u200b").replace("&#", ""))


def test_a_detail_cannot_break_the_table() -> None:
    events = gate_story()
    for e in events:
        if e["event"] == "observation":
            e["detail"] = "a | b ` c\n| d | e |"
    table = [line for line in markdown.render(build.build(events)).splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in table)
