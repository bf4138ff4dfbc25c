"""Surroundings shared by all tests: nothing of this machine's or person's git, home or cache gets in, or is touched."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported by any test

import pytest

BEGIN = 1_780_000_000  # seconds; the first commit of every repository made here
MINUTE = 60

HERMETIC = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_EDITOR": "false",
    "GIT_SEQUENCE_EDITOR": "false",
    "GIT_AUTHOR_NAME": "Ada Author",
    "GIT_AUTHOR_EMAIL": "ada@example.com",
    "GIT_COMMITTER_NAME": "Carl Committer",
    "GIT_COMMITTER_EMAIL": "carl@example.com",
    "GIT_AUTHOR_DATE": f"{BEGIN} +0000",
    "GIT_COMMITTER_DATE": f"{BEGIN} +0000",
    "EDITOR": "false",
    "VISUAL": "false",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(autouse=True)
def hermetic(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own HOME and cache, fixed identities and dates, no system or global configuration. Yields the HOME."""
    home = tmp_path_factory.mktemp("home")
    for name in [n for n in os.environ if n.startswith(("GIT_", "XDG_", "DSABISECT_"))]:
        monkeypatch.delenv(name)
    for name, value in HERMETIC.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DSABISECT_CACHE", str(home / "cache"))
    return home


class MadeRepo:
    """A real repository to be told what to do. Each commit is one minute younger than the one before."""

    def __init__(self, path: Path, object_format: str = "sha1") -> None:
        self.path = path
        self.minutes = 0
        path.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "main", f"--object-format={object_format}")

    def git(self, *args: str, data: str | None = None, check: bool = True) -> str:
        """Run git in the work tree; its stdout without the last newline."""
        date = f"{BEGIN + self.minutes * MINUTE} +0000"
        env = {**os.environ, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        command = ["git", "-c", "protocol.file.allow=always", *args]
        done = subprocess.run(command, cwd=self.path, env=env, input=data, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"git {' '.join(args)}: {done.stdout}{done.stderr}"
        return done.stdout.rstrip("\n")

    def write(self, files: Mapping[str, str | bytes | None]) -> None:
        """Write files into the work tree; None removes one."""
        for name, content in files.items():
            file = self.path / name
            if content is None:
                file.unlink()
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)

    def commit(self, title: str, files: Mapping[str, str | bytes | None] | None = None) -> str:
        """Commit everything in the work tree and give the sha; without ``files`` the commit may be empty."""
        self.minutes += 1
        self.write(files or {})
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "--allow-empty-message", "-m", title)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def make_repo(tmp_path: Path) -> Callable[..., MadeRepo]:
    """`make_repo()` or `make_repo(name, object_format)`: a new empty repository below the test's own folder."""

    def make(name: str = "repo", object_format: str = "sha1") -> MadeRepo:
        return MadeRepo(tmp_path / name, object_format)

    return make
