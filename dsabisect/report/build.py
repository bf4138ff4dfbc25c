"""The report as a pure function of the journal's events: replaying a journal gives the report byte for byte."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA_VERSION = 1
Json = dict[str, Any]
UNFINISHED: Json = {"status": "unfinished", "exit_code": None, "finished": None, "seconds": None}
NO_RANGE: Json = {"changes": [], "relevant": [], "note": "", "must_look": [], "window": 0}
NO_RUN: Json = {
    "tool_version": "", "repo": "", "target": "", "good": "", "bad": "", "device": {"name": "", "arch": ""},
    "paths": [], "suite": "", "environment": {}, "golden": {"root": "", "key": "", "cases": 0, "baselines": ""},
    "command": [], "settings": {}, "started": "",
}  # fmt: skip


def build(events: Sequence[Mapping[str, Any]]) -> Json:
    """report.json (schema: report.schema.json beside this file) from the events of a run, in their order.

    A resumed run concludes anew: transitions, advice, end, commits skipped and notes about the answer count only from
    the last ``range`` event on; what was noted of the machine and of measurements stays true.
    """
    of = _by_kind(events)
    concluded = _by_kind(events[_last_range(events) :])
    reach = {**NO_RANGE, **of.get("range", [NO_RANGE])[-1]}
    observations, transitions = of.get("observation", []), concluded.get("transition", [])
    advice = concluded.get("recommendation", [None])[-1]
    proposals = [p for p in concluded.get("proposal", []) if advice and p["change"] == advice["change"]]
    if proposals:
        advice = {**advice, "verified": proposals[-1]}
    end = concluded.get("end", [UNFINISHED])[-1]
    run = {**NO_RUN, **of.get("run", [{}])[0]}
    document = {
        "schema_version": SCHEMA_VERSION,
        "run": run,
        "range": {
            "commits": reach["changes"],
            "relevant": reach["relevant"],
            "evaluated": list(dict.fromkeys(o["sha"] for o in observations if o["timing"])),
            "must_look": reach["must_look"],
            "window": reach["window"],
            "skipped": list(dict.fromkeys(s["sha"] for s in concluded.get("skip", []))),
            "marked": marks(events),
            "note": reach["note"],
        },
        "observations": observations,
        "endpoints": endpoints(observations, run["good"], run["bad"]),
        "transitions": transitions,
        "first_diverging": first_diverging(reach["changes"], transitions, observations, advice),
        "recommendation": advice,
        "notes": notes(events),
        "timing": timing(observations),
        "status": end["status"],
        "exit_code": end["exit_code"],
        "finished": end["finished"],
        "seconds": end["seconds"],
    }
    return {key: _plain(value) for key, value in document.items()}


def _by_kind(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    of: dict[str, list[Any]] = {}
    for event in events:
        of.setdefault(event["event"], []).append({k: v for k, v in event.items() if k != "event"})
    return of


def _last_range(events: Sequence[Mapping[str, Any]]) -> int:
    return max((at for at, event in enumerate(events) if event["event"] == "range"), default=0)


def _plain(value: Any) -> Any:
    """JSON that every reader takes: no NaN or infinity (they become words), no half of a surrogate pair."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def notes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each once, in their order, without those about an answer that was given anew since."""
    last = _last_range(events)
    kept = (
        event["text"] for at, event in enumerate(events)
        if event["event"] == "note" and (at >= last or event.get("about") != "answer")
    )  # fmt: skip
    return list(dict.fromkeys(kept))


def marks(events: Sequence[Mapping[str, Any]]) -> list[Json]:
    """What a person said of commits, without what was taken back."""
    found: list[Json] = []
    for event in events:
        if event["event"] == "mark":
            found.append({k: event[k] for k in ("sha", "verdict", "column")})
        elif event["event"] == "undo" and found:
            found.pop()
    return found


# ---- parts --------------------------------------------------------------------------------------------------


def column_of(observation: Mapping[str, Any]) -> str:
    return f"{observation['path']}/{observation['case']}"


