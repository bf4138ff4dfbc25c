"""The wheel: all that is needed is in it, and it runs from elsewhere. The demo from it: scripts/check_release."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILT_FROM = ("dsabisect", "golden", "setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
TRIES = """
import json, sys
from pathlib import Path
import dsabisect
from dsabisect.outside import golden
from dsabisect.report import build, html, junit, text
from dsabisect.targets import demo
assert Path(dsabisect.__file__).is_relative_to(sys.argv[1]), dsabisect.__file__
assert golden.default_root() == Path(sys.argv[1]) / "dsabisect/golden"
golden.load()
empty = build.build([])
assert html.render(empty).startswith("<!doctype html>") and junit.render(empty) and text.render(empty)
demo.write_history(Path("repo"))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = subprocess.run(["git", "ls-files", "dsabisect", "golden"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    wanted = {
        n if n.startswith("dsabisect") else f"dsabisect/{n}" for n in tracked.stdout.splitlines() if (ROOT / n).exists()
    }
    assert wanted <= names, sorted(wanted - names)
    assert {name.split("/")[0] for name in names} == {"dsabisect", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "dsabisect/py.typed" in names


def test_it_runs_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = subprocess.run(
        [sys.executable, "-c", TRIES, str(site)], cwd=empty, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [p.name for p in empty.iterdir()] == ["repo"]


def test_fragments_of_the_changelog_have_a_kind() -> None:
    for fragment in (ROOT / "changelog.d").glob("*"):
        assert fragment.name == "README.md" or fragment.suffixes in (
            [".added", ".md"], [".changed", ".md"], [".fixed", ".md"], [".removed", ".md"],
        ), fragment.name  # fmt: skip
        assert fragment.read_text().strip()
