"""docs/tutorial.md as a person would go through it: every command, in order, in an empty folder."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import test_docs

TUTORIAL = Path(__file__).resolve().parent.parent / "docs/tutorial.md"
BAD = "dsabisect check b3d60b277"  # the tutorial says that this one ends with 1
NAMES = ("dsabisect demo", "dsabisect report", "dsabisect check", "dsabisect propose")


@pytest.mark.slow
def test_every_command_of_the_tutorial_in_order(tmp_path: Path) -> None:
    lines = [
        line for page, mark, _, found in test_docs.blocks() if page == TUTORIAL and mark == "run by" for line in found
    ]
    assert {" ".join(line.split()[:2]) for line in lines} == set(NAMES)
    printed = ""
    for line in lines:
        argv = [sys.executable, "-m", "dsabisect", *shlex.split(line)[1:]]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == (1 if line.startswith(BAD) else 0), f"{line}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        printed += done.stdout
    shown = TUTORIAL.read_text().partition("```\nCULPRIT")[2].partition("```")[0]
    assert f"CULPRIT{shown}" in printed  # the lines that the page promises
    assert (tmp_path / "tour/run-fused/report.html").stat().st_size < 1_000_000
    assert (tmp_path / "fused.html").read_text().startswith("<!doctype html>")
    assert "The proof holds: 12 cells mended, none broken" in (tmp_path / "tour/run-fused/proposal/pull.md").read_text()
    refs = subprocess.run(["git", "-C", "tour/miniindexer", "branch"], cwd=tmp_path, capture_output=True, text=True)
    assert "dsabisect/gate-b3d60b277" in refs.stdout
    assert (tmp_path / "junit.xml").read_text().count("<testcase ") == 36
