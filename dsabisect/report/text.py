"""The report for a terminal: the answer in the first five lines, then what it rests on. 80 columns, no colour.

Every word that comes from elsewhere (titles, authors, messages of candidates, paths) passes through :func:`plain`.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsabisect.report.build import column_of

WIDTH = 80
LEAD = 10  # columns of the words at the left
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~])", re.S)
UNSEEN = re.compile(  # control characters, what turns or hides text, halves of surrogate pairs
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
SAID = {"good": "good", "bad": "bad", "skip": "not testable"}
TELLING = ("rope", "mode", "layout", "deep_gemm", "arch", "heads", "next_n", "lens", "scale", "graph", "page", "data")
Report = Mapping[str, Any]
Facets = Mapping[str, Mapping[str, Any]]  # column → facets of its cells
Row = Mapping[str, Mapping[str, Any]]  # column → observation


def plain(text: object, limit: int = 200) -> str:
    """Foreign text on one line, without anything that a terminal obeys or an eye cannot see."""
    one = " ".join(UNSEEN.sub(" ", ESCAPES.sub(" ", str(text))).split())
    return one if len(one) <= limit else one[: limit - 1] + "…"


def render(report: Report) -> str:
    blocks = [headline(report), because(report), timeline(report), matrix(report), footer(report)]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


# ---- the answer ---------------------------------------------------------------------------------------------


def headline(report: Report) -> list[str]:
    """Change, divergence, advice, confirmation: five lines when there is a culprit."""
    first = report["first_diverging"]
    if first is None:
        said = _wrapped("RESULT", f"{report['status']}{_exit(report)}")
        return [*said, *_suspects(report), *_advice(report), *_bad_cells(report)]
    who = f"{plain(first['author'], 40)}, {first['date'][:10]}, parent {first['parent'][:9]}"
    return [
        _cut(_lead("CULPRIT" if first["confirmed"] else "SUSPECT") + f"{first['sha'][:9]} {plain(first['title'])}"),
        _cut(" " * LEAD + who),
        _cut(_lead("DIVERGES") + diverges(report, first)),
        *_advice(report),
        *_wrapped("CONFIRMED" if first["confirmed"] else "NOT", confirmed(report, first)),
        *_proposed(report),
    ]


def _exit(report: Report) -> str:
    return "" if report["exit_code"] is None else f" (exit code {report['exit_code']})"


def confirmed(report: Report, first: Mapping[str, Any]) -> str:
    runs = confirmation(report, first)
    posterior = _posterior(report, first)
    if posterior is not None:
        how = f"posterior {posterior:.2f}: {_fails(report, first['sha'], first['column'])} of its runs fail"
        how += f", {_fails(report, first['parent'], first['column'])} at the parent" if first["parent"] else ""
        return how if first["confirmed"] else f"confirmed: {how}"
    if first["confirmed"]:
        return f"{runs}; clean builds"
    return f"confirmed: {runs}; see the notes" if runs else "confirmed: it was not run again beside its parent"


def _posterior(report: Report, first: Mapping[str, Any]) -> float | None:
    """Of the suspect, where runs of one commit disagreed; None where all of them agreed."""
    mine = [t for t in report["transitions"] if column_of(t) == first["column"] and first["sha"] in t["suspects"]]
    unsure = [float(t["confidence"]) for t in mine if t["confidence"] < 1]
    return min(unsure) if unsure else None


def _fails(report: Report, sha: str, column: str) -> str:
    """`5 of 8`"""
    runs = [o for o in report["observations"] if o["sha"] == sha and column_of(o) == column and _was_run(o)]
    return f"{sum(o['verdict'] == 'bad' for o in runs)} of {len(runs)}"


def _was_run(o: Mapping[str, Any]) -> bool:
    return bool(o["source"] == "measured" and o["verdict"] in ("good", "bad"))


def diverges(report: Report, first: Mapping[str, Any]) -> str:
    """`fused: 8 of 16 cells: end_to_end diff: 0.362 > 0.00304 allowed (row 2)`"""
    row = latest(report["observations"]).get(first["sha"], {})
    path = first["column"].partition("/")[0]
    mine = [column for column, o in row.items() if o["path"] == path and o["reason"] != "absent"]
    bad = [column for column in first["columns"] if column.partition("/")[0] == path]
    return f"{path}, {len(bad)} of {len(mine)} cells: {plain(first['detail'] or first['reason'])}"


def confirmation(report: Report, first: Mapping[str, Any]) -> str:
    """`parent good, culprit bad, parent good, culprit bad`, as it was measured."""
    runs = [o for o in report["observations"] if o["purpose"] == "confirm" and column_of(o) == first["column"]]
    who = {first["sha"]: "culprit", first["parent"]: "parent"}
    return ", ".join(f"{who[o['sha']]} {o['verdict']}" for o in runs if o["sha"] in who)


def _suspects(report: Report) -> list[str]:
    sets = {tuple(t["suspects"]) for t in report["transitions"] if len(t["suspects"]) > 1}
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    lines = []
    for suspects in sorted(sets):
        lines.append(_lead("SUSPECTS") + f"one of {len(suspects)} commits:")
        lines += [_cut(f"{' ' * LEAD}{sha[:9]} {plain(titles.get(sha, ''))}") for sha in suspects[:20]]
        lines += [f"{' ' * LEAD}and {len(suspects) - 20} more: see report.json"] if len(suspects) > 20 else []
    return lines


def _bad_cells(report: Report) -> list[str]:
    """For `check`: what is bad at the one commit that was measured."""
    shas = [o["sha"] for o in report["observations"]]
    row = latest(report["observations"])[shas[-1]] if len(set(shas)) == 1 else {}
    bad = [o for o in row.values() if o["verdict"] == "bad"]
    lines = [line for o in bad[:3] for line in _wrapped("BAD", f"{column_of(o)}: {o['detail'] or o['reason']}")]
    return lines + ([f"{' ' * LEAD}and {len(bad) - 3} more: see report.json"] if len(bad) > 3 else [])


def _advice(report: Report) -> list[str]:
    given = report["recommendation"]
    return _wrapped("ADVICE", advice_line(given)) if given and given["action"] != "none" else []


def proposed(report: Report) -> tuple[str, str] | None:
    """(Proven or Proposed, what `dsabisect propose` found when it carried the advice out)."""
    found = (report["recommendation"] or {}).get("verified")
    if not found:
        return None
    return ("Proven" if found["holds"] else "Proposed"), f"{found['action']} onto {found['onto'][:9]}: {found['said']}"


def _proposed(report: Report) -> list[str]:
    told = proposed(report)
    return _wrapped(told[0].upper(), told[1]) if told else []


def advice_line(given: Mapping[str, Any]) -> str:
    """`GATE on rope = neox · off: fused for rope = neox · on: … · switch …`, `REVERT 13852d3f3`, …"""
    action, gate, change = given["action"], given["gate"], given["change"][:9]
    if action == "gate":
        on, off = (_values(gate["predicate"], gate[side]) for side in ("stays_on", "goes_off"))
        return f"GATE on {condition(gate['predicate'])} · stays on: {on} · goes off: {off}"
    if action == "revert_hunk":
        return f"REVERT ONE HUNK of {change}"
    return f"{action.upper()} {change}".rstrip()


def _values(predicate: Mapping[str, Any], sides: Sequence[str]) -> str:
    """`interleaved` for `fused for rope = interleaved`, when rope is all that the gate asks about."""
    before = f" for {next(iter(predicate))} = " if len(predicate) == 1 else ""
    shown = [side.rpartition(before)[2] if before else side for side in sides]
    return ", ".join(map(plain, shown)) or "nothing"


def condition(predicate: Mapping[str, Any]) -> str:
    """`rope = neox and arch in {sm100, sm120}`"""
    return " and ".join(
        f"{name} in {{{', '.join(map(plain, value))}}}" if isinstance(value, list) else f"{name} = {plain(value)}"
        for name, value in predicate.items()
    )


def because(report: Report) -> list[str]:
    """The reasons, the switch of a gate with what it would leave on, and what is still missing."""
    given = report["recommendation"]
    if not given:
        return []
    gate = given["gate"]
    lines = [line for text in given["because"] for line in _wrapped("", text, first="  - ")]
    if gate and given["action"] == "gate":
        lines += _wrapped("", f"{gate['switch']}", first="  - the switch: ")
    return lines + [line for text in given["missing"] for line in _wrapped("", text, first="  missing: ")]


# ---- the timeline -------------------------------------------------------------------------------------------


def changes(report: Report) -> list[tuple[str, Sequence[str], dict[str, int], bool]]:
    """(kind, suspects, columns by path, confirmed) of every change of verdict, in the order of the history."""
    at = {c["id"]: position for position, c in enumerate(report["range"]["commits"])}
    found: dict[tuple[str, tuple[str, ...], bool], dict[str, int]] = {}
    for t in report["transitions"]:
        paths = found.setdefault((t["kind"], tuple(t["suspects"]), t["confirmed"]), {})
        paths[t["path"]] = paths.get(t["path"], 0) + 1
    order = sorted(found, key=lambda key: (at.get(key[1][-1], 0), key[0]))
    return [(kind, suspects, found[kind, suspects, sure], sure) for kind, suspects, sure in order]


def timeline(report: Report) -> list[str]:
    """What was introduced, masked, exposed, gated and fixed, one line each; nothing when there is one change only."""
    told = changes(report)
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    lines = []
    for number, (kind, suspects, paths, _) in enumerate(told if len(told) > 1 else ()):
        last = suspects[-1]
        sha = last[:9] if len(suspects) == 1 else f"{len(suspects)} to {last[:9]}"
        where = ", ".join(f"{path} {count}" for path, count in paths.items())
        lead = _lead("TIMELINE" if number == 0 else "")
        lines.append(_cut(f"{lead}{kind:<10} {sha}  {where}  {plain(titles.get(last, ''))}"))
    return lines


# ---- lines --------------------------------------------------------------------------------------------------


def _lead(word: str) -> str:
    return f"{word:<{LEAD}}"


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def _wrapped(word: str, text: str, first: str = "") -> list[str]:
    lead = first or _lead(word)
    rest = " " * min(len(lead), LEAD)
    return textwrap.wrap(plain(text, 900), WIDTH, initial_indent=lead, subsequent_indent=rest, break_on_hyphens=False)


# ---- matrix -------------------------------------------------------------------------------------------------


def matrix(report: Report) -> list[str]:
    """Measured commits down, groups of columns across; columns that always agree share a group."""
    rows = latest(report["observations"])
    order = [c["id"] for c in report["range"]["commits"] if c["id"] in rows]
    if not order:
        return []
    named = groups(report)
    letters = [letter(i) for i in range(len(named))]
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    lines = [_cut(f"{sign:<2} {key} ({len(cs)})") for sign, (key, cs) in zip(letters, named.items(), strict=True)]
    lines += ["", ". good  X bad  x some bad  ~ does not repeat  ? untestable  - absent", ""]
    lines.append(_cut(f"{'commit':<9}  {' '.join(f'{x:<2}' for x in letters)}").rstrip())
    for sha in order:
        cells = " ".join(f"{mark(rows[sha], columns):<2}" for columns in named.values())
        lines.append(_cut(f"{sha[:9]}  {cells} {plain(titles[sha])}").rstrip())
    return lines


def groups(report: Report) -> dict[str, list[str]]:
    """Name → columns. A path is split by facets only as far as its columns disagree at some commit."""
    rows = list(latest(report["observations"]).values())
    facets = {column: o["facets"] for row in rows for column, o in row.items()}
    paths: dict[str, list[str]] = {}
    for column in facets:
        paths.setdefault(column.partition("/")[0], []).append(column)
    parts = [_split(path, columns, facets, rows, TELLING) for path, columns in paths.items()]
    return {name: columns for part in parts for name, columns in part}


def _split(
    name: str, columns: list[str], facets: Facets, rows: Sequence[Row], left: Sequence[str]
) -> Iterable[tuple[str, list[str]]]:
    """The group itself when its columns agree, else its parts by the facet that leaves least disagreement."""
    if not _disagreements(columns, rows):
        return [(name, columns)]
    trials = [(facet, _by_facet(columns, facets, facet)) for facet in left]
    trials = [(facet, parts) for facet, parts in trials if len(parts) > 1]
    if not trials:
        return [(name, columns)]
    facet, parts = min(trials, key=lambda trial: sum(_disagreements(part, rows) for part in trial[1].values()))
    rest = [other for other in left if other != facet]
    return [
        group
        for value, part in parts.items()
        for group in _split(f"{name} {facet}={plain(value)}", part, facets, rows, rest)
    ]


def _by_facet(columns: Sequence[str], facets: Facets, facet: str) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for column in columns:
        parts.setdefault(str(facets[column].get(facet, "any")), []).append(column)
    return parts


def _disagreements(columns: Sequence[str], rows: Sequence[Row]) -> int:
    """At how many commits columns of the group have different marks."""
    return sum(len({mark(row, [c]) for c in columns if c in row}) > 1 for row in rows)


def letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"{chr(ord('A') + index // 26 - 1)}{chr(ord('A') + index % 26)}"


def latest(observations: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """sha → column → its last observation; of one that was both good and bad the last bad one, as `unsteady`."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for o in observations:
        row, column = rows.setdefault(o["sha"], {}), column_of(o)
        row[column] = _beside(row.get(column), o)
    return rows


