"""The report as JUnit XML: a test suite a path, a test case a column, so that any CI shows it.

A column is judged at the newest commit that measured it: what the bad end says is what a nightly asks. Schema:
junit.xsd beside this file.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any

from dsabisect.report import text

Report = Mapping[str, Any]
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, section 2.2


def render(report: Report) -> str:
    root = ET.Element("testsuites", name="dsabisect")
    newest = _newest(report)
    paths = [p for p in report["run"]["paths"] if any(o["path"] == p for o in newest)]
    for path in [*paths, *sorted({o["path"] for o in newest} - set(paths))]:
        root.append(_suite(report, path, [o for o in newest if o["path"] == path]))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _newest(report: Report) -> list[Mapping[str, Any]]:
    """The last observation of each column at the newest commit that measured it."""
    position = {c["id"]: at for at, c in enumerate(report["range"]["commits"])}
    chosen: dict[str, Mapping[str, Any]] = {}
    for sha, row in sorted(text.latest(report["observations"]).items(), key=lambda item: position.get(item[0], -1)):
        del sha
        chosen.update(row)
    return [chosen[column] for column in sorted(chosen)]


def _suite(report: Report, path: str, cells: Sequence[Mapping[str, Any]]) -> ET.Element:
    counts = {
        "tests": len(cells),
        "failures": sum(o["verdict"] == "bad" for o in cells),
        "errors": 0,  # our own failures stop a run; they are never in a report
        "skipped": sum(_skipped(o) for o in cells),
    }
    suite = ET.Element("testsuite", name=_xml(f"dsabisect.{path}"), time=f"{sum(map(_seconds, cells)):.3f}")
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    properties = ET.SubElement(suite, "properties")
    run = report["run"]
    for name, value in (("target", run["target"]), ("device", run["device"]["name"]), ("arch", run["device"]["arch"]),
                        ("good", run["good"]), ("bad", run["bad"])):  # fmt: skip
        ET.SubElement(properties, "property", name=name, value=_xml(value))
    for o in cells:
        suite.append(_case(report, o))
    return suite


def _case(report: Report, o: Mapping[str, Any]) -> ET.Element:
    case = ET.Element(
        "testcase", name=_xml(o["case"]), classname=_xml(f"dsabisect.{o['path']}"), time=f"{_seconds(o):.3f}"
    )
    if o["verdict"] == "bad":
        failure = ET.SubElement(case, "failure", type=_xml(o["reason"]), message=_xml(o["detail"] or o["reason"]))
        failure.text = _xml("\n".join(_story(report, o)), limit=4000, lines=True)
    elif _skipped(o):
        ET.SubElement(case, "skipped", message=_xml(f"{o['reason']}: {o['detail']}" if o["detail"] else o["reason"]))
    return case


def _story(report: Report, o: Mapping[str, Any]) -> list[str]:
    """Where the column is bad, since when, what is advised, how to see it again."""
    column = f"{o['path']}/{o['case']}"
    titles = {c["id"]: c["title"] for c in report["range"]["commits"]}
    lines = [f"bad at {o['sha'][:12]} {titles.get(o['sha'], '')}: {o['detail'] or o['reason']}"]
    for t in report["transitions"]:
        if f"{t['path']}/{t['case']}" == column:
            shas = t["suspects"]
            who = f"{shas[0][:12]} {titles.get(shas[0], '')}" if len(shas) == 1 else f"one of {len(shas)} commits"
            lines.append(f"{t['kind']} by {who}{'' if t['confirmed'] else ' (not confirmed)'}")
    given = report["recommendation"]
    if given and column in given["columns"]:
        lines.append(f"advice: {text.advice_line(given)}")
    lines.append(f"see it again: {text.again(report, o['sha'], column)}")
    return lines


def _skipped(o: Mapping[str, Any]) -> bool:
    """Absent too: a test of what is not there has not passed."""
    return bool(o["verdict"] == "skip" or o["reason"] == "absent")


def _seconds(o: Mapping[str, Any]) -> float:
    return float(sum(o["timing"].values()))


def _xml(foreign: object, *, limit: int = 300, lines: bool = False) -> str:
    """Text that XML 1.0 can hold; :func:`text.plain` took out what an eye or a terminal would stumble over."""
    parts = str(foreign).split("\n") if lines else [str(foreign)]
    return FORBIDDEN.sub("?", "\n".join(text.plain(part, limit) for part in parts))
