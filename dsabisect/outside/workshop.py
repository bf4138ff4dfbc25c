"""A private repository in which proposed commits are made, and the one way by which a branch gets out of it.

The user's repository is borrowed from (see gitrepo.py), so a merge or a commit here writes its objects into the
workshop alone. Only :meth:`Workshop.publish` writes to the user's repository: the objects of one commit, and one new
ref below `refs/heads/dsabisect/`. No work tree and no index of the user's is used.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsabisect.errors import EnvironmentFault, RepositoryError, UsageError
from dsabisect.outside.gitrepo import REGULAR, GitRepo
from dsabisect.outside.gitrepo import _git as run_git

WHO = "dsabisect <dsabisect@invalid>"  # `git commit --amend --reset-author` makes it the person's own
BRANCH = re.compile(r"dsabisect/[a-z]+(?:-[a-z]+)*-[0-9a-f]{7,64}")


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A three-way merge of trees. With conflicts the tree holds files with conflict markers."""

    tree: str
    conflicts: tuple[str, ...]  # paths


class Workshop:
    """Makes trees and commits on top of ``user``'s history. ``folder`` is below the run folder."""

    def __init__(self, user: GitRepo, folder: Path) -> None:
        """Raises StoreError when ``folder`` cannot be written."""
        self.user = user
        self.folder = folder
        self._borrowing = GitRepo(user.git_dir, folder / "objects")
        self.git_dir = self._borrowing.mirror
        self.repo = GitRepo(self.git_dir, folder / "reading")  # reads the user's commits and the proposed ones

    # ---- trees and commits -------------------------------------------------------------------------------

    def tree_of(self, sha: str) -> str:
        return self._line("rev-parse", "--verify", "--end-of-options", f"{sha}^{{tree}}")

    def merge(self, *, base: str, ours: str, theirs: str) -> Merged:
        """Three-way merge of three commits' trees, whatever their history is.

        `git merge-tree` takes the base from the history (`--merge-base` needs git 2.40): three commits with the same
        trees and a history of their own stand for them.

        Raises:
            EnvironmentFault: git is older than 2.38.
        """
        root = self.commit(tree=self.tree_of(base), parents=(), message="base\n")
        sides = [self.commit(tree=self.tree_of(s), parents=(root,), message="side\n") for s in (ours, theirs)]
        args = ("merge-tree", "--write-tree", "--no-messages", "--name-only", "-z", *sides)
        status, out, told = run_git(*args, git_dir=self.git_dir, home=self.git_dir)
        if status not in (0, 1):
            if "usage:" in told or "unknown option" in told or "--write-tree" in told:
                raise EnvironmentFault("this git cannot merge without a work tree", remedy="Install git 2.38 or newer")
            raise RepositoryError(f"git merge-tree failed: {told.strip().splitlines()[0] if told.strip() else status}",
                                  where=str(self.user.path))  # fmt: skip
        tree, *paths = out.split(b"\0")
        names = tuple(dict.fromkeys(os.fsdecode(p) for p in paths if p)) if status else ()
        return Merged(tree=tree.decode(), conflicts=names)

    def tree_with(self, base: str, files: Mapping[str, bytes | None]) -> str:
        """The tree of commit or tree ``base`` with some files replaced (modes stay), added, or removed (None)."""
        listed = b""
        for path, content in files.items():
            if content is None:
                listed += b"0 " + b"0" * len(self.user.empty_tree) + b"\t" + os.fsencode(path) + b"\0"
                continue
            id = self._line("hash-object", "-w", "--stdin", "--no-filters", data=content)
            listed += f"{self._mode(base, path)} {id}\t".encode() + os.fsencode(path) + b"\0"
        with tempfile.TemporaryDirectory(dir=self.git_dir, prefix="index-") as private:
            index = Path(private) / "index"
            self._out("read-tree", base, index=index)
            self._out("update-index", "-z", "--index-info", data=listed, index=index)
            return self._out("write-tree", index=index).decode().strip()

    def commit(self, *, tree: str, parents: Sequence[str], message: str, date: str = "0 +0000") -> str:
        """Store a commit. Written as bytes: no configuration, editor, hook or option reads ``message``."""
        lines = [f"tree {tree}", *(f"parent {p}" for p in parents), f"author {WHO} {date}", f"committer {WHO} {date}"]
        clean = message.replace("\0", "").encode("utf-8", "replace")
        return self._line("hash-object", "-t", "commit", "-w", "--stdin",
                          data="\n".join([*lines, "", ""]).encode() + clean)  # fmt: skip

    def date_of(self, sha: str) -> str:
        """Committer date of ``sha`` in git's own form, one second later: proposals are the same whenever made."""
        seconds, zone = self._line("log", "-1", "--no-walk", "--format=%cd", "--date=raw", sha, "--").split()
        return f"{int(seconds) + 1} {zone}"

    def read_tree_file(self, tree: str, path: str) -> bytes | None:
        """Content of a file of a tree."""
        listed = self._out("ls-tree", "-z", tree, "--", path, literal=True)
        for record in listed.split(b"\0"):
            what, _, name = record.partition(b"\t")
            if os.fsdecode(name) == path and b" blob " in what:
                return self._out("cat-file", "blob", what.split()[2].decode())
        return None

    def differing(self, old: str, new: str) -> tuple[str, ...]:
        """Paths in which two commits or trees differ; both names of a renamed file."""
        out = self._out("diff-tree", "-r", "-z", "--name-only", "--no-renames", old, new)
        return tuple(os.fsdecode(name) for name in out.split(b"\0") if name)

    def patch_id(self, old: str, new: str) -> str:
        """What git calls the stable patch-id of the difference, "" when there is none: line numbers do not matter."""
        shown = ("-r", "-p", "--no-renames", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv")
        out = self._out("diff-tree", *shown, old, new)
        told = self._out("patch-id", "--stable", data=out).split()
        return told[0].decode() if told else ""

    def format_patch(self, sha: str) -> bytes:
        """The commit as a mail that `git am` takes."""
        return self._out("format-patch", "-1", "--stdout", "--no-signature", "--full-index", "--binary", sha)

    # ---- the way out -------------------------------------------------------------------------------------

    def publish(self, branch: str, sha: str) -> str:
        """Put ``sha`` into the user's repository as the new branch ``branch``; its full ref name.

        Raises:
            UsageError: the name is not ours, or the branch exists with another commit.
        """
        if not BRANCH.fullmatch(branch):
            raise UsageError(f"{branch!r} is no name for a proposal's branch", remedy="It begins with dsabisect/")
        ref = f"refs/heads/{branch}"
        status, out, _ = self._user("rev-parse", "--verify", "--quiet", "--end-of-options", ref)
        if status == 0:
            if out.decode().strip() == sha:
                return ref
            raise UsageError(f"branch {branch} exists and holds something else", where=str(self.user.path),
                             remedy=f"Rename or delete it first: git branch -m {branch} OTHER")  # fmt: skip
        parents = self._line("log", "-1", "--no-walk", "--format=%P", sha, "--").split()
        wanted = "\n".join([sha, *(f"^{p}" for p in parents), ""])
        pack = self._out("pack-objects", "--revs", "--stdout", "-q", "--delta-base-offset", data=wanted.encode())
        self._needs(self._user("unpack-objects", "-q", data=pack), "unpack-objects")
        zeros = "0" * len(self.user.empty_tree)
        self._needs(self._user("update-ref", ref, sha, zeros), "update-ref")
        return ref

    def _user(self, *args: str, data: bytes = b"") -> tuple[int, bytes, str]:
        return run_git(*args, git_dir=self.user.git_dir, home=self.git_dir, data=data)

    def _needs(self, answer: tuple[int, bytes, str], command: str) -> None:
        if answer[0] != 0:
            told = (answer[2].strip().splitlines() or [f"it ended with {answer[0]}"])[0]
            raise RepositoryError(f"git {command} failed: {told}", where=str(self.user.path),
                                  remedy="Is it writable? Without --branch a patch file is written")  # fmt: skip

    # ---- inside ------------------------------------------------------------------------------------------

    def _mode(self, base: str, path: str) -> str:
        listed = self._out("ls-tree", "-z", base, "--", path, literal=True)
        return listed.split()[0].decode() if listed else REGULAR

    def _out(self, *args: str, data: bytes = b"", index: Path | None = None, literal: bool = False) -> bytes:
        answer = run_git(*args, git_dir=self.git_dir, home=self.git_dir, data=data, index=index, literal=literal)
        self._needs(answer, args[0])
        return answer[1]

    def _line(self, *args: str, data: bytes = b"") -> str:
        return self._out(*args, data=data).decode().strip()
