"""Files of settings: what they may say, what they must not, and that every mistake names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsabisect.errors import UsageError
from dsabisect.outside import settings

EXAMPLE = (
    "[other]\nx = 1\n[dsabisect]\ntarget = demo\npath =\n    split\n    fused\nmax_evals = 30\nbuild-env = CC=a b\n"
)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    return tmp_path


def test_toml(repo: Path) -> None:
    text = 'target = "demo"\npath = ["split", "fused"]\nskip = "HEAD~3"\njobs = 2\nmemory = 1.5\n'
    (repo / "dsabisect.toml").write_text(text + 'build-env = {CC = "a b"}\n')
    found = settings.load(repo)
    assert found.file == repo / "dsabisect.toml"
    assert found.values == {
        "target": "demo", "path": ["split", "fused"], "skip": ["HEAD~3"], "jobs": "2", "memory": "1.5",
        "build-env": ["CC=a b"],
    }  # fmt: skip


def test_setup_cfg_and_from_a_folder_below(repo: Path) -> None:
    (repo / "setup.cfg").write_text("[DEFAULT]\nmood = fine\n" + EXAMPLE)
    below = repo / "a" / "b"
    below.mkdir(parents=True)
    found = settings.load(below)
    assert found.file == repo / "setup.cfg"
    assert found.values == {"target": "demo", "path": ["split", "fused"], "max-evals": "30", "build-env": ["CC=a b"]}


def test_the_file_of_its_own_comes_before_setup_cfg(repo: Path) -> None:
    (repo / "setup.cfg").write_text(EXAMPLE)
    (repo / "dsabisect.toml").write_text('suite = "smoke"\n')
    assert settings.load(repo).values == {"suite": "smoke"}


def test_nothing_to_read(repo: Path, tmp_path: Path) -> None:
    (repo / "setup.cfg").write_text("[metadata]\nname = x\n")
    assert settings.load(repo) == settings.Settings()
    bare = tmp_path / "x.git"
    bare.mkdir()
    (bare / "dsabisect.toml").write_text('target = "demo"\n')
    (repo / ".git").rmdir()
    assert settings.load(bare) == settings.Settings()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("dsabisect.toml", "a b", "not TOML"),
        ("dsabisect.toml", 'golden = "x"', "judged by"),
        ("dsabisect.toml", 'python = "x"', "run by"),
        ("dsabisect.toml", 'out = "x"', "unknown setting 'out'"),
        ("dsabisect.toml", "jobs = true", "wrong kind"),
        ("dsabisect.toml", "path = [1]", "wrong kind"),
        ("dsabisect.toml", "[target]\nx = 1", "wrong kind"),
        ("setup.cfg", "[dsabisect\n", "cannot be parsed"),
        ("setup.cfg", "[dsabisect]\ngolden = x\n", "judged by"),
        ("setup.cfg", "\udcff", "cannot be read"),
    ],
)
def test_mistakes_name_the_file(repo: Path, name: str, text: str, words: str) -> None:
    (repo / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=words) as caught:
        settings.load(repo)
    assert caught.value.where == str(repo / name)
    assert caught.value.remedy
