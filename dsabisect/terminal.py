"""What a person sees while a run works: lines on stderr, and on a terminal one live line below them.

The engine knows only a callable that takes a line, :class:`Say`; :func:`doing` tells it what is going on right now,
where it listens. So the engine stays free of rich, and a log file gets plain lines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

Say = Callable[[str], None]
VERDICT_WORDS = {
    r"\bgood\b": "green", r"\bbad\b": "bold red", r"\bskip\b": "yellow",
}  # fmt: skip
REPORT_WORDS = {
    r"^CULPRIT.*|^DIVERGES": "bold red", r"^(?:SUSPECTS?|NOT) ": "bold yellow", r"^ADVICE.*": "bold",
    r"^CONFIRMED": "bold green", r"(?<=^[0-9a-f]{9}  )[ .Xx?\-]+(?=  \S)": "bold", r"(?m)^RESULT.*": "bold",
}  # fmt: skip


def doing(say: Say, what: str, *, left: int | None = None) -> None:
    """Tell what is going on now, and how many commits are still to be measured (None: not known)."""
    listens = getattr(say, "doing", None)
    if listens is not None:
        listens(what, left)


class Plain:
    """Lines only. ``loud`` (-v) also prints what is going on; ``still`` (-q) prints nothing."""

    def __init__(self, write: Say, *, loud: bool = False, still: bool = False) -> None:
        self._write, self._loud, self._still = write, loud, still

    def __call__(self, line: str) -> None:
        if not self._still:
            self._write(line)

    def doing(self, what: str, left: int | None) -> None:
        if self._loud and not self._still:
            self._write(f"  {what}{_left(left)}")


class Live:
    """rich's progress on a terminal: what is going on, since when, how many commits are left and for how long."""

    def __init__(self, stream: TextIO, clean: Callable[[str], str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = Console(file=stream, highlight=False, soft_wrap=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=12),
                   TextColumn("{task.fields[left]}", markup=False), TimeElapsedColumn())  # fmt: skip
        self._progress = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
        self._task = self._progress.add_task("getting ready", total=None, left="")
        self._clean, self._steps, self._began = clean, 0, time.monotonic()

    def __call__(self, line: str) -> None:
        from rich.text import Text

        text = Text(self._clean(line), no_wrap=True, overflow="ellipsis")
        for pattern, style in VERDICT_WORDS.items():
            text.highlight_regex(pattern, style)
        self._console.print(text)

    def doing(self, what: str, left: int | None) -> None:
        spent = time.monotonic() - self._began
        each = spent / self._steps if self._steps else None
        told = _left(left) + (f", about {_span(each * left)}" if each and left else "")
        room = max(20, self._console.width - 40)
        total = None if left is None else self._steps + left
        shown = self._clean(what)
        shown = shown if len(shown) <= room else shown[: room - 1] + "…"
        self._progress.update(self._task, description=shown, total=total, completed=self._steps, left=told.strip(" ,"))
        self._steps += 1

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()


@contextmanager
def progress(write: Say, clean: Callable[[str], str], *, verbose: bool = False, quiet: bool = False) -> Iterator[Any]:
    """The right thing for stderr. ``write``: prints one line; ``clean``: takes the power from foreign text."""
    if quiet or verbose or not _is_terminal(sys.stderr):
        yield Plain(write, loud=verbose, still=quiet)
        return
    live = Live(sys.stderr, clean)
    live.start()
    try:
        yield live
    finally:
        live.stop()


@contextmanager
def paused(say: Any) -> Iterator[None]:
    """Stop the live line while a result is printed to the same terminal."""
    live = say if isinstance(say, Live) else None
    if live:
        live.stop()
    try:
        yield
    finally:
        if live:
            live.start()


def painted(report: str) -> str:
    """The text report with colour where stdout is a terminal; NO_COLOR (https://no-color.org) leaves it as it is."""
    if not _is_terminal(sys.stdout) or os.environ.get("NO_COLOR"):
        return report
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, width=500, force_terminal=True)
    lines = []
    for line in report.splitlines():
        text = Text(line)
        for pattern, style in REPORT_WORDS.items():
            text.highlight_regex(pattern, style)
        with console.capture() as caught:
            console.print(text, end="", soft_wrap=True)
        lines.append(caught.get())
    return "\n".join(lines) + "\n"


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _left(left: int | None) -> str:
    return "" if left is None else f", {left} commit{'s' if left != 1 else ''} left"


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
