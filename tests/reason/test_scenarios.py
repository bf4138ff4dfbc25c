"""Whole searches as text: tests/scenarios/*.txt.

`DSABISECT_UPDATE=1 pytest tests/reason/test_scenarios.py` rewrites what stands below the dashes.

Above the line of dashes stands the history, one letter a commit, the good end first:
`.` good  `X` bad  `Y` bad, much smaller  `R` raises  `U` not repeatable  `-` absent  `?` asked to skip
`a`…`h` does not build, the letter is the error  `~` another path ran.
Below stands what a plain bisection said of each diverging column, step by step, then the whole timeline. A second
history line is a second column of the same commits; the one called `default` is the default selection.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_cells import cell, failed

from dsabisect.model import Column, Observation, Reason, Verdict
from dsabisect.reason import judge, search, timeline
from dsabisect.reason.plan import Plan
from dsabisect.reason.timeline import Kind, State

FOLDER = Path(__file__).resolve().parent.parent / "scenarios"
SCENARIOS = sorted(FOLDER.glob("*.txt"))
UPDATE = bool(os.environ.get("DSABISECT_UPDATE"))
RULE = "-" * 40
WINDOW = 4


def observed(letter: str, name: str, position: int) -> Observation:
    sha = f"{position:040x}"
    if letter in "abcdefgh":
        return cell("build_failed", case=name, sha=sha, failure=failed("BuildError", letter))
    answer = {
        ".": "good", "X": "diverged", "Y": "diverged", "R": "raised", "U": "nondeterministic", "-": "absent",
        "~": "not_exercised",
    }  # fmt: skip
    return cell(answer[letter], case=name, sha=sha, error=3e-3 if letter == "Y" else 0.41)


def transcript(histories: dict[str, str]) -> Iterator[str]:
    n = len(next(iter(histories.values())))
    at = lambda p: [observed(h[p], name, p) for name, h in histories.items()]  # noqa: E731
    ends = judge.endpoints(at(0), at(n - 1))
    yield f"ends: {ends.status.value}"
    yield from (line for line in (ends.hint, ends.remedy) if line)
    for column in ends.diverging:
        yield from [f"column {column.case}", *_one(histories[column.case], column.case)]
    yield from _timeline(histories)


def _one(history: str, name: str) -> Iterator[str]:
    last = len(history) - 1
    sought = judge.signature(observed(history[last], name, last))
    seen = {0: Verdict.GOOD, last: Verdict.BAD, **{p: Verdict.SKIP for p, c in enumerate(history) if c == "?"}}
    blocks = {p: Reason.ASKED.value for p, c in enumerate(history) if c == "?"}
    count = 0
    while (probe := search.next_probe(len(history), seen, blocks)) is not None:
        observation = observed(history[probe], name, probe)
        seen[probe], reason = judge.answer(observation, sought)
        if seen[probe] is Verdict.SKIP:
            blocks[probe] = judge.signature(observation)
        count += 1
        yield f"  probe {probe}: {seen[probe].value} ({reason.value})"
    found = search.suspects(len(history), seen)
    yield f"  {count} probes; suspects {found[0]}" + (f"..{found[-1]}" if len(found) > 1 else "")


def _timeline(histories: dict[str, str]) -> Iterator[str]:
    n = len(next(iter(histories.values())))
    columns = {name: Column(path=name, case="case") for name in histories}
    plan = Plan(keys=range(n), columns=tuple(columns.values()), window=WINDOW)
    for name, history in histories.items():
        marks = {p: State(kind=Kind.SKIP, signature=Reason.ASKED.value) for p, c in enumerate(history) if c == "?"}
        plan.series[columns[name]].update(marks)
    asked: list[int] = []
    while (probe := plan.next()) is not None:
        asked.append(probe.position)
        for column in probe.columns:
            letter = histories[column.path][probe.position]
            plan.take(probe.position, column, timeline.state_of(observed(letter, column.path, probe.position)))
    yield f"timeline: {len(asked)} probes: {' '.join(map(str, asked))}"
    for name, column in columns.items():
        forced = timeline.partners(column, plan.series, ["default"])
        for step in timeline.steps(plan.series[column]):
            yield f"  {name}: {timeline.kind_of(step, forced).value} in {step.after + 1}..{step.upto}"


def parse(text: str) -> tuple[str, dict[str, str], str]:
    """(everything above the rule, histories by name, everything below it)"""
    head, _, told = text.partition(RULE + "\n")
    rows = [line.partition(":") for line in head.splitlines() if line and not line.startswith("#")]
    return head, {name.strip(): history.strip() for name, _, history in rows}, told


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_scenario(file: Path) -> None:
    head, histories, told = parse(file.read_text())
    assert len({len(history) for history in histories.values()}) == 1, "the histories differ in length"
    seen = "".join(f"{line}\n" for line in transcript(histories))
    if UPDATE:
        file.write_text(f"{head}{RULE}\n{seen}")
    else:
        assert seen == told


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 8
