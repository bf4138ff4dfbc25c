"""The report for a terminal: the answer in the first lines, then what it rests on. 80 to 100 columns, no colour."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 96
MARK = {"good": ".", "bad": "X", "skip": "?"}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str, limit: int = 200) -> str:
    """Foreign text on one line, without anything that a terminal obeys."""
    one = " ".join(CONTROL.sub(" ", str(text)).split())
    return one if len(one) <= limit else one[: limit - 1] + "…"


def render(report: Mapping[str, Any]) -> str:
    blocks = [headline(report), advice(report), because(report), matrix(report), footer(report)]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def headline(report: Mapping[str, Any]) -> list[str]:
    first = report["first_diverging"]
    if first is None:
        return [*_wrapped("", f"RESULT  {report['status']}"), *_suspects(report)]
    name = "FIRST DIVERGING CHANGE" if first["confirmed"] else "SUSPECT (not confirmed)"
    return [
        f"{name}  {first['sha'][:9]}  {plain(first['title'], 110)}",
        f"  by {plain(first['author'], 60)}, {first['date'][:10]}, parent {first['parent'][:9]}",
        *_wrapped("  ", f"in {len(first['columns'])} columns, such as {first['column']}: {first['reason']}"),
        *_wrapped("  ", first["detail"]),
        *([f"  confirmed: {confirmation(report, first)}"] if first["confirmed"] else []),
    ]


def _suspects(report: Mapping[str, Any]) -> list[str]:
    sets = {tuple(t["suspects"]) for t in report["transitions"] if len(t["suspects"]) > 1}
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    lines = []
    for suspects in sorted(sets):
        lines.append(f"one of {len(suspects)} commits:")
        lines += [f"  {sha[:9]}  {plain(titles.get(sha, ''), 80)}" for sha in suspects[:20]]
    return lines


def confirmation(report: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """`parent good, culprit bad, parent good, culprit bad (clean builds)`, as it was measured."""
    runs = [o for o in report["observations"] if o["purpose"] == "confirm" and f"{o['path']}/{o['case']}" == first["column"]]
    who = {first["sha"]: "culprit", first["parent"]: "parent"}
    return ", ".join(f"{who.get(o['sha'], o['sha'][:9])} {o['verdict']}" for o in runs) + " (clean builds)"


def advice(report: Mapping[str, Any]) -> list[str]:
    given = report["recommendation"]
    if not given or given["action"] == "none":
        return []
    gate = given["gate"]
    lines = [f"ADVICE  {advice_line(given)}"]
    if gate and given["action"] == "gate":
        lines += [f"  switch     {gate['switch']}"]
        lines += [f"  stays on   {text}" for text in gate["stays_on"]] + [f"  goes off   {text}" for text in gate["goes_off"]]
    return lines


def advice_line(given: Mapping[str, Any]) -> str:
    """`GATE on rope = neox`, `REVERT 13852d3f3`, …"""
    action, gate = given["action"], given["gate"]
    if action == "gate":
        return "GATE on " + " and ".join(f"{k} = {v}" for k, v in gate["predicate"].items()) + f"  ({given['change'][:9]})"
    if action == "revert_hunk":
        return f"REVERT ONE HUNK of {given['change'][:9]}"
    return f"{action.upper()} {given['change'][:9]}".rstrip()


def because(report: Mapping[str, Any]) -> list[str]:
    given = report["recommendation"] or {"because": [], "missing": []}
    lines = [line for text in given["because"] for line in _wrapped("  - ", text)]
    lines += [line for text in given["missing"] for line in _wrapped("  not known: ", text)]
    return lines


def _wrapped(lead: str, text: str) -> list[str]:
    return textwrap.wrap(plain(text, 900), WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead)) if text else []


# ---- matrix -------------------------------------------------------------------------------------------------


def groups(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """Columns by path and by the facets that tell them apart most: the rows of the matrix would be too wide otherwise."""
    found: dict[str, list[str]] = {}
    for o in report["observations"]:
        key = " ".join([o["path"], *(str(o["facets"][f]) for f in ("rope", "mode", "layout") if f in o["facets"])])
        found.setdefault(key, [])
        column = f"{o['path']}/{o['case']}"
        if column not in found[key]:
            found[key].append(column)
    return found


def matrix(report: Mapping[str, Any]) -> list[str]:
    """Measured commits down, groups of columns across."""
    rows = _by_commit(report["observations"])
    named = groups(report)
    if not rows or not named:
        return []
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    order = [c["id"] for c in report["range"]["commits"] if c["id"] in rows]
    letters = [_letter(i) for i in range(len(named))]
    lines = [f"{letter} = {key} ({len(columns)})" for letter, (key, columns) in zip(letters, named.items(), strict=True)]
    lines += ["", f"{'commit':<10} {' '.join(f'{x:<2}' for x in letters)}  . good  X bad  ? untestable  - absent"]
    for sha in order:
        cells = " ".join(f"{_cell(rows[sha], columns):<2}" for columns in named.values())
        lines.append(f"{sha[:9]:<10} {cells}  {plain(titles[sha], max(20, WIDTH - 14 - 3 * len(letters)))}")
    return lines


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"{chr(ord('A') + index // 26 - 1)}{chr(ord('A') + index % 26)}"


def _by_commit(observations: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for o in observations:
        rows.setdefault(o["sha"], {})[f"{o['path']}/{o['case']}"] = o
    return rows


def _cell(row: Mapping[str, Mapping[str, Any]], columns: Sequence[str]) -> str:
    seen = [row[c] for c in columns if c in row]
    if not seen:
        return " "
    if any(o["verdict"] == "bad" for o in seen):
        return "X" if all(o["verdict"] == "bad" for o in seen) else "x"
    if all(o["reason"] == "absent" for o in seen):
        return "-"
    return "." if any(o["verdict"] == "good" for o in seen) else "?"


def footer(report: Mapping[str, Any]) -> list[str]:
    run, reach = report["run"], report["range"]
    cells = sum(1 for o in report["observations"] if o["timing"])
    lines = [
        f"{max(0, len(reach['commits']) - 1)} commits in range, {len(reach['relevant'])} touch what matters, "
        f"{len(reach['evaluated'])} measured, {cells} cells, {report['seconds']} s, {run['device']['arch']} ({run['device']['name']})"
    ]
    lines += [line for note in report["notes"] for line in _wrapped("note: ", note)]
    first = report["first_diverging"]
    if first:
        path, case = first["column"].split("/", 1)
        words = ["dsabisect", "check", first["sha"][:12], "--repo", run["repo"], "--target", run["target"], "--path", path,
                 "--case", case, "--suite", run["suite"], "--device", run["device"]["name"]]  # fmt: skip
        lines.append("see it again: " + shlex.join(words))
    return lines
