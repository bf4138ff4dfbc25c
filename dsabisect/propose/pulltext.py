"""The words of a proposal: pull-request body (Markdown) and commit message.

Everything that a template prints passes through :func:`dsabisect.report.markdown.safe` unless a filter has made it
inert already: foreign text is inert by default, not by care.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsabisect.model import Column, Observation, Outcome
from dsabisect.report import markdown, text

if TYPE_CHECKING:
    from dsabisect.propose.prove import Proof, Row

TEMPLATES = Path(__file__).parent / "templates"
SUBJECT_LIMIT = 200


class Inert(str):
    """Markdown that was made by us and is printed as it is."""


def pull_request(values: Mapping[str, Any]) -> str:
    """The body as Markdown. ``values`` are the names that templates/pull.md prints."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, finalize=_finalize, autoescape=False,
    )  # fmt: skip
    environment.filters.update(code=_code, codecell=_codecell, fence=_fence)
    out = environment.get_template("pull.md").render(values)
    return re.sub(r"\n{3,}", "\n\n", out)


def _finalize(value: object) -> str:
    return str(value) if isinstance(value, Inert) else markdown.safe(value, 600)


def _code(value: object) -> Inert:
    return Inert(markdown.code(value))


def _codecell(value: object) -> Inert:
    """A pipe would end the cell even inside a code span."""
    return Inert(markdown.code(value).replace("|", "\\|"))


def _fence(lines: Sequence[object]) -> Inert:
    """A code block that its lines cannot end."""
    shown = [text.plain(line, 4096) for line in lines]
    fence = "`" * max(3, 1 + max((len(run) for line in shown for run in re.findall(r"`+", line)), default=0))
    return Inert("\n".join([f"{fence}console", *shown, fence]))


def message(*, title: str, culprit: str, kind: str, reason: str, proof: str) -> str:
    """Commit message: subject, what git tools look for, the reason. Foreign text is one line and begins no line."""
    subject = text.plain(title, SUBJECT_LIMIT) or "Proposal of dsabisect"
    subject = f"dsabisect: {subject}" if subject.startswith(("#", "-")) else subject
    about = {"revert": f"This reverts commit {culprit}.", "revert_hunk": f"This takes back part of commit {culprit}."}
    lines = [about.get(kind, f"This follows up on commit {culprit}."), "", f"Reason: {text.plain(reason, 500)}",
             f"Proof: {text.plain(proof, 500)}"]  # fmt: skip
    return "\n".join([subject, "", *lines, ""])


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of the proof by path and telling facets: cells whose three answers are alike share a line."""
    grouped: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        facets = row.new.facets
        told = " ".join(f"{k}={facets[k]}" for k in ("rope", "mode", "layout") if k in facets)
        name = f"{row.column.path} {told}".strip()
        key = (name, _side(row.old), _side(row.new), _side(row.applied))
        grouped.setdefault(key, []).append(row)
    return [{"name": n, "count": len(of), "old": a, "new": b, "applied": c} for (n, a, b, c), of in grouped.items()]


def _side(seen: Observation) -> str:
    """`good`, `bad: raised`, `off: takes split`, `absent`."""
    if seen.outcome is Outcome.ABSENT:
        return "absent"
    if seen.outcome is Outcome.NOT_EXERCISED:
        return "off: the path is not taken"
    return seen.verdict.value if seen.verdict.value == "good" else f"{seen.verdict.value}: {seen.reason.value}"


def lost_lines(proof: Proof | None) -> list[str]:
    """What goes with the action."""
    if proof is None:
        return []
    by_path: dict[str, list[Column]] = {}
    for row in proof.rows:
        gone = row.applied.outcome in (Outcome.ABSENT, Outcome.NOT_EXERCISED)
        if gone and row.new.outcome not in (Outcome.ABSENT, Outcome.NOT_EXERCISED):
            by_path.setdefault(row.column.path, []).append(row.column)
    return [f"path {path} is not taken any more in {len(columns)} cells" for path, columns in sorted(by_path.items())]


def command(words: Sequence[str]) -> str:
    """Words as one line that a shell takes apart again into the same words; nothing that a terminal obeys is left."""
    return shlex.join(text.plain(word, 4096) for word in words)


def missing_runs(lines: Sequence[str]) -> str:
    """What a HOLD waits for: commands to copy, and sentences."""
    return f"### Runs that are missing\n\n{_fence(lines)}\n"
