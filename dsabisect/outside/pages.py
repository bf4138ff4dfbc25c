"""The page of a run, report.html, beside its report.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsabisect.errors import DsabisectError
from dsabisect.outside import store


def write(run_dir: Path, report: Mapping[str, Any], said: Callable[[str], None]) -> None:
    """Write it and say where. It is made from the same document: that it cannot be written costs no verdict."""
    from dsabisect.report import html  # brings Jinja2, only when there is something to write

    try:
        store.write_text(run_dir / "report.html", html.render(report))
    except DsabisectError as error:
        said(f"dsabisect: no report.html: {error}")
    else:
        said(f"page:   {run_dir / 'report.html'}")
