"""The report as Markdown, for a pull request or an issue.

Foreign words pass through :func:`safe` or :func:`code`: a commit title cannot start markup, mention a person, link an
issue, close a table cell or carry HTML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsabisect.report import text

SPECIAL = re.compile(r"[\\`*_{}\[\]!|~$]")
BLOCK = re.compile(r"^(?:[-+=#]|(?<!\d)\d+(?=[.)]))")  # would begin a list, a heading or an underline
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# GitHub finds mentions, issue numbers and bare addresses in the finished text: only something between breaks them.
APART = re.compile(r"(?<=[@#])|(?<=[a-zA-Z]:)(?=//)|(?<=www)(?=\.)", re.IGNORECASE)
Report = Mapping[str, Any]


def safe(foreign: object, limit: int = 200) -> str:
    """Foreign text that Markdown and HTML show as it is."""
    parts = APART.split(text.plain(foreign, limit))
    shown = "&#8203;".join(map(_escaped, parts))
    begins = BLOCK.match(shown)
    if begins is None:
        return shown
    lead = begins[0]
    return f"{lead}\\{shown[len(lead) :]}" if lead.isdigit() else f"\\{shown}"


def _escaped(part: str) -> str:
    return "".join(ENTITIES.get(c, c) for c in SPECIAL.sub(lambda m: f"\\{m[0]}", part))


def code(foreign: object, limit: int = 300) -> str:
    """A code span that its content cannot end."""
    shown = text.plain(foreign, limit)
    if not shown:
        return ""
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def render(report: Report) -> str:
    parts = [_head(report), _because(report), _table(report), _notes(report), _again(report), _environment(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: Report) -> str:
    first, given = report["first_diverging"], report["recommendation"]
    parts = [f"## {safe(text.advice_line(given))}"] if given and given["action"] != "none" else []
    if first is None:
        return "\n\n".join([*parts, f"**{safe(report['status'])}**", *_suspects(report)])
    word = "First diverging change" if first["confirmed"] else "Suspect, not confirmed"
    who = f"{safe(first['author'])}, {safe(first['date'][:10])}"
    parent = f"parent {code(first['parent'][:12])}"
    parts.append(f"**{word}:** {code(first['sha'][:12])} {safe(first['title'])} ({who}; {parent})")
    parts.append(f"**Diverges:** {safe(text.diverges(report, first), 400)}")
    runs = text.confirmed(report, first)
    parts.append(f"**{'Confirmed' if first['confirmed'] else 'Not'}:** {safe(runs, 400)}")
    proven = text.proposed(report)
    if proven:
        parts.append(f"**{proven[0]}:** {safe(proven[1], 400)}")
    gate = given["gate"] if given else None
    if gate and given["action"] == "gate":
        on, off = _list(gate["stays_on"]), _list(gate["goes_off"])
        parts.append(f"**Switch:** {code(gate['switch'])}. Stays on: {on}. Goes off: {off}.")
    return "\n\n".join(parts)


def _suspects(report: Report) -> list[str]:
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    sets = sorted({tuple(t["suspects"]) for t in report["transitions"] if len(t["suspects"]) > 1})
    lines = {shas: [f"- {code(sha[:12])} {safe(titles.get(sha, ''))}" for sha in shas[:50]] for shas in sets}
    return [f"One of {len(shas)} commits:\n\n" + "\n".join(lines[shas]) for shas in sets]


def _list(items: Sequence[str]) -> str:
    return ", ".join(safe(item) for item in items) or "nothing"


def _because(report: Report) -> str:
    given = report["recommendation"]
    if not given:
        return ""
    lines = [f"- {safe(line, 600)}" for line in given["because"]]
    lines += [f"- missing: {safe(line, 600)}" for line in given["missing"]]
    return "### Why\n\n" + "\n".join(lines) if lines else ""


def _table(report: Report) -> str:
    """Parent and culprit side by side, columns that always agree in one line."""
    first = report["first_diverging"]
    if first is None:
        return ""
    shas = [sha for sha in (first["parent"], first["sha"]) if sha]
    seen = text.latest(report["observations"])
    lines = ["### Parent and culprit", "", "| cells | parent | culprit |", "|---|---|---|"]
    for name, columns in text.groups(report).items():
        sides = [_side([seen[sha][c] for c in columns if c in seen.get(sha, {})]) for sha in shas]
        lines.append(f"| {safe(name)} ({len(columns)}) | {' | '.join(['', *sides][-2:])} |")
    return "\n".join(lines)


def _side(cells: Sequence[Mapping[str, Any]]) -> str:
    """`bad: <detail of the first bad cell>`, `good`, `absent`, … or several of them."""
    kinds = sorted({_word(o) for o in cells})
    shown = next((o["detail"] for o in cells if o["verdict"] == "bad"), "")
    return ", ".join(kinds) + (f": {_cell(code(shown, 120))}" if shown else "")


def _word(o: Mapping[str, Any]) -> str:
    if o.get("unsteady"):
        return "bad in some runs"
    return "absent" if o["reason"] == "absent" else str(o["verdict"])


def _cell(shown: str) -> str:
    """A pipe would end the cell even inside a code span; behind a backslash it is shown as itself."""
    return shown.replace("|", "\\|")


def _notes(report: Report) -> str:
    """What a person said, then what the run noted."""
    lines = [f"- {safe(line, 600)}" for line in (*text.marked(report), *report["notes"])]
    return "### Notes\n\n" + "\n".join(lines) if lines else ""


def _again(report: Report) -> str:
    first = report["first_diverging"]
    if first is None:
        return ""
    lines = [text.again(report, sha) for sha in (first["parent"], first["sha"]) if sha]
    fence = "`" * max(3, 1 + max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0))
    return "\n".join(["### See it again", "", f"{fence}console", *lines, fence])


def _environment(report: Report) -> str:
    run = report["run"]
    lines = [f"- {safe(name)}: {code(value)}" for name, value in sorted(run["environment"].items())]
    golden = run["golden"]
    lines.append(f"- golden set: {code(golden['key'][:16])}, {golden['cases']} cases, suite {safe(run['suite'])}")
    lines += [f"- baselines: {safe(golden['baselines'])}"] if golden.get("baselines") else []
    return "### Environment\n\n" + "\n".join(lines)
