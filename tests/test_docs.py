"""Commands in the documentation: those that need nothing are run, all others must at least parse."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dsabisect.cli import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = {"targets", "cases", "golden", "doctor", "--help"}


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.S | re.M):
            joined = block.replace("\\\n", " ")
            found += [(page.name, line.strip()) for line in joined.splitlines() if "dsabisect " in line.split("#")[0]]
    return found


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    return words[[w.rpartition("/")[2] for w in words].index("dsabisect") + 1 :]


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 5


@pytest.mark.parametrize(("page", "line"), commands())
def test_documented_command_parses(page: str, line: str) -> None:
    name, *rest = words_of(line)
    command = cli.commands[name]
    with click.Context(cli) as parent:
        if isinstance(command, click.Group):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(name, list(rest), parent=parent)


def runnable(line: str) -> bool:
    """Needs no file of the reader's and takes seconds."""
    words = words_of(line)
    quick = words[0] != "golden" or (words[1] in ("list", "show", "verify") and "--deep" not in words)
    return words[0] in RUNNABLE and quick


@pytest.mark.parametrize("line", sorted({line for _, line in commands() if runnable(line)}))
def test_documented_command_runs(line: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsabisect", *words_of(line)], capture_output=True, text=True, cwd=tmp_path, timeout=180
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_is_documented(name: str) -> None:
    assert any(re.search(rf"\b{name}\b", page.read_text()) for page in PAGES if page.name == "usage.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_docs_exist(page: Path) -> None:
    for name in re.findall(r"`((?:docs|scripts|dsabisect|golden|tests)/[\w./-]+\.?\w*)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