def endpoints(observations: Sequence[Mapping[str, Any]], good: str, bad: str) -> Json | None:
    """What both ends said, by column; None when they were not both measured (`check`, or a run cut short)."""
    measured = [o for o in observations if o["purpose"] == "endpoint"]
    ends = [{column_of(o): o for o in measured if o["sha"] == sha} for sha in (good, bad)]
    if not all(ends):
        return None
    sorts: dict[str, list[str]] = {"diverging": [], "bad_at_good_end": [], "untestable": []}
    for column in sorted(set(ends[0]) | set(ends[1])):
        old, new = (end[column]["verdict"] if column in end else "skip" for end in ends)
        if "skip" in (old, new):
            sorts["untestable"].append(column)
        elif old == "bad":
            sorts["bad_at_good_end"].append(column)
        elif new == "bad":
            sorts["diverging"].append(column)
    return {"good": _counts(good, ends[0]), "bad": _counts(bad, ends[1]), **sorts}


def _counts(sha: str, end: Mapping[str, Mapping[str, Any]]) -> Json:
    kinds = ["absent" if o["reason"] == "absent" else o["verdict"] for o in end.values()]
    return {"sha": sha, **{f"{kind}_cells": kinds.count(kind) for kind in ("good", "bad", "skip", "absent")}}


def timing(observations: Sequence[Mapping[str, Any]]) -> Json:
    """Cells that were measured, and seconds by part: checkout, build, start, kernels, compare, …"""
    parts: dict[str, float] = {}
    for observation in observations:
        for part, seconds in observation["timing"].items():
            parts[part] = parts.get(part, 0.0) + seconds
    cells = sum(1 for o in observations if o["timing"])
    return {"cells": cells, "seconds": {part: round(total, 6) for part, total in parts.items()}}


def first_diverging(
    changes: Sequence[Mapping[str, Any]],
    transitions: Sequence[Mapping[str, Any]],
    observations: Sequence[Mapping[str, Any]],
    advice: Mapping[str, Any] | None = None,
) -> Json | None:
    """The earliest change of verdict, None while that is still a set: a later single suspect is not the *first*.

    What the advice is about comes first, so that the headline and the advice never speak of two changes.
    """
    position = {change["id"]: at for at, change in enumerate(changes)}
    asked = set(advice["columns"]) if advice else set()
    found = [t for t in transitions if t["kind"] in ("introduced", "exposed")]
    found = [t for t in found if column_of(t) in asked] or found
    if not found:
        return None
    first = min(found, key=lambda t: [position.get(sha, len(changes)) for sha in t["suspects"]])
    if len(first["suspects"]) != 1 or first["suspects"][0] not in position:
        return None
    sha = first["suspects"][0]
    same = [t for t in found if t["suspects"] == first["suspects"]]
    runs = [o for o in observations if o["sha"] == sha and column_of(o) == column_of(first)]
    shown = [o for o in runs if o["verdict"] == "bad"] or runs  # where runs disagree, what fails is what is told
    change, at = changes[position[sha]], position[sha]
    return {
        "sha": sha,
        "title": change["title"],
        "author": change["author"],
        "date": change["date"],
        "parent": changes[at - 1]["id"] if at else "",
        "column": column_of(first),
        "columns": [column_of(t) for t in same],
        "reason": shown[-1]["reason"] if shown else "",
        "detail": shown[-1]["detail"] if shown else "",
        "confirmed": all(t["confirmed"] for t in same),
    }


def without_times(report: Mapping[str, Any]) -> Json:
    """The report without what differs between two runs that found the same: clocks, command line, names of logs.

    How many cells were measured stays: a run that was killed and resumed measures none of them twice.
    """
    moving = ("finished", "seconds")
    document = {key: value for key, value in report.items() if key not in moving}
    document["run"] = {k: v for k, v in report["run"].items() if k not in ("started", "command", "settings")}
    document["observations"] = [
        {k: v for k, v in observation.items() if k not in ("timing", "log", "speed")}
        for observation in report["observations"]
    ]
    document["timing"] = {"cells": report["timing"]["cells"]}
    return document


def dumps(report: Mapping[str, Any]) -> str:
    """Canonical text: sorted keys, two spaces, a newline at the end."""
    return json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
