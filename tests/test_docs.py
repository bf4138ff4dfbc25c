"""Commands in the documentation: those that need nothing are run, all others must at least parse."""

from __future__ import annotations

import os
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
RUNNABLE = {"targets", "cases", "golden", "cache", "doctor", "--help"}
BLOCK = re.compile(r"(?:^ *<!-- (?P<mark>[\w ]+): (?P<file>\S+) -->\n)?^ *```console\n(?P<body>.*?)^ *```", re.S | re.M)


def blocks() -> list[tuple[Path, str, str, list[str]]]:
    """(page, mark, file of the mark, commands of ours)"""
    found = []
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text()):
            joined = block["body"].replace("\\\n", " ")
            lines = [line.strip() for line in joined.splitlines() if "dsabisect " in line.split("#")[0]]
            found.append((page, block["mark"] or "", block["file"] or "", lines))
    return found


def commands() -> list[tuple[str, str]]:
    return [(page.name, line) for page, _, _, lines in blocks() for line in lines]


def workflow_commands() -> list[tuple[str, str]]:
    """Commands of ours inside the YAML examples."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```", page.read_text(), re.S | re.M):
            joined = re.sub(r"\\\n\s*", "", block)
            found += [
                (page.name, line.strip())
                for line in re.findall(r"(?:- |: |^ *)(dsabisect (?!$)[^|>\n]+)", joined, re.M)
            ]
    return [(page, line) for page, line in found if words_of(line)[0] in cli.commands]


def runs_here(line: str) -> bool:
    """Needs no file of the reader's and takes seconds."""
    words = words_of(line)
    quick = words[0] != "golden" or (words[1] in ("list", "show", "verify") and "--deep" not in words)
    return (words[0] in RUNNABLE and quick) or "--show-config" in line


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    return words[[w.rpartition("/")[2] for w in words].index("dsabisect") + 1 :]


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 5


def test_there_are_workflow_commands_to_check() -> None:
    assert {words_of(line)[0] for _, line in workflow_commands()} == {"run", "doctor", "report", "propose"}


@pytest.mark.parametrize(("page", "line"), [*commands(), *workflow_commands()])
def test_documented_command_parses(page: str, line: str) -> None:
    name, *rest = words_of(line)
    command = cli.commands[name]
    with click.Context(cli) as parent:
        if isinstance(command, click.Group):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(name, list(rest), parent=parent)


@pytest.mark.parametrize("line", sorted({line for _, line in commands() if runs_here(line)}))
def test_documented_command_runs(line: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsabisect", *words_of(line)], capture_output=True, text=True, cwd=tmp_path, timeout=180
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "mark", "file", "lines"), blocks(), ids=lambda value: getattr(value, "name", None))
def test_what_is_not_run_here_names_its_test_or_its_evidence(
    page: Path, mark: str, file: str, lines: list[str]
) -> None:
    if all(map(runs_here, lines)):
        return
    assert mark in ("run by", "evidence"), f"{page.name}: no mark before the block of {lines}"
    assert file.startswith("tests/" if mark == "run by" else "docs/evidence/")
    named = (ROOT / file).read_text()
    for line in lines:
        assert words_of(line)[0] in named, f"{file} says nothing of {line}"


def test_the_command_line_page_is_up_to_date(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "scripts/write_cli_docs"), str(tmp_path / "cli.md")]
    subprocess.run(argv, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (tmp_path / "cli.md").read_text() == (ROOT / "docs/cli.md").read_text(), "run scripts/write_cli_docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_named_in_docs_exist(page: Path) -> None:
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
        assert (page.parent / name).stat().st_size < 150_000, f"{page.name} shows {name}"


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_is_documented(name: str) -> None:
    assert any(re.search(rf"\b{name}\b", page.read_text()) for page in PAGES if page.name == "usage.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_docs_exist(page: Path) -> None:
    for name in re.findall(r"`((?:docs|scripts|dsabisect|golden|tests)/[\w./-]+\.?\w*)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
