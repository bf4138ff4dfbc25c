"""Progress: a live line on a terminal, plain lines elsewhere, no colour where none is wanted, nothing with -q."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsabisect import terminal
from dsabisect.targets import demo

SCRIPT = """
import sys, time
from dsabisect import cli, terminal
with cli.watching(verbose={verbose}, quiet={quiet}) as told:
    terminal.doing(told, "measuring aaaaaaaaa (search) " + {title!r}, left=3)
    time.sleep(0.4)
    told("aaaaaaaaa  4 good · 2 bad (diverged)    1.0 s  " + {title!r})
    terminal.doing(told, "measuring bbbbbbbbb (search) b", left=2)
    time.sleep(0.4)
with terminal.paused(told):
    cli.tell(terminal.painted("CULPRIT   aaaaaaaaa x\\nADVICE    REVERT aaaaaaaaa\\n"))
"""
HOSTILE = "\x1b[2Jwiped\x07 " + "long " * 40
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(title: str = "a title", verbose: bool = False, quiet: bool = False, **env: str) -> str:
    """Everything that a terminal of 80 columns gets."""
    ours, theirs = pty.openpty()
    script = SCRIPT.format(title=title, verbose=verbose, quiet=quiet)
    values = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **env}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=theirs, stderr=theirs, stdin=theirs, env=values)
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    assert process.wait() == 0, shown.decode(errors="replace")
    return shown.decode()


def test_a_live_line_says_what_is_measured_and_what_is_left() -> None:
    shown = ESCAPE.sub("", on_terminal())
    assert "measuring aaaaaaaaa (search) a title" in shown
    assert "3 commits left" in shown
    assert re.search(r"2 commits left, about \d+ s", shown)
    assert "aaaaaaaaa  4 good · 2 bad (diverged)" in shown


def test_verdicts_and_the_answer_have_colour() -> None:
    shown = on_terminal()
    assert "\x1b[32mgood\x1b[0m" in shown
    assert "\x1b[1;31mbad\x1b[0m" in shown
    assert "\x1b[1;31mCULPRIT" in shown


def test_no_color_is_obeyed() -> None:
    shown = on_terminal(NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]m", shown)
    assert "CULPRIT   aaaaaaaaa x" in shown


@pytest.mark.parametrize("env", [{"TERM": "dumb"}])
def test_a_dumb_terminal_gets_plain_lines(env: dict[str, str]) -> None:
    shown = on_terminal(**env)
    assert "\x1b" not in shown
    assert "measuring" not in shown


def test_a_title_neither_speaks_to_the_terminal_nor_wraps() -> None:
    shown = on_terminal(title=HOSTILE)
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    for line in ESCAPE.sub("", shown).replace("\r", "\n").splitlines():
        assert len(line) <= 80, line


def test_verbose_says_what_is_going_on_in_plain_lines_and_quiet_nothing() -> None:
    loud = on_terminal(verbose=True).splitlines()
    assert "  measuring aaaaaaaaa (search) a title, 3 commits left" in loud
    assert on_terminal(quiet=True).replace("\r", "").startswith("\x1b[1;31mCULPRIT")


def test_a_plain_callable_is_enough_for_the_engine() -> None:
    said: list[str] = []
    terminal.doing(said.append, "measuring", left=1)
    assert said == []


def test_a_pipe_gets_plain_lines_and_quiet_leaves_stderr_empty(tmp_path: Path) -> None:
    history = demo.write_history(tmp_path / "repo")
    args = [sys.executable, "-m", "dsabisect", "check", history.tip, "--repo", str(history.path), "--target", "demo",
            "--suite", "smoke", "--path", "expanded", "--case", "logits-expanded-h32"]  # fmt: skip
    plain = subprocess.run([*args, "--out", "a", "-v"], cwd=tmp_path, capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    assert "\x1b" not in plain.stdout + plain.stderr
    assert f"  measuring {history.tip[:9]} (check)" in plain.stderr
    assert (tmp_path / "a" / "report.html").is_file()
    quiet = subprocess.run([*args, "--out", "b", "-q"], cwd=tmp_path, capture_output=True, text=True)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    both = subprocess.run([*args, "-q", "-v"], cwd=tmp_path, capture_output=True, text=True)
    assert both.returncode == 129
