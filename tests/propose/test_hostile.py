"""Foreign words in subjects, authors, paths and error texts: they come out as text everywhere, or not at all."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import MadeRepo
from markdown_it import MarkdownIt

from dsabisect.outside.gitrepo import GitRepo
from dsabisect.outside.workshop import BRANCH, Workshop
from dsabisect.propose import actions, pulltext
from dsabisect.propose.evidence import Evidence
from dsabisect.report import build, html, text

sys.path.append(str(Path(__file__).parents[1] / "report"))
from made_events import gate_story

Make = Callable[..., MadeRepo]
HOSTILE = (
    "](javascript:alert(1))", "[click](https://evil.example)", "![x](https://evil.example/x.png)",
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</details><h1>", "<!-- hidden",
    "```\n# owned\n```", "``` `` ` ```", "`` code ``", "| a | b |\n|---|---|", "||||", "# heading", "## Proof",
    "\n\n# second paragraph", "- item", "1. item", "> quote", "===", "---", "***bold***", "__init__ and _x_",
    "~~~\ncode\n~~~", "~~gone~~", "@everyone look", "fixes #1", "GH-12 and owner/repo#3",
    "https://evil.example/?q=1", "www.evil.example", "&lt;b&gt; &#60;b&#62;", "\\`escaped\\`", "\\",
    "$(touch hacked)", "`touch hacked`", "; touch hacked", "' ; touch hacked ; '", '" && touch hacked && "',
    "--upload-pack=touch hacked", "-rf", "--", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\u202egnp.exe",
    "\u2066isolated", "a\u2028b", "\r\nSigned-off-by: root", "\tTab", "$x^2$", "{{ 7*7 }}{% raw %}",
    "%s %n {0}", "éééééééééééééééééééééééééééééééééééééééé", "\U0001f600 ok",
)  # fmt: skip


class Reader(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[str]]] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def raw_commit(made: MadeRepo, parent: str, files: dict[str, str], subject: str) -> str:
    """A commit as a hostile author makes it: git itself would clean the message and quote nothing."""
    entries = []
    for name, content in files.items():
        blob = made.git("hash-object", "-w", "--stdin", data=content)
        entries.append(f"100644 blob {blob}\t{name}\0")
    tree = made.git("mktree", "-z", data="".join(entries))
    head = f"tree {tree}\nparent {parent}\nauthor {AUTHOR} 1780000000 +0000\ncommitter {AUTHOR} 1780000000 +0000\n\n"
    done = subprocess.run(["git", "hash-object", "-t", "commit", "-w", "--stdin", "--literally"], cwd=made.path,
                          input=(head + subject).encode(), capture_output=True, check=True)  # fmt: skip
    return done.stdout.decode().strip()


AUTHOR = "**Mallory** `x` [a](b) <mallory@example.com>"


def report_about(culprit: str, parent: str, subject: str) -> dict[str, Any]:
    """A finding about this commit, with the same hostile words as title, author, error and note."""
    report: dict[str, Any] = build.build(gate_story(title=subject, author=subject))
    report["first_diverging"].update(sha=culprit, parent=parent, detail=subject, reason="diverged")
    report["recommendation"].update(because=[subject], missing=[subject], change=culprit)
    report["run"].update(repo=f"/repo/{subject}", environment={subject: subject})
    return report


def test_there_are_fifty() -> None:
    assert len(set(HOSTILE)) >= 50


@pytest.mark.parametrize("foreign", HOSTILE)
def test_a_hostile_commit_comes_out_as_text(make_repo: Make, tmp_path: Path, foreign: str) -> None:
    made = make_repo()
    base = made.commit("begin", {"kept": "k\n"})
    name = re.sub(r"[/\0]", "_", foreign) or "x"
    culprit = raw_commit(made, base, {"kept": "k\n", name: "bad\n"}, foreign)
    made.git("update-ref", "refs/heads/main", culprit)
    shop = Workshop(GitRepo(made.path, tmp_path / "cache"), tmp_path / "workshop")
    change = actions.by_revert(shop, culprit, culprit)
    assert (change.refused, change.files) == ("", (name,))

    # the commit: one clean subject, and a patch that brings exactly this tree
    message = pulltext.message(title=change.title, culprit=culprit, kind="revert", reason=foreign, proof=foreign)
    sha = shop.commit(tree=change.tree, parents=(culprit,), message=message, date=shop.date_of(culprit))
    branch = f"dsabisect/revert-{culprit[:9]}"
    assert BRANCH.fullmatch(branch)
    shop.publish(branch, sha)
    said = made.git("log", "-1", "--format=%B", sha)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\u2028]", said)
    lines = said.splitlines()
    assert not lines[0].startswith(("#", "-")) and lines[1] == ""
    assert [line.partition(" ")[0] for line in lines[2:] if line] == ["This", "Reason:", "Proof:"]
    assert made.git("rev-parse", f"{sha}^{{tree}}") == made.git("rev-parse", f"{base}^{{tree}}")
    assert made.git("fsck", "--strict", "--no-dangling", sha, check=False).count("error") == 0

    # the pull request
    report = report_about(culprit, base, foreign)
    conflict = actions.Made(
        kind="revert", title=change.title, tree="", files=change.files, refused=foreign, notes=(foreign,),
        conflicts=(actions.revert.Conflict(path=name, later=(shop.repo.change(culprit),)),),
    )  # fmt: skip
    for told in (change, conflict):
        body = pulltext.body(report, told, Evidence(), run=report["run"], onto=culprit, defaults=(), forced=foreign)
        check_markdown(body, paths=told.files if not told.refused else ())
    assert not (made.path / "hacked").exists()

    # the page of the run, with the proof in it
    report["recommendation"]["verified"] = {
        "change": culprit, "action": "revert", "onto": culprit, "holds": False, "said": foreign,
        "conflicts": [name], "dependents": [foreign],
    }  # fmt: skip
    plain = Reader(html.render(build.build(gate_story())))
    page = Reader(html.render(report))
    assert {t for t, _ in page.seen} <= {t for t, _ in plain.seen} | {"ul", "li", "dl", "dt", "dd"}
    assert not any(a.startswith("on") for _, names in page.seen for a in names)
    shown = text.render(report)
    assert "\x1b" not in shown and "\u202e" not in shown


def check_markdown(body: str, paths: tuple[str, ...]) -> None:
    """No HTML, link or image of theirs; our headings alone; code spans and commands whole."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(body)
    inner = [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in (*tokens, *inner)}
    assert not kinds & {
        "html_block",
        "html_inline",
        "link_open",
        "image",
        "s_open",
        "code_block",
        "hr",
        "blockquote_open",
    }
    heads = [tokens[n + 1].content for n, token in enumerate(tokens) if token.type == "heading_open"]
    ours = ("What this changes", "Conflicts", "Why", "What is lost", "What is not known", "See it again", "Environment")
    assert [h for h in heads[1:] if h not in ours] == []
    spans = [child.content for child in inner if child.type == "code_inline"]
    for path in paths:
        assert (text.plain(path, 300).strip() or ascii(path)) in [s.strip() for s in spans]
    fences = [token.content.splitlines() for token in tokens if token.type == "fence"]
    assert len(fences) == 1
    for line in fences[0]:
        assert shlex.split(line)[:2] == ["dsabisect", "check"]
    for found in re.findall(r"(?<!\u200b)[@#]\w", re.sub(r"`+[^`]+`+", "", body.replace("&#8203;", "\u200b"))):
        raise AssertionError(f"a mention or a link to an issue: {found}")
    rows = [token for token in tokens if token.type == "tr_open"]
    cells = [token for token in tokens if token.type in ("td_open", "th_open")]
    assert len(cells) == 2 * len(rows)
