"""What the HTML page shows, as plain values: the document in, lists and words out. No markup here. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsabisect.report import changes, text
from dsabisect.report.build import column_of

Report = Mapping[str, Any]
CELLS = {  # mark of the text report → class, sign, word
    ".": ("g", "·", "good"),
    "X": ("b", "✕", "bad"),
    "x": ("m", "×", "some bad"),
    "~": ("m", "~", "does not repeat"),
    "?": ("s", "?", "untestable"),
    "-": ("a", "–", "absent"),
    " ": ("n", "", "not measured"),
}
MOST_SUSPECTS = 100
DETAIL_BUDGET = 60_000  # characters of cell details in one page; the rest stands in report.json


@dataclass(frozen=True, kw_only=True)
class Cell:
    look: str  # class names
    sign: str
    word: str  # for a screen reader
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A commit; ``sha`` "" is a gap of ``gap`` commits that were not measured."""

    sha: str = ""
    title: str = ""
    cells: tuple[Cell, ...] = ()
    gap: int = 0
    culprit: bool = False


@dataclass(frozen=True, kw_only=True)
class Matrix:
    heads: tuple[tuple[str, int], ...]  # name, columns in it
    rows: tuple[Row, ...]


# ---- the answer ---------------------------------------------------------------------------------------------


def answer(report: Report) -> dict[str, Any]:
    """What happened in one word, one sentence, and the advice."""
    first, given = report["first_diverging"], report["recommendation"]
    advice = text.advice_line(given) if given and given["action"] != "none" else ""
    found: dict[str, Any] = {"advice": advice, "status": report["status"], "exit_code": report["exit_code"]}
    if first is None:
        if len(report["range"]["commits"]) == 1:
            return {**found, **_one_commit(report)}
        calm = report["exit_code"] == 0
        return {
            **found,
            "word": "Nothing diverges" if calm else "No single culprit",
            "tone": "calm" if calm else "doubt",
        }
    return {
        **found,
        "word": "Culprit" if first["confirmed"] else "Suspect, not confirmed",
        "tone": "culprit" if first["confirmed"] else "doubt",
        "diverges": text.diverges(report, first),
        "runs": text.confirmed(report, first),
    }


def _one_commit(report: Report) -> dict[str, Any]:
    """The answer of `check`, with the first bad cells."""
    bad = [o for o in report["observations"] if o["verdict"] == "bad"]
    word, tone = {0: ("Good", "calm"), 1: ("Bad", "culprit"), None: ("Unfinished", "doubt")}.get(
        report["exit_code"], ("Untestable", "doubt")
    )
    shown = [f"{column_of(o)}: {o['detail'] or o['reason']}" for o in bad[:5]]
    left = [f"and {len(bad) - 5} more: see the matrix"] if len(bad) > 5 else []
    return {"word": word, "tone": tone, "bad": [*shown, *left]}


def suspects(report: Report) -> list[dict[str, Any]]:
    """Each set of more than one suspect, with titles."""
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    sets = sorted({tuple(t["suspects"]) for t in report["transitions"] if len(t["suspects"]) > 1})
    return [
        {"count": len(shas), "shown": [(sha[:12], titles.get(sha, "")) for sha in shas[:MOST_SUSPECTS]]}
        for shas in sets
    ]


def commands(report: Report) -> list[tuple[str, str]]:
    """(what for, command): whole lines to copy."""
    first = report["first_diverging"]
    if first is None:
        return []
    repo = shlex.quote(text.plain(report["run"]["repo"], 4096))
    lines = [("It is good here", text.again(report, first["parent"]))] if first["parent"] else []
    lines.append(("It is bad here", text.again(report, first["sha"])))
    lines.append(("Read the change", f"git -C {repo} show {first['sha'][:12]}"))
    what = "Make the change, measure it, write patch and text; RUN_DIR is the folder of this run"
    lines.append((what, "dsabisect propose RUN_DIR"))
    return lines


# ---- old, new, new with the advice --------------------------------------------------------------------------


TOLD = {"said": "Proof", "speed": "Speed", "conflicts": "Conflicts", "dependents": "Later changes that need it"}


def sides(report: Report) -> dict[str, Any] | None:
    """Parent, culprit and, where the advice was carried out, the result; by groups of columns that agree.

    ``verified`` may hold, for old, new and action_applied, a mapping of column → verdict (or a list of observations);
    anything else is shown as its words.
    """
    first, given = report["first_diverging"], report["recommendation"]
    if first is None:
        return None
    seen = text.latest(report["observations"])
    verified = (given or {}).get("verified") or {}
    old = _verdicts(verified.get("old")) or _row_verdicts(seen.get(first["parent"], {}))
    new = _verdicts(verified.get("new")) or _row_verdicts(seen.get(first["sha"], {}))
    after = _verdicts(verified.get("action_applied"))
    named = text.groups(report)
    rows = [
        {"name": name, "count": len(columns), "sides": [_tally(side, columns) for side in (old, new, after)]}
        for name, columns in named.items()
    ]
    told = {name: _words(verified[key]) for key, name in TOLD.items() if verified.get(key)}
    return {"rows": rows, "applied": bool(after), "told": told, "action": text.advice_line(given) if given else ""}


def _verdicts(given: Any) -> dict[str, str]:
    """column → verdict, from what the proof of a proposal may hold."""
    if isinstance(given, Mapping):
        inner = given.get("cells", given.get("observations", given.get("columns", given)))
        if inner is not given:
            return _verdicts(inner)
        return {str(k): str(v) for k, v in given.items() if v in ("good", "bad", "skip", "absent")}
    if isinstance(given, (list, tuple)):
        return _row_verdicts({column_of(o): o for o in given if isinstance(o, Mapping) and {"path", "case"} <= set(o)})
    return {}


