"""The report as one HTML file that needs nothing else: no network, no other file, scripts only for comfort.

Three things keep foreign text inert, each enough by itself: Jinja2 escapes whatever is put in, what a terminal or an
eye would stumble over is taken out first (:func:`dsabisect.report.text.plain`), and the page's own Content Security
Policy runs no script but ours, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from dsabisect.report import changes, chart, page, text

Report = Mapping[str, Any]
MOST_STEPS, MOST_CHARTS = 12, 6  # steps with charts in one page, and charts of each; the numbers are in report.json


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dsabisect.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = text.plain
    return environment


def render(report: Report, *, logs: str = "logs") -> str:
    """The whole page. ``logs``: address of the run's folder of logs, as seen from where the page will lie."""
    environment = _environment()
    style, script = (Markup(_source(name)) for name in ("page.css", "page.js"))  # ours, never foreign
    steps = changes.steps(report)
    columns = page.columns(report)
    groups = page.matrix(report, text.groups(report), steps)
    full = page.matrix(report, {c: [c] for c in columns}, steps)
    return environment.get_template("page.html").render(
        report=report,
        run=report["run"],
        reach=report["range"],
        marked=text.marked(report),
        first=report["first_diverging"],
        given=report["recommendation"],
        answer=page.answer(report),
        sides=page.sides(report),
        suspects=page.suspects(report),
        steps=[(step, _charts(step, n)) for n, step in enumerate(steps)],
        titles={c["id"]: c["title"] for c in report["range"]["commits"]},
        groups=groups,
        full=full,
        data=_json(page.details(report, columns, full.rows)),
        commands=page.commands(report),
        logs=page.logs(report),
        log_root=logs.rstrip("/"),
        style=style,
        script=script,
        policy=_policy(style, script),
        chart=chart,
    )


def _charts(step: changes.Step, number: int) -> list[chart.Drawn]:
    return [chart.draw(c) for c in step.charts[:MOST_CHARTS]] if number < MOST_STEPS else []


def _source(name: str) -> str:
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _json(value: Any) -> Markup:
    """JSON that cannot end the element that it stands in."""
    raw = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return Markup(raw.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; script-src {_hash(script)}; style-src {_hash(style)}"
    )


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
