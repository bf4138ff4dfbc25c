"""The words of a proposal: pull-request body (Markdown) and commit message.

Everything that a template prints passes through :func:`dsabisect.report.markdown.safe` unless a filter has made it
inert already: foreign text is inert by default, not by care.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsabisect.model import Column, Observation, Outcome, Verdict
from dsabisect.propose import speed
from dsabisect.propose.actions import Made, lines_of
from dsabisect.propose.prove import cells
from dsabisect.report import markdown, text

if TYPE_CHECKING:
    from dsabisect.propose.evidence import Evidence
    from dsabisect.propose.prove import Proof, Row

TEMPLATES = Path(__file__).parent / "templates"
SUBJECT_LIMIT = 200


KIND_WORDS = {
    "revert": "the change is taken back as a whole",
    "revert_hunk": "part of the change is taken back",
    "gate": "a gate in the source: the path is off under the condition and stays on elsewhere",
    "switch": "the default of the existing switch is turned round (no gate in the source could be made)",
}


class Inert(str):
    """Markdown that was made by us and is printed as it is."""


def body(
    report: Mapping[str, Any],
    made: Made,
    evidence: Evidence,
    *,
    run: Mapping[str, Any],
    onto: str,
    defaults: Collection[str],
    forced: str,
) -> str:
    """The pull-request body.

    Args:
        report: of the run that found the change.
        run: device, environment and golden set with which the evidence was measured.
        onto: what it was made on top of.
        defaults: paths that force nothing.
        forced: why a person goes on without a proof; "" when none does.
    """
    given, proof = report["recommendation"], evidence.proof
    first = report["first_diverging"]
    verdict = f"The proof {'holds' if proof.holds else 'failed'}: {proof.words}" if proof is not None else ""
    lost = lost_lines(proof)
    if evidence.speeds:
        lost += [f"time of the default selection: {line}" for line in speed_lines(evidence.speeds)]
        lost += ["(medians of one call of the indexer, launched without a CUDA graph, the host's time included)"]
    values = {
        "title": made.title, "advice": text.advice_line(given) if given else "none", "first": first,
        "label": "Exposed by" if made.kind == "revert_hunk" else "First diverging change",
        "diverges": text.diverges(report, first), "onto": onto, "kind_words": KIND_WORDS[made.kind],
        "files": made.files if not made.refused else (), "notes": made.notes, "refused": made.refused,
        "conflicts": lines_of(made.conflicts),
        "rows": table(proof.rows, defaults) if proof else [],
        "verdict": verdict, "forced": forced, "why": why(report),
        "dependents": [(sha, ", ".join(map(str, columns))) for sha, columns in evidence.dependents.items()],
        "lost": lost, "unknown": _unknown(report, evidence, run=run, onto=onto),
        "again": [text.again(report, sha) for sha in (first["parent"], first["sha"]) if sha],
        "environment": sorted(run["environment"].items()), "golden": run["golden"]["key"],
    }  # fmt: skip
    return _rendered(values)


def _unknown(report: Mapping[str, Any], evidence: Evidence, *, run: Mapping[str, Any], onto: str) -> list[str]:
    """What was not run: other devices, columns without an answer, speed."""
    proof = evidence.proof
    lines = [f"measured on {run['device']['arch']} only; no other arch was run"]
    if proof is None:
        check = text.again(report, onto)
        return [*lines, "nothing was built or measured with this action", f"whether {onto[:9]} is bad: {check}"]
    asked = {*proof.mended, *proof.lost}
    skipped = [r.column for r in proof.rows if r.applied.verdict is Verdict.SKIP and r.column not in asked]
    if skipped:
        lines.append(f"{len(skipped)} cells gave no answer with the action: " + ", ".join(map(str, skipped[:5])))
    if proof.still_bad:
        lines.append(
            f"{len(proof.still_bad)} cells are bad before and after: " + ", ".join(map(str, proof.still_bad[:5]))
        )
    return lines if evidence.speeds else [*lines, "speed was not measured"]


def _rendered(values: Mapping[str, Any]) -> str:
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
    """A code span; what has nothing that can be shown comes as its escapes."""
    return Inert(markdown.code(value if text.plain(value, 300).strip() else ascii(str(value))))


def _codecell(value: object) -> Inert:
    """A pipe would end the cell even inside a code span."""
    return Inert(_code(value).replace("|", "\\|"))


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


def table(rows: Sequence[Row], defaults: Collection[str] = ()) -> list[dict[str, Any]]:
    """Rows of the proof: cells of a path whose three answers are alike share a line, named by the facets they share.

    ``defaults``: paths that force nothing; for these the way that was taken is told too.
    """
    grouped: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        path = row.column.path
        sides = [_side(seen, shown=path in defaults) for seen in (row.old, row.new, row.applied)]
        grouped.setdefault((path, *sides), []).append(row)  # type: ignore[arg-type]
    told = []
    for (path, *sides), mine in grouped.items():
        others = [r for r in rows if r.column.path == path and r not in mine]
        name = " ".join([path, *_telling(mine, others)])
        told.append({"name": name, "count": len(mine), **dict(zip(("old", "new", "applied"), sides, strict=True))})
    return told


def _telling(mine: Sequence[Row], others: Sequence[Row]) -> list[str]:
    """The facet whose values none of the ``others`` has; where there is none, all in which some of them differ."""
    names = [f for f in text.TELLING if all(f in r.new.facets for r in (*mine, *others))]
    values = {f: sorted({str(r.new.facets[f]) for r in mine}) for f in names}
    theirs = {f: {str(r.new.facets[f]) for r in others} for f in names}
    apart = [f for f in names if others and not theirs[f] & set(values[f])]
    shown = apart[:1] or [f for f in names if not theirs[f] <= set(values[f])]
    return [f"{f}={'/'.join(values[f])}" for f in shown]


def _side(seen: Observation, *, shown: bool) -> str:
    """`good`, `good (split)`, `bad: raised`, `off: the path is not taken`, `absent`."""
    if seen.outcome is Outcome.ABSENT:
        return "absent"
    if seen.outcome is Outcome.NOT_EXERCISED:
        return "off: the path is not taken"
    way = f" ({speed.way(seen)})" if shown and seen.outcome is Outcome.COMPLETED else ""
    return seen.verdict.value + ("" if seen.verdict is Verdict.GOOD else f": {seen.reason.value}") + way


def why(report: Mapping[str, Any]) -> list[str]:
    """The reasons of the advice, the switch of a gate, and what is still missing."""
    given = report["recommendation"]
    if not given:
        return []
    switch = [f"the switch: {given['gate']['switch']}"] if given["gate"] and given["action"] == "gate" else []
    return [*given["because"], *switch, *(f"missing: {line}" for line in given["missing"])]


def speed_lines(found: Sequence[speed.Speed]) -> list[str]:
    """`fused → split, 3 cells: 1.52 times the time (0.412 → 0.626 ms a call)`"""
    return [
        f"{s.without} → {s.applied}, {cells(s.cells)}: {s.ratio:.2f} times the time"
        f" ({s.without_ms:.3f} → {s.applied_ms:.3f} ms a call; turns differ by up to {100 * s.spread:.0f} %)"
        for s in found
    ]


def lost_lines(proof: Proof | None) -> list[str]:
    """What goes with the action."""
    if proof is None:
        return []
    by_path: dict[str, list[Column]] = {}
    for row in proof.rows:
        gone = row.applied.outcome in (Outcome.ABSENT, Outcome.NOT_EXERCISED)
        if gone and row.new.outcome not in (Outcome.ABSENT, Outcome.NOT_EXERCISED):
            by_path.setdefault(row.column.path, []).append(row.column)
    return [f"path {path} is not taken any more in {cells(len(columns))}" for path, columns in sorted(by_path.items())]


def command(words: Sequence[str]) -> str:
    """Words as one line that a shell takes apart again into the same words; nothing that a terminal obeys is left."""
    return shlex.join(text.plain(word, 4096) for word in words)


def missing_runs(lines: Sequence[str]) -> str:
    """What a HOLD waits for: commands to copy, and sentences."""
    return f"### Runs that are missing\n\n{_fence(lines)}\n"
