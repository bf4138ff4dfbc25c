"""Whole searches as text: tests/scenarios/*.txt.

`DSABISECT_UPDATE=1 pytest tests/reason/test_scenarios.py` rewrites what stands below the dashes.

Above the line of dashes stands the history, one letter a commit, the good end first:
`.` good  `X` bad  `Y` bad, much smaller  `R` raises  `U` not repeatable  `-` absent  `?` asked to skip
`a`…`h` does not build, the letter is the error  `~` another path ran.
Below stands what the search said, step by step. A second history line is a second column of the same commits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_cells import cell, failed

from dsabisect.model import Observation, Reason, Verdict
from dsabisect.reason import judge, search, timeline

FOLDER = Path(__file__).resolve().parent.parent / "scenarios"
SCENARIOS = sorted(FOLDER.glob("*.txt"))
UPDATE = bool(os.environ.get("DSABISECT_UPDATE"))
RULE = "-" * 40


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


def _one(history: str, name: str) -> Iterator[str]:
    last = len(history) - 1
    sought = judge.signature(observed(history[last], name, last))
    seen = {0: Verdict.GOOD, last: Verdict.BAD, **{p: Verdict.SKIP for p, c in enumerate(history) if c == "?"}}
    blocks = {p: Reason.ASKED.value for p, c in enumerate(history) if c == "?"}
    reasons = {p: observed(history[p], name, p).reason for p in (0, last)}
    count = 0
    while (probe := search.next_probe(len(history), seen, blocks)) is not None:
        observation = observed(history[probe], name, probe)
        seen[probe], reasons[probe] = judge.answer(observation, sought)
        if seen[probe] is Verdict.SKIP:
            blocks[probe] = judge.signature(observation)
        count += 1
        yield f"  probe {probe}: {seen[probe].value} ({reasons[probe].value})"
    found = search.suspects(len(history), seen)
    yield f"  {count} probes; suspects {found[0]}" + (f"..{found[-1]}" if len(found) > 1 else "")
    yield from (f"  {s.kind.value} in {s.after + 1}..{s.upto}" for s in timeline.transitions(seen, reasons))


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
