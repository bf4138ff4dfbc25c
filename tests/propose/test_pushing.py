"""Push and pull request: real git, a stand-in for `gh`; nothing happens that was not asked for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MadeRepo

from dsabisect.errors import EnvironmentFault, RepositoryError, UsageError
from dsabisect.outside.gitrepo import GitRepo
from dsabisect.outside.pushing import Pushing

Make = Callable[..., MadeRepo]
BRANCH = "dsabisect/revert-1234567ab"


def made_with_remote(make_repo: Make, tmp_path: Path) -> tuple[MadeRepo, Path, str]:
    made = make_repo()
    sha = made.commit("begin", {"a": "1\n"})
    remote = tmp_path / "remote.git"
    subprocess.run(["git", "init", "-q", "--bare", str(remote)], check=True)
    made.git("remote", "add", "origin", str(remote))
    return made, remote, sha


def pushing(made: MadeRepo, tmp_path: Path, sha: str, remote: str = "origin", branch: str = BRANCH) -> Pushing:
    body = tmp_path / "pull.md"
    body.write_text("body\n")
    return Pushing(repo=GitRepo(made.path, tmp_path / "cache"), branch=branch, sha=sha, remote=remote,
                   title="-t $(touch hacked)", body=body)  # fmt: skip


def test_a_push_brings_one_branch(make_repo: Make, tmp_path: Path) -> None:
    made, remote, sha = made_with_remote(make_repo, tmp_path)
    wish = pushing(made, tmp_path, sha)
    commands = wish.check(pull_request=False)
    assert subprocess.run(["git", "-C", str(remote), "for-each-ref"], capture_output=True).stdout == b"", "not yet"
    for command in commands:
        wish.run(command)
    shown = subprocess.run(["git", "-C", str(remote), "for-each-ref"], capture_output=True, text=True).stdout
    assert shown == f"{sha} commit\trefs/heads/{BRANCH}\n"


@pytest.mark.parametrize("remote", ["nowhere", "--upload-pack=touch hacked", "ext::sh -c true", "../elsewhere", ""])
def test_only_a_remote_of_the_repository(make_repo: Make, tmp_path: Path, remote: str) -> None:
    made, _, sha = made_with_remote(make_repo, tmp_path)
    wish = pushing(made, tmp_path, sha, remote)
    if not remote:
        assert wish.check(pull_request=False) == []
        return
    with pytest.raises(UsageError, match="no remote"):
        wish.check(pull_request=False)


@pytest.mark.parametrize("branch", ["main", "master", "HEAD", "release", "dsabisect/main"])
def test_no_default_or_foreign_branch(make_repo: Make, tmp_path: Path, branch: str) -> None:
    made, _, sha = made_with_remote(make_repo, tmp_path)
    with pytest.raises(UsageError, match="not pushed to"):
        pushing(made, tmp_path, sha, branch=branch).check(pull_request=False)


def test_the_remotes_default_branch_is_refused_whatever_it_is_called(make_repo: Make, tmp_path: Path) -> None:
    made, _, sha = made_with_remote(make_repo, tmp_path)
    made.git("update-ref", f"refs/remotes/origin/{BRANCH}", sha)
    made.git("symbolic-ref", "refs/remotes/origin/HEAD", f"refs/remotes/origin/{BRANCH}")
    with pytest.raises(UsageError, match="not pushed to"):
        pushing(made, tmp_path, sha).check(pull_request=False)


def test_a_failed_push_is_one_line(make_repo: Make, tmp_path: Path) -> None:
    made, remote, sha = made_with_remote(make_repo, tmp_path)
    made.git("remote", "set-url", "origin", str(remote) + "-gone")
    wish = pushing(made, tmp_path, sha)
    with pytest.raises(RepositoryError, match="git failed"):
        wish.run(wish.check(pull_request=False)[0])


def test_pull_request_through_gh(make_repo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, sha = made_with_remote(make_repo, tmp_path)
    wish = pushing(made, tmp_path, sha)
    with pytest.raises(UsageError, match="--push"):
        pushing(made, tmp_path, sha, "").check(pull_request=True)
    tools = tmp_path / "tools"
    tools.mkdir()
    os.symlink(subprocess.run(["which", "git"], capture_output=True, text=True).stdout.strip(), tools / "git")
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(EnvironmentFault, match="gh"):
        wish.check(pull_request=True)
    gh = tools / "gh"
    gh.write_text(f'#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done > {tmp_path}/said\n')
    gh.chmod(0o755)
    commands = wish.check(pull_request=True)
    assert not (tmp_path / "said").exists(), "asking does nothing"
    wish.run(commands[1])
    said = (tmp_path / "said").read_text().splitlines()
    assert said == ["pr", "create", f"--head={BRANCH}", "--title=-t $(touch hacked)", f"--body-file={wish.body}"]
    assert not (made.path / "hacked").exists()
