"""The report as a pure function of the journal's events: replaying a journal gives the report byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA_VERSION = 1


def build(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """report.json (schema: report.schema.json beside this file) from the events of a run, in their order."""
    of: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of.setdefault(event["event"], []).append({k: v for k, v in event.items() if k != "event"})
    run = of.get("run", [{}])[0]
    reach = of.get("range", [{"changes": [], "relevant": [], "note": ""}])[0]
    observations, transitions = of.get("observation", []), of.get("transition", [])
    end = of.get("end", [{"status": "unfinished", "exit_code": None, "finished": None, "seconds": None}])[-1]
    advice = of.get("recommendation", [None])[-1]
    return {
        "schema_version": SCHEMA_VERSION,
        "run": run,
        "range": {
            "commits": reach["changes"],
            "relevant": reach["relevant"],
            "evaluated": list(dict.fromkeys(o["sha"] for o in observations if o["timing"])),
            "skipped": [s["sha"] for s in of.get("skip", [])],
            "note": reach["note"],
        },
        "observations": observations,
        "transitions": transitions,
        "first_diverging": first_diverging(reach["changes"], transitions, observations),
        "recommendation": advice,
        "notes": [note["text"] for note in of.get("note", [])],
        "status": end["status"],
        "exit_code": end["exit_code"],
        "finished": end["finished"],
        "seconds": end["seconds"],
    }


def first_diverging(
    changes: Sequence[Mapping[str, Any]], transitions: Sequence[Mapping[str, Any]], observations: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The earliest single suspect; None when every transition is still a set."""
    position = {change["id"]: at for at, change in enumerate(changes)}
    single = [t for t in transitions if len(t["suspects"]) == 1 and t["kind"] in ("introduced", "exposed")]
    if not single:
        return None
    first = min(single, key=lambda t: (position.get(t["suspects"][0], 0), not t["confirmed"]))
    sha = first["suspects"][0]
    at = position.get(sha, 0)
    change = changes[at]
    shown = [o for o in observations if o["sha"] == sha and o["path"] == first["path"] and o["case"] == first["case"]]
    return {
        "sha": sha,
        "title": change["title"],
        "author": change["author"],
        "date": change["date"],
        "parent": changes[at - 1]["id"] if at else "",
        "column": f"{first['path']}/{first['case']}",
        "columns": [f"{t['path']}/{t['case']}" for t in single if t["suspects"][0] == sha],
        "reason": shown[-1]["reason"] if shown else "",
        "detail": shown[-1]["detail"] if shown else "",
        "confirmed": all(t["confirmed"] for t in single if t["suspects"][0] == sha),
    }


def dumps(report: Mapping[str, Any]) -> str:
    """Canonical text: sorted keys, two spaces, a newline at the end."""
    return json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
