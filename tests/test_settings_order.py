"""A file of the repository, then the environment, then options; shown, saved with the run, and completed in a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsabisect.targets import demo

DSABISECT = (sys.executable, "-m", "dsabisect")


def call(*args: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [*DSABISECT, *map(str, args)]
    return subprocess.run(argv, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """name → (value, source)"""
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    return {row[0]: (" ".join(row[1:-1]), row[-1]) for row in rows}


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    repo = tmp_path / "repo"
    (repo / ".git").mkdir(parents=True)
    (repo / "dsabisect.toml").write_text('target = "demo"\nsuite = "smoke"\ndevice = "cuda:3"\npath = ["a", "b"]\n')
    return repo


def test_each_place_beats_the_one_before(repo: Path, tmp_path: Path) -> None:
    env = {"DSABISECT_SUITE": "full", "DSABISECT_DEVICE": "cuda:1", "DSABISECT_SKIP": "x y"}
    found = shown(call("run", "--repo", repo, "--device", "cpu", "--show-config", cwd=tmp_path, **env))
    assert found["target"] == ("demo", "file")
    assert found["path"] == ("a b", "file")
    assert found["suite"] == ("full", "environment")
    assert found["skip"] == ("x y", "environment")
    assert found["device"] == ("cpu", "option")
    assert found["memory"] == ("8.0", "default")
    assert found["good"] == ("-", "default")


def test_the_repository_may_be_named_by_the_environment_or_be_here(repo: Path, tmp_path: Path) -> None:
    assert shown(call("check", "--show-config", cwd=tmp_path, DSABISECT_REPO=str(repo)))["target"] == ("demo", "file")
    assert shown(call("check", "--show-config", cwd=repo))["target"] == ("demo", "file")
    assert shown(call("check", "--show-config", cwd=tmp_path))["target"] == ("-", "default")


@pytest.mark.parametrize(
    ("line", "env", "words"),
    [
        ("jobs = 0", {}, ("--jobs", "it comes from", "dsabisect.toml")),
        ("", {"DSABISECT_JOBS": "many"}, ("--jobs", "it comes from the environment variable DSABISECT_JOBS")),
        ("", {"DSABISECT_MAX_MINUTES": "nan"}, ("--max-minutes", "not a finite number", "DSABISECT_MAX_MINUTES")),
        ("", {"DSABISECT_CELL_SECONDS": "inf"}, ("--cell-seconds", "not a finite number")),
        ("", {"DSABISECT_MEMORY": "-1"}, ("--memory", "DSABISECT_MEMORY")),
        ("", {"DSABISECT_MAX_EVALS": "0"}, ("--max-evals", "DSABISECT_MAX_EVALS")),
        ("max-minutes = nan", {}, ("--max-minutes", "not a finite number", "dsabisect.toml")),
        ('golden = "g"', {}, ("must not choose", "dsabisect.toml")),
    ],
)
def test_a_bad_value_names_its_source(repo: Path, line: str, env: dict[str, str], words: tuple[str, ...]) -> None:
    file = repo / "dsabisect.toml"
    file.write_text(file.read_text() + line + "\n")
    done = call("run", "--repo", repo, "--good", "a", "--bad", "b", cwd=repo, **env)
    assert done.returncode == 129
    assert all(word in done.stderr for word in words), done.stderr


def test_a_misspelt_variable_is_named(repo: Path) -> None:
    done = call(
        "check", "HEAD", "--repo", repo, "--target", "none", cwd=repo, DSABISECT_DEVISE="cuda:0", DSABISECT_X="1"
    )
    assert "DSABISECT_DEVISE is set and means nothing: DSABISECT_DEVICE does" in done.stderr
    assert "DSABISECT_X is set and means nothing\n" in done.stderr
    plain = call("check", "HEAD", "--repo", repo, "--target", "none", cwd=repo, DSABISECT_DEVICE="cpu")
    assert "means nothing" not in plain.stderr


def test_what_is_missing_is_still_asked_for(tmp_path: Path) -> None:
    for args, name in ((("run",), "--target"), (("run", "--target", "demo"), "--good"), (("check",), "--target")):
        done = call(*args, cwd=tmp_path)
        assert done.returncode == 129
        assert f"Missing option '{name}'" in done.stderr


def test_the_settings_are_saved_with_the_run(tmp_path: Path) -> None:
    history = demo.write_history(tmp_path / "repo")
    lines = ('target = "demo"', 'path = ["expanded"]', 'case = "logits-expanded-h32"')
    (history.path / "dsabisect.toml").write_text("\n".join(lines))
    done = call(
        "check", history.tip, "--repo", history.path, "--out", "r", "--json", cwd=tmp_path, DSABISECT_SUITE="smoke"
    )
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["run"]
    assert run["settings"]["path"] == {"value": ["expanded"], "source": "file"}
    assert run["settings"]["suite"] == {"value": "smoke", "source": "environment"}
    assert run["settings"]["repo"]["source"] == "option"
    assert run["settings"]["device"] == {"value": "cpu", "source": "default"}
    assert run["paths"] == ["expanded"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("dsabisect re", "report"), ("dsabisect run --target s", "sglang"), ("dsabisect run --suite d", "default")],
)
def test_completion(tmp_path: Path, words: str, wanted: str) -> None:
    env = {"_DSABISECT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert f"plain,{wanted}" in call(cwd=tmp_path, **env).stdout.splitlines()


def test_completion_scripts_are_printed(tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        done = call(cwd=tmp_path, _DSABISECT_COMPLETE=f"{shell}_source")
        assert "_DSABISECT_COMPLETE" in done.stdout
