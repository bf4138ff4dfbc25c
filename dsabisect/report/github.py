"""The report where GitHub Actions shows it: a job summary (Markdown) and annotations (workflow commands).

Formats: https://docs.github.com/actions/reference/workflow-commands-for-github-actions. A workflow command is any
printed line that begins with `::` or holds `##[`, so that a commit title could give one: :func:`quiet` and
:func:`quiet_json` take the power from foreign text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dsabisect.report import changes, markdown, page, text

Report = Mapping[str, Any]
SUMMARY_BYTES = 900_000  # GitHub takes 1 MiB for one step
MOST_ROWS, MOST_COLUMNS, MOST_ANNOTATIONS = 60, 20, 10
SIGNS = {"good": "🟢", "bad": "🔴", "some bad": "🟠", "untestable": "⚪", "absent": "–", "not measured": ""}


def summary(report: Report) -> str:
    """The Markdown report, then the matrix; for the file that $GITHUB_STEP_SUMMARY names."""
    whole = f"{markdown.render(report)}\n{_matrix(report)}\n"
    if len(whole.encode()) <= SUMMARY_BYTES:
        return whole
    return f"## {markdown.safe(report['status'])}\n\nToo large for a job summary: see report.html.\n"


def _matrix(report: Report) -> str:
    steps = changes.steps(report)
    groups = text.groups(report)
    shown = dict(list(groups.items())[:MOST_COLUMNS])
    rows = [row for row in page.matrix(report, shown, steps).rows if row.sha]
    if not rows or not shown:
        return ""
    heads = [f"{markdown.safe(name)} ({len(columns)})" for name, columns in shown.items()]
    lines = ["### Commits and columns", "", f"| commit | {' | '.join(heads)} |", f"|---|{':-:|' * len(heads)}"]
    for row in rows[-MOST_ROWS:]:
        cells = [" ".join((SIGNS[cell.word], *cell.steps)).strip() for cell in row.cells]
        lines.append(f"| {markdown.code(row.sha[:9])} {markdown.safe(row.title, 70)} | {' | '.join(cells)} |")
    left = [f"{len(rows) - MOST_ROWS} earlier commits"] if len(rows) > MOST_ROWS else []
    left += [f"{len(groups) - MOST_COLUMNS} groups of columns"] if len(groups) > MOST_COLUMNS else []
    legend = ", ".join(f"{sign} {word}" for word, sign in SIGNS.items() if sign)
    return "\n".join([*lines, "", legend, *([f"\nLeft out: {', '.join(left)}; see report.html."] if left else [])])


def commands(report: Report) -> list[str]:
    """One workflow command a line: an error for what breaks, a notice for what mends it, a warning for doubt."""
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    found = []
    for step in changes.steps(report)[:MOST_ANNOTATIONS]:
        one = len(step.suspects) == 1
        who = (
            f"{step.suspects[0][:9]} {titles.get(step.suspects[0], '')}"
            if one
            else f"one of {len(step.suspects)} commits"
        )
        level = "notice" if not step.breaks else "error" if step.confirmed else "warning"
        what = next(iter(step.broken), "")
        told = f"{step.kind} by {who}, {len(step.columns)} column{'s' * (len(step.columns) > 1)}: {what}"
        found.append(_command(level, f"dsabisect: {step.kind}{'' if step.confirmed else ', not confirmed'}", told))
    given = report["recommendation"]
    if given and given["action"] != "none":
        found.append(_command("notice", "dsabisect: advice", text.advice_line(given)))
    if not found and report["exit_code"] not in (None, 0):
        found.append(_command("warning", "dsabisect", f"{report['status']} (exit code {report['exit_code']})"))
    return found


def _command(level: str, title: str, message: str) -> str:
    name = _escaped(text.plain(title)).replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{_escaped(text.plain(message, 600))}"


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def quiet(shown: str) -> str:
    """The same words, none of them a workflow command."""
    return re.sub(r"(^|[\r\n])(\s*):(?=:)", r"\1\2: ", shown).replace("##[", "# #[")


def quiet_json(shown: str) -> str:
    """The same JSON values, none of them a workflow command."""
    return shown.replace("##[", "\\u0023#[")
