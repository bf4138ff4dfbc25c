"""The proof of a golden set as tables: planted fault × data kind → what rejects it; legitimate difference → accepted.

Pure: takes cases and goldens, yields text. `dsabisect golden prove` prints it; docs/evidence keeps it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dsabisect.indexer import compare, controls, generate
from dsabisect.model import Case, Comparison, Number, Stage

Golden = Mapping[str, Tensor]


@dataclass(kw_only=True)
class Tally:
    """One row of a table: a fault or a difference, at one stage, with one data kind."""

    cases: int = 0
    rejected_by: Counter[str] = field(default_factory=Counter)  # name of the comparison → cases
    least: float = float("inf")  # smallest error of a row over its allowance, among the cases' worst rows
    most: float = 0.0
    overlap: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class Proof:
    faults: dict[tuple[str, str, str], Tally] = field(default_factory=lambda: defaultdict(Tally))  # stage, name, data
    differences: dict[tuple[str, str, str], Tally] = field(default_factory=lambda: defaultdict(Tally))

    @property
    def accepted_faults(self) -> list[tuple[str, str, str]]:
        return [key for key, tally in self.faults.items() if sum(tally.rejected_by.values()) != tally.cases]

    @property
    def false_alarms(self) -> list[tuple[str, str, str]]:
        return [key for key, tally in self.differences.items() if tally.rejected_by]

    @property
    def holds(self) -> bool:
        return bool(self.faults) and not self.accepted_faults and not self.false_alarms


def prove(
    cases: Iterable[Case], golden_of: Callable[[str], Golden],
    inputs_of: Callable[[Case], Mapping[str, Tensor]] = generate.inputs,
) -> Proof:  # fmt: skip
    """Plant every fault into, and make every legitimate difference of, every case."""
    proof = Proof()
    for case in cases:
        inputs, golden = inputs_of(case), golden_of(case.id)
        good = controls.right(case, inputs, golden)
        data = str(case.facets.get("data", "-"))
        for name, runs in controls.faults(case, inputs, golden, good):
            _count(proof.faults[case.stage.value, name, data], compare.compare(case, golden, runs))
        for name, outputs in controls.legitimate(case, inputs, golden, good):
            _count(proof.differences[case.stage.value, name, data], compare.compare(case, golden, [outputs]))
    return proof


def _count(tally: Tally, said: Sequence[Comparison]) -> None:
    tally.cases += 1
    failed = next((c.name for c in said if not c.ok), "")
    if failed:
        tally.rejected_by[failed] += 1
    by_name = {c.name: c for c in said}
    if "diff" in by_name:
        error = _number(by_name["diff"].metrics["max"])
        tally.least, tally.most = min(tally.least, error), max(tally.most, error)
    if "overlap" in by_name:
        tally.overlap.append(_number(by_name["overlap"].metrics["min"]))


def _number(value: Number | str) -> float:
    return float(value)  # "nan" and "inf" too: compare.py writes them as words


def table(rows: Mapping[tuple[str, str, str], Tally], wanted: str) -> list[str]:
    """Markdown, one line a key; ``wanted`` "rejected" or "accepted"."""
    lines = [
        f"| stage | what | data | cases | {wanted} | by | row error, worst row | overlap, worst row |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = {stage.value: place for place, stage in enumerate(Stage)}
    for (stage, name, data), tally in sorted(rows.items(), key=lambda item: (order[item[0][0]], *item[0][1:])):
        found = sum(tally.rejected_by.values())
        share = found if wanted == "rejected" else tally.cases - found
        by = ", ".join(f"{rule} {n}" for rule, n in sorted(tally.rejected_by.items())) or "-"
        error = "-" if tally.least > tally.most else _span(tally.least, tally.most)
        overlap = _span(min(tally.overlap), max(tally.overlap)) if tally.overlap else "-"
        lines.append(f"| {stage} | {name} | {data} | {tally.cases} | {share} | {by} | {error} | {overlap} |")
    return lines


def _span(low: float, high: float) -> str:
    return f"{low:.2g}" if f"{low:.2g}" == f"{high:.2g}" else f"{low:.2g} … {high:.2g}"


def text(proof: Proof) -> str:
    """Both tables and what they come to."""
    faults, planted = len({k[:2] for k in proof.faults}), sum(t.cases for t in proof.faults.values())
    kinds, made = len({k[:2] for k in proof.differences}), sum(t.cases for t in proof.differences.values())
    missed = sum(t.cases - sum(t.rejected_by.values()) for t in proof.faults.values())
    alarms = sum(sum(t.rejected_by.values()) for t in proof.differences.values())
    return "\n".join([
        "## Planted faults", "", *table(proof.faults, "rejected"), "",
        "## Legitimate differences", "", *table(proof.differences, "accepted"), "",
        f"{faults} faults (by stage), planted {planted} times: {planted - missed} rejected, {missed} accepted.",
        f"{kinds} legitimate differences (by stage), made {made} times: {made - alarms} accepted, {alarms} rejected.",
    ])  # fmt: skip
