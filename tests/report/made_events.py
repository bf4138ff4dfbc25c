"""Journals made by hand: what the engine would have written, without running anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dsabisect.model import (
    Action,
    Change,
    Comparison,
    Facet,
    Failure,
    Gate,
    Observation,
    Outcome,
    Reason,
    Recommendation,
    Stage,
    Transition,
    TransitionKind,
    Verdict,
    to_json,
)  # fmt: skip

Event = dict[str, Any]
ROPES = ("neox", "interleaved")


def sha(position: int) -> str:
    return f"{position + 1:x}".rjust(2, "a") * 20


def change(position: int, title: str = "", author: str = "Ada Author") -> Change:
    date = f"2026-05-{position + 1:02}T10:00:00+00:00"
    return Change(id=sha(position), title=title or f"Change number {position}", author=author, date=date)


def observation(position: int, answer: str, path: str, rope: str, purpose: str = "search", **more: Any) -> Observation:
    """``answer``: good, bad, absent, raised or skip."""
    outcome, verdict, reason, detail = {
        "good": (Outcome.COMPLETED, Verdict.GOOD, Reason.MATCHED, "end_to_end: worst row 0.00084"),
        "bad": (Outcome.COMPLETED, Verdict.BAD, Reason.DIVERGED, "end_to_end diff: 0.41 > 0.0021 allowed (row 3)"),
        "raised": (Outcome.RAISED, Verdict.BAD, Reason.RAISED, "RuntimeError: The size of tensor a (6) must match"),
        "absent": (Outcome.ABSENT, Verdict.GOOD, Reason.ABSENT, ""),
        "skip": (Outcome.BUILD_FAILED, Verdict.SKIP, Reason.BUILD_FAILED, "x.cu: error"),
    }[answer]
    comparison = Comparison(
        stage=Stage.END_TO_END, name="diff", ok=answer == "good", metrics={"max": 0.41}, worst_at={"row": 3},
        tolerance={"max": 0.0021},
    )  # fmt: skip
    raised = Failure(type="RuntimeError", message=detail, signature="RuntimeError: size (N)")
    facets: dict[str, Facet] = {"rope": rope, "heads": 64, "arch": "sm90"}
    given: dict[str, Any] = {
        "comparisons": (comparison,) if outcome is Outcome.COMPLETED else (),
        "failure": raised if answer == "raised" else None,
        "detail": detail, "timing": {"run": 0.25, "compare": 0.05}, "log": f"measure/{position}.log", **more,
    }  # fmt: skip
    return Observation(
        sha=sha(position), build=f"build{position}", path=path, case=f"e2e-{rope}", outcome=outcome, verdict=verdict,
        reason=reason, facets=facets, purpose=purpose, **given,
    )  # fmt: skip


def event(kind: str, value: Any) -> Event:
    return json.loads(json.dumps({"event": kind, **to_json(value)}))  # as it comes back from the journal


def begin(good: int = 0, bad: int = 9) -> Event:
    return event("run", {
        "tool_version": "0.1", "repo": "/repo", "target": "demo", "good": sha(good), "bad": sha(bad),
        "device": {"name": "cuda:0", "arch": "sm90"}, "paths": ["split", "fused"], "suite": "smoke",
        "environment": {"torch": "2.13", "arch": "sm90"}, "golden": {"root": "/golden", "key": "f" * 64, "cases": 2},
        "command": ["run", "--target", "demo"], "started": "2026-06-01T00:00:00+00:00",
    })  # fmt: skip


def reach(changes: Sequence[Change]) -> Event:
    return event("range", {"changes": changes, "relevant": [c.id for c in changes[::2]], "note": ""})


def end(status: str = "first diverging change confirmed", code: int | None = 1) -> Event:
    finished = "2026-06-01T00:10:00+00:00"
    return event("end", {"status": status, "exit_code": code, "finished": finished, "seconds": 61.25})


def row(position: int, fused: dict[str, str], purpose: str = "search") -> list[Event]:
    """split is good throughout; ``fused``: answer by rope."""
    cells = [observation(position, "good", "split", rope, purpose) for rope in ROPES]
    cells += [observation(position, fused[rope], "fused", rope, purpose) for rope in ROPES]
    return [event("observation", cell) for cell in cells]


ABSENT = dict.fromkeys(ROPES, "absent")
BROKEN = {"neox": "bad", "interleaved": "good"}


def transition(suspects: Sequence[int], path: str = "fused", rope: str = "neox", confirmed: bool = True) -> Transition:
    return Transition(
        path=path, case=f"e2e-{rope}", kind=TransitionKind.INTRODUCED, good=sha(suspects[0] - 1), bad=sha(suspects[-1]),
        suspects=tuple(sha(s) for s in suspects), confirmed=confirmed,
    )  # fmt: skip


def advised(recommendation: Recommendation, *columns: str) -> Event:
    return event("recommendation", {**to_json(recommendation), "columns": list(columns)})


def gate_story(title: str = "Fused prologue (#27705)", author: str = "Ada Author") -> list[Event]:
    """Ten commits; number 5 adds the fused path, wrong under NeoX."""
    changes = [change(p) for p in range(10)]
    changes[5] = change(5, title, author)
    gate = Gate(
        predicate={"rope": "neox"}, switch="FUSION", stays_on=("fused for rope = interleaved",),
        goes_off=("fused for rope = neox",),
    )  # fmt: skip
    because = ("1 cell that is good at the parent is bad here", "path split: 2 of 2 cells good")
    missing = ("only sm90 was run",)
    advice = Recommendation(action=Action.GATE, change=sha(5), gate=gate, because=because, missing=missing)
    return [
        begin(), reach(changes),
        *row(0, ABSENT, "endpoint"), *row(9, BROKEN, "endpoint"), *row(4, ABSENT), *row(7, BROKEN),
        *row(5, BROKEN),
        *(e for _ in range(2) for e in (*row(4, ABSENT, "confirm"), *row(5, BROKEN, "confirm"))),
        event("transition", transition([5])), advised(advice, "fused/e2e-neox"),
        event("note", {"text": "a note"}), event("note", {"text": "a note"}), end(),
    ]  # fmt: skip


def set_story() -> list[Event]:
    """Numbers 4 to 6 could not be built: one of four."""
    advice = Recommendation(action=Action.HOLD, because=("any of 4 commits",), missing=("make one testable",))
    return [
        begin(), reach([change(p) for p in range(10)]), event("skip", {"sha": sha(5), "reason": "asked"}),
        *row(0, ABSENT, "endpoint"), *row(9, BROKEN, "endpoint"), *row(3, ABSENT),
        *row(4, dict.fromkeys(ROPES, "skip")), *row(7, BROKEN),
        event("transition", transition([4, 5, 6, 7], confirmed=False)),
        event("transition", transition([9], "split", confirmed=True)),
        advised(advice, "fused/e2e-neox"), end("narrowed to 4 suspects", 2),
    ]  # fmt: skip


def check_story() -> list[Event]:
    """`check` of one commit."""
    return [begin(), reach([change(9)]), *row(9, BROKEN, "check"), end("bad", 1)]


def nothing_story() -> list[Event]:
    advice = Recommendation(action=Action.NONE, because=("neither end is bad in 4 columns",))
    return [begin(), reach([change(p) for p in range(10)]), *row(0, ABSENT, "endpoint"),
            *row(9, dict.fromkeys(ROPES, "good"), "endpoint"), advised(advice), end("nothing diverges", 0)]  # fmt: skip


def timeline_story() -> list[Event]:
    """Number 2 adds fused, wrong under NeoX; 4 turns it off by default, 6 on again, 8 gates it."""

    def cells(position: int, fused: dict[str, str], default: dict[str, str]) -> list[Event]:
        more = [event("observation", observation(position, default[rope], "default", rope)) for rope in ROPES]
        return [*row(position, fused), *more]

    good = dict.fromkeys(ROPES, "good")
    series = [(0, ABSENT, good), (2, BROKEN, BROKEN), (4, BROKEN, good), (6, BROKEN, BROKEN), (8, good, good)]
    kinds = [(2, "introduced", "fused"), (2, "introduced", "default"), (4, "masked", "default"),
             (6, "exposed", "default"), (8, "fixed", "default"), (8, "gated", "fused")]  # fmt: skip
    told = []
    for at, kind, path in kinds:
        ends = (at - 2, at) if at in (2, 6) else (at, at - 2)  # good, bad
        named = {"kind": kind, "good": sha(ends[0]), "bad": sha(ends[1])}
        told.append(event("transition", {**to_json(transition([at], path)), **named}))
    advice = Recommendation(action=Action.REVERT, change=sha(2), because=("no switch",))
    return [begin(), reach([change(p) for p in range(10)]), *(e for each in series for e in cells(*each)), *told,
            advised(advice, "fused/e2e-neox"), end()]  # fmt: skip


def large_story(commits: int = 100, columns: int = 200) -> list[Event]:
    """The size that a page has to bear: every cell measured, half of them bad, every detail another."""
    changes = [Change(id=f"{p + 1:040x}", title=f"Change {p}: a title of the usual length, neither short nor long",
                      author="Ada Author", date="2026-05-01T10:00:00+00:00") for p in range(commits)]  # fmt: skip
    half, events = commits // 2, [begin(), reach(changes)]
    for at, each in enumerate(changes):
        for column in range(columns):
            path, case = ("split", "fused", "native", "default")[column % 4], f"e2e-neox-h64-verify-n{column:03}-causal"
            bad = at >= half and column % 2
            cell = observation(0, "bad" if bad else "good", path, "neox", log=f"measure/{at:020x}-{column % 4:03}.log")
            value = 0.3 + (at * columns + column) / 1e5
            detail = f"end_to_end diff: {value:.5f} > 0.0021 allowed (row {column}, sequence {at}, position {at * 3})"
            events.append(event("observation", {**to_json(cell), "sha": each.id, "case": case,
                                                "detail": detail if bad else f"worst row {value}"}))  # fmt: skip
    for column in range(1, columns, 2):
        path, case = ("split", "fused", "native", "default")[column % 4], f"e2e-neox-h64-verify-n{column:03}-causal"
        events.append(event("transition", Transition(
            path=path, case=case, kind=TransitionKind.INTRODUCED, good=changes[half - 1].id, bad=changes[half].id,
            suspects=(changes[half].id,), confirmed=True)))  # fmt: skip
    return [*events, end()]


STORIES = {
    "gate": gate_story,
    "set": set_story,
    "check": check_story,
    "nothing": nothing_story,
    "timeline": timeline_story,
}