def _row_verdicts(row: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {c: "absent" if o.get("reason") == "absent" else str(o.get("verdict", "")) for c, o in row.items()}


def _tally(side: Mapping[str, str], columns: Sequence[str]) -> list[tuple[str, int]]:
    found = [side[c] for c in columns if c in side]
    return [(verdict, found.count(verdict)) for verdict in ("bad", "good", "absent", "skip") if verdict in found]


def _words(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]


# ---- matrix -------------------------------------------------------------------------------------------------


def matrix(report: Report, heads: Mapping[str, Sequence[str]], steps: Sequence[changes.Step]) -> Matrix:
    """Commits down, ``heads`` (name → columns) across. Commits that nobody measured become gaps."""
    seen = text.latest(report["observations"])
    marked = {(sha, c): step.kind for step in steps for sha in step.suspects[-1:] for c in step.columns}
    suspected = {sha for step in steps if len(step.suspects) <= MOST_SUSPECTS for sha in step.suspects}
    first = report["first_diverging"]["sha"] if report["first_diverging"] else ""

    def rows() -> Iterator[Row]:
        gap = 0
        for commit in report["range"]["commits"]:
            sha = commit["id"]
            if sha not in seen and sha not in suspected:
                gap += 1
                continue
            if gap:
                yield Row(gap=gap)
            gap = 0
            cells = tuple(_cell(seen.get(sha, {}), columns, sha, marked) for columns in heads.values())
            yield Row(sha=sha, title=commit["title"], cells=cells, culprit=sha == first)
        if gap:
            yield Row(gap=gap)

    return Matrix(heads=tuple((name, len(columns)) for name, columns in heads.items()), rows=tuple(rows()))


def _cell(
    row: Mapping[str, Mapping[str, Any]], columns: Sequence[str], sha: str, marked: Mapping[tuple[str, str], str]
) -> Cell:
    look, sign, word = CELLS[text.mark(row, columns)]
    kinds = tuple(dict.fromkeys(marked[sha, c] for c in columns if (sha, c) in marked))
    return Cell(look=f"{look} t" if kinds else look, sign=sign, word=word, steps=kinds)


def columns(report: Report) -> list[str]:
    """Every column, by path in the order of the run, then by case."""
    order = {path: at for at, path in enumerate(report["run"]["paths"])}
    found = {column_of(o) for o in report["observations"]}
    return sorted(found, key=lambda c: (order.get(c.partition("/")[0], len(order)), c))


def details(report: Report, heads: Sequence[str], rows: Sequence[Row]) -> dict[str, Any]:
    """What the page tells of one cell when it is chosen, small enough for 100 commits of 200 columns.

    ``cells[row][column]`` is [words, log, share]: places in the lists ``words`` and ``logs`` (-1: none), and the error
    in percent of what is allowed (-1: no number).
    """
    seen = text.latest(report["observations"])
    words: dict[str, int] = {}
    logs: dict[str, int] = {}
    spent = 0

    def place(o: Mapping[str, Any] | None) -> list[int]:
        nonlocal spent
        if o is None:
            return []
        said = _said(o)
        if said not in words and spent + len(said) > DETAIL_BUDGET:
            said = f"{o['reason']}; the rest is in report.json"
        if said not in words:
            spent += len(said)
        share = changes.share_of_allowed(o)
        percent = -1 if share is None else round(min(share, 1e6) * 100)
        log = logs.setdefault(text.plain(o["log"]), len(logs)) if o["log"] else -1
        return [words.setdefault(said, len(words)), log, percent]

    cells = [[place(seen.get(row.sha, {}).get(c)) for c in heads] for row in rows if row.sha]
    return {"words": list(words), "logs": [log_path(name) for name in logs], "cells": cells}


def _said(o: Mapping[str, Any]) -> str:
    """`matched` alone for what is good: its numbers are in the share."""
    if o["verdict"] == "good":
        return str(o["reason"])
    told = f"{o['reason']}: {o['detail']}" if o["detail"] else o["reason"]
    return text.plain(f"in some runs {told}" if o.get("unsteady") else told, 240)


# ---- logs ---------------------------------------------------------------------------------------------------


def log_path(name: str) -> str:
    """A log's address below the folder of logs; "" when it would lead out of it."""
    parts = name.split("/")
    return name if all(re.fullmatch(r"[\w.+-]+", part) and part.strip(".") for part in parts) else ""


def logs(report: Report) -> list[dict[str, Any]]:
    """By commit: each log once, with what it is of."""
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    by_commit: dict[str, dict[str, dict[str, Any]]] = {}
    for o in report["observations"]:
        if o["log"]:
            entry = by_commit.setdefault(o["sha"], {}).setdefault(
                text.plain(o["log"]), {"cells": 0, "bad": 0, "of": []}
            )
            entry["cells"] += 1
            entry["bad"] += o["verdict"] == "bad"
            if o["purpose"] not in entry["of"]:
                entry["of"].append(o["purpose"])
    ordered = [sha for sha in titles if sha in by_commit] + [sha for sha in by_commit if sha not in titles]
    return [
        {"sha": sha[:9], "title": titles.get(sha, ""),
         "logs": [{"name": name, "path": log_path(name), **entry} for name, entry in by_commit[sha].items()]}
        for sha in ordered
    ]  # fmt: skip
