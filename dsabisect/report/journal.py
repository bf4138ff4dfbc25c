"""A journal as lines for a person: what was measured, in order, and what was said by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from dsabisect.report.text import plain

Event = Mapping[str, Any]


def render(events: Sequence[Event]) -> str:
    """One line an evaluation, mark, note or answer."""
    titles = {c["id"]: c["title"] for e in events if e["event"] == "range" for c in e["changes"]}
    return "".join(f"{plain(line)}\n" for line in _lines(events, titles))


def _lines(events: Sequence[Event], titles: Mapping[str, str]) -> Iterator[str]:
    for kind, group in groupby(events, key=_of_one_evaluation):
        some = list(group)
        first = some[0]
        if kind[0] == "observation":
            turn = f" {first['turn']}" if first.get("turn") else ""
            yield f"{first['purpose'] + turn:<10} {first['sha'][:9]}  {_counts(some)}  {titles.get(first['sha'], '')}"
        else:
            yield from filter(None, (_line(event) for event in some))


def _of_one_evaluation(event: Event) -> tuple[str, ...]:
    if event["event"] != "observation":
        return (event["event"],)
    return ("observation", event["purpose"], event["sha"], str(event.get("turn", 0)))


def _counts(observations: Sequence[Event]) -> str:
    counts = Counter(f"{o['verdict']}{_why(o)}" for o in observations)
    known = "" if any(o.get("source", "measured") == "measured" for o in observations) else " (known)"
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) + known


def _why(observation: Event) -> str:
    return "" if observation["reason"] == "matched" else f" ({observation['reason']})"


def _line(event: Event) -> str:
    kind = event["event"]
    if kind == "run":
        return f"run        {event['target']} {event['good'][:9]}..{event['bad'][:9]} on {event['device']['name']}"
    if kind == "mark":
        return f"mark       {event['sha'][:9]}  {event['verdict']} {event['column']}".rstrip()
    if kind == "transition":
        sure = "confirmed" if event["confirmed"] else f"{len(event['suspects'])} suspect(s)"
        return f"{event['kind']:<10} {event['suspects'][-1][:9]}  {event['path']}/{event['case']}  {sure}"
    if kind == "recommendation":
        return f"advice     {event['action']} {event['change'][:9]}".rstrip()
    if kind == "end":
        return f"end        {event['status']} (exit code {event['exit_code']})"
    return {"undo": "undo", "note": f"note       {event.get('text', '')}"}.get(kind, "")
