"""A push and a pull request, with the person's own git and `gh`, only when asked. The only place that uses a network.

Refused: a remote that is none, a branch that is not ours, and the remote's default branch.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dsabisect.errors import EnvironmentFault, RepositoryError, UsageError
from dsabisect.outside.gitrepo import GitRepo
from dsabisect.outside.workshop import BRANCH

REMOTE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
PROTECTED = ("main", "master", "HEAD")
SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Pushing:
    repo: GitRepo
    branch: str
    sha: str
    remote: str  # "" = no push
    title: str
    body: Path

    def check(self, *, pull_request: bool) -> list[list[str]]:
        """The commands, in order; nothing is done.

        Raises:
            UsageError: no such remote, a protected or default branch, a pull request without a push.
            EnvironmentFault: a pull request without `gh`.
        """
        if pull_request and not self.remote:
            raise UsageError("--pr needs --push REMOTE")
        if not self.remote:
            return []
        if not REMOTE.fullmatch(self.remote) or not self._ask("config", "--get", f"remote.{self.remote}.url"):
            raise UsageError(
                f"{self.remote!r} is no remote", where=str(self.repo.path), remedy="`git remote -v` lists them"
            )
        default = self._ask("symbolic-ref", "--short", f"refs/remotes/{self.remote}/HEAD")
        default = default.removeprefix(f"{self.remote}/")
        if not BRANCH.fullmatch(self.branch) or self.branch in (*PROTECTED, default):
            raise UsageError(f"{self.branch!r} is protected or no branch of ours: it is not pushed to")
        commands = [
            ["git", "-C", str(self.repo.path), "push", "--", self.remote, f"{self.sha}:refs/heads/{self.branch}"]
        ]
        if pull_request:
            if shutil.which("gh") is None:
                raise EnvironmentFault(
                    "a pull request needs `gh`", remedy="Install it, or open it by hand with pull.md"
                )
            commands.append(["gh", "pr", "create", f"--head={self.branch}", f"--title={self.title}",
                             f"--body-file={self.body}"])  # fmt: skip
        return commands

    def run(self, command: list[str]) -> None:
        """Run one of the commands of :meth:`check`.

        Raises:
            RepositoryError: it failed; the branch of the user's repository is there all the same.
        """
        try:
            done = subprocess.run(command, cwd=self.repo.path, capture_output=True, text=True, errors="replace",
                                  timeout=SECONDS, check=False, stdin=subprocess.DEVNULL)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RepositoryError(f"{command[0]} took over {SECONDS} s", where=str(self.repo.path)) from error
        if done.returncode != 0:
            told = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
            raise RepositoryError(f"{command[0]} failed: {told}", where=str(self.repo.path),
                                  remedy=f"The branch {self.branch} is in your repository")  # fmt: skip

    def _ask(self, *args: str) -> str:
        """One line of the user's own git, "" when it has none. Reads only."""
        git = shutil.which("git")
        if git is None:
            raise EnvironmentFault("git is not installed", remedy="Install git")
        done = subprocess.run([git, "-C", str(self.repo.path), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