def _beside(before: Mapping[str, Any] | None, o: Mapping[str, Any]) -> Mapping[str, Any]:
    unsteady = before is not None and (before.get("unsteady") or {before["verdict"], o["verdict"]} == {"good", "bad"})
    if before is None or not unsteady:
        return o
    return {**(o if o["verdict"] == "bad" else before), "unsteady": True}


def mark(row: Row, columns: Sequence[str]) -> str:
    seen = [row[c] for c in columns if c in row]
    if not seen:
        return " "
    if any(o.get("unsteady") for o in seen):
        return "~"
    if any(o["verdict"] == "bad" for o in seen):
        return "X" if all(o["verdict"] == "bad" for o in seen) else "x"
    if all(o["reason"] == "absent" for o in seen):
        return "-"
    return "." if any(o["verdict"] == "good" for o in seen) else "?"


# ---- footer -------------------------------------------------------------------------------------------------


def footer(report: Report) -> list[str]:
    """Counts, notes, where the logs are, commands that show it again."""
    run, reach = report["run"], report["range"]
    took = "" if report["seconds"] is None else f", {report['seconds']:.0f} s"
    counts = (
        f"{max(0, len(reach['commits']) - 1)} commits in range, {len(reach['relevant'])} touch what matters,"
        f" {len(reach['evaluated'])} measured, {report['timing']['cells']} cells{took},"
        f" on {run['device']['name']} ({run['device']['arch']})"
    )
    lines = textwrap.wrap(plain(counts), WIDTH)
    lines += [line for told in marked(report) for line in _wrapped("said", told)]
    lines += [line for note in report["notes"] for line in _wrapped("note", note)]
    first = report["first_diverging"]
    if first is None:
        return lines
    shown = latest(report["observations"]).get(first["sha"], {}).get(first["column"])
    if shown and shown["log"]:
        lines.append(_lead("log") + f"logs/{plain(shown['log'])} in the run folder")
    lines.append("see it again (good, then bad):")
    return lines + [f"  {again(report, sha)}" for sha in (first["parent"], first["sha"]) if sha]


def marked(report: Report) -> list[str]:
    """What a person said: `1234567 is bad, of fused/e2e-neox (by hand)`"""
    return [
        f"{mark['sha'][:9]} is {SAID[mark['verdict']]}"
        + (f", of {mark['column']}" if mark["column"] else "")
        + " (by hand)"
        for mark in report["range"]["marked"]
    ]


def again(report: Report, sha: str, column: str = "") -> str:
    """The command that measures ``column`` ("": the headline's) at ``sha``. Never wrapped, so that it can be copied."""
    run = report["run"]
    path, _, case = (column or report["first_diverging"]["column"]).partition("/")
    words = ["dsabisect", "check", sha[:12], "--repo", run["repo"], "--target", run["target"], "--path", path,
             "--case", case, "--suite", run["suite"], "--device", run["device"]["name"]]  # fmt: skip
    for option in ("golden", "build-env", "submodule"):
        for value in run["settings"].get(option, {}).get("value") or ():
            words += [f"--{option}", value]
    return shlex.join(plain(word, 4096) for word in words)
