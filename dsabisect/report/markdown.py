"""The report as Markdown, for a pull request or an issue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dsabisect.report import text

SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>~@&$-])")


def safe(foreign: str, limit: int = 200) -> str:
    """Foreign text that Markdown and HTML show as it is: no markup, no mention, no issue link."""
    shown = text.plain(foreign, limit)
    return SPECIAL.sub(lambda m: {"<": "&lt;", ">": "&gt;", "&": "&amp;", "@": "&#64;", "#": "&#35;"}.get(m[1], "\\" + m[1]), shown)


def code(foreign: str, limit: int = 300) -> str:
    """A code span that its content cannot end."""
    shown = text.plain(foreign, limit)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def render(report: Mapping[str, Any]) -> str:
    parts = [_head(report), _because(report), _table(report), _environment(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: Mapping[str, Any]) -> str:
    first, given = report["first_diverging"], report["recommendation"]
    lines = []
    if given and given["action"] != "none":
        lines.append(f"## {safe(text.advice_line(given))}")
    if first is None:
        return "\n\n".join([*lines, f"**{safe(report['status'])}**"])
    word = "First diverging change" if first["confirmed"] else "Suspect, not confirmed"
    lines.append(f"**{word}:** {code(first['sha'][:12])} {safe(first['title'])}, {safe(first['author'])}, {first['date'][:10]}")
    lines.append(f"{len(first['columns'])} columns, such as {code(first['column'])}: {safe(first['reason'])}. {code(first['detail'])}")
    if first["confirmed"]:
        lines.append(f"Confirmed: {text.confirmation(report, first)}.")
    gate = given["gate"] if given else None
    if gate and given["action"] == "gate":
        lines.append(f"Switch: {code(gate['switch'])}. Stays on: {_list(gate['stays_on'])}. Goes off: {_list(gate['goes_off'])}.")
    return "\n\n".join(lines)


def _list(items: list[str]) -> str:
    return ", ".join(safe(item) for item in items) or "nothing"


def _because(report: Mapping[str, Any]) -> str:
    given = report["recommendation"]
    if not given:
        return ""
    lines = [f"- {safe(line, 600)}" for line in given["because"]]
    lines += [f"- not known: {safe(line, 600)}" for line in given["missing"]]
    return "### Why\n\n" + "\n".join(lines) if lines else ""


def _table(report: Mapping[str, Any]) -> str:
    first = report["first_diverging"]
    if first is None:
        return ""
    rows = {}
    for o in report["observations"]:
        if o["sha"] in (first["sha"], first["parent"]):
            rows.setdefault(f"{o['path']}/{o['case']}", {})[o["sha"]] = o
    lines = ["### Parent and culprit", "", "| column | parent | culprit |", "|---|---|---|"]
    for column, seen in sorted(rows.items()):
        cells = [seen.get(sha) for sha in (first["parent"], first["sha"])]
        shown = [f"{o['verdict']}: {code(o['detail'], 120)}" if o and o["detail"] else (o["verdict"] if o else "") for o in cells]
        lines.append(f"| {code(column)} | {_cell(shown[0])} | {_cell(shown[1])} |")
    return "\n".join(lines)


def _cell(shown: str) -> str:
    return shown.replace("|", "\\|")


def _environment(report: Mapping[str, Any]) -> str:
    run = report["run"]
    lines = [f"- {safe(name)}: {code(value)}" for name, value in sorted(run["environment"].items())]
    golden = run["golden"]
    lines.append(f"- golden set: {code(golden['key'][:16])}, {golden['cases']} cases, suite {safe(run['suite'])}")
    return "### Environment\n\n" + "\n".join(lines)
