"""Git, read only: revisions, first-parent ranges, trees, checkouts. The only importer of GitPython.

How the user's repository stays as it is: apart from finding it and looking up names (`rev-parse`, which writes
nothing), no command runs in it. Everything else runs in a private bare repository under the tool's cache that holds
no objects of its own and borrows the user's through `objects/info/alternates`. So the user's index, locks, work tree,
hooks, filters, diff drivers, running bisect or rebase neither matter nor change, and what a partial clone lacks is
an error instead of a silent download. The private repository takes over the user's shallow boundary, grafts and
replacements, because they decide what the history *is*.

Line of the search: first parents only. When the good commit is not on the first-parent line of the bad one (it came
in through a merge, or lies on another branch), the newest commit of that line that good contains takes its place:
every step from there to bad is then one step of the line, and nothing that could have introduced the change is left
out. That it is good too is a hypothesis, which the endpoint check measures. The history's note says it aloud.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from subprocess import PIPE
from typing import Any

from dsabisect.errors import EnvironmentFault, RepositoryError, StoreError
from dsabisect.model import Change, digest
from dsabisect.outside.commitwords import Told, says_relands, says_reverts
from dsabisect.outside.folders import appearing, copy_folder, drop_escaping_links, inside

FULL_SHA = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
REGULAR, EXECUTABLE, LINK, SUBMODULE = "100644", "100755", "120000", "160000"
CHECKOUT_WORKERS = min(4, os.cpu_count() or 1)  # git writes files in parallel (since 2.32; older ones ignore it)
MISSING = re.compile(
    r"missing|unable to read|could not (?:read|open)|cannot read|failed to (?:read|traverse)|invalid sha1"
    r"|bad (?:object|tree|file)|not a (?:valid|tree) object",
    re.IGNORECASE,
)
UNWRITABLE = re.compile(r": (?:No space left on device|Disk quota exceeded|File too large|Read-only file system"
                        r"|Permission denied)$", re.MULTILINE)  # fmt: skip
# Attributes of a commit may ask for filters (LFS), line endings or encodings; a checkout is the blob, byte for byte.
PLAIN_ATTRIBUTES = "* !text !crlf !eol !ident !filter !working-tree-encoding\n"


@dataclass(frozen=True, kw_only=True)
class History:
    """A stretch of one first-parent line: ``changes[0]`` is good, ``changes[-1]`` bad, each the parent of the next."""

    changes: tuple[Change, ...]
    note: str = ""  # what had to be said about the range, one line


@dataclass(frozen=True, kw_only=True)
class Submodule:
    path: str
    url: str  # as in .gitmodules; "" when it is not listed there
    sha: str  # the pinned commit
    name: str = ""  # of its section in .gitmodules, which is also its folder under .git/modules


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a tree."""

    path: str  # bytes that are not UTF-8 are kept as surrogates
    mode: str
    id: str


class GitRepo:
    """One repository of the user, never written to. Every ``sha`` may be any revision; results are full shas."""

    def __init__(self, path: Path, work: Path) -> None:
        """Open the repository that ``path`` is or lies in; private files go below ``work``.

        ``path`` may be a work tree or a folder in it, a linked worktree, a bare repository, or a git directory.

        Raises:
            RepositoryError: there is no repository at ``path``.
            StoreError: ``work`` cannot be written.
            EnvironmentFault: git or GitPython is missing.
        """
        self.path = Path(path).absolute()
        self.git_dir, self.common_dir, self.object_format = _discover(self.path, work)
        self.empty_tree = hashlib.new(self.object_format, b"tree 0\0").hexdigest()
        self.mirror = _private_mirror(self.git_dir, self.common_dir, self.object_format, work)

    # ---- revisions and history ---------------------------------------------------------------------------

    def resolve(self, rev: str) -> str:
        """Full sha of the commit that ``rev`` names.

        Raises:
            RepositoryError: empty, option-like, a range, unknown, ambiguous, or not a commit.
        """
        fault = _word_fault(rev)
        if fault:
            raise RepositoryError(
                f"revision {rev!r} {fault}", where=str(self.path), remedy="Give one commit: a sha, a branch or a tag"
            )
        asked = ("rev-parse", "--verify", "--end-of-options", f"{rev}^{{commit}}")
        status, out, told = _git(*asked, git_dir=self.git_dir, home=self.mirror)
        if status == 0 and FULL_SHA.fullmatch(out.decode().strip()):
            return out.decode().strip()
        what = "is ambiguous" if "ambiguous" in told else "names no commit here"
        remedy = "`git log` there shows what it has; `git fetch` gets what is missing"
        if self.is_shallow():
            remedy = f"This is a shallow clone: {self._deepen()}"
        raise RepositoryError(f"revision {rev!r} {what}", where=str(self.path), remedy=remedy)

    def change(self, sha: str) -> Change:
        return self._one(sha).change

    def history(self, good: str, bad: str) -> History:
        """The first-parent line from ``good`` to ``bad``, oldest first (see the head of this module).

        Raises:
            RepositoryError: good = bad, good newer than bad, unrelated histories, or a shallow clone that lacks
                part of the range.
        """
        old, new = self.resolve(good), self.resolve(bad)
        if old == new:
            raise RepositoryError(
                f"good and bad are the same commit {old[:9]}", where=str(self.path),
                remedy="Give two commits: one that works and a later one that does not",
            )  # fmt: skip
        if self._is_ancestor(new, old):
            raise RepositoryError(
                f"good {old[:9]} is newer than bad {new[:9]}", where=str(self.path),
                remedy=f"Swap them: --good {bad} --bad {good}. To find what mended something, look for the change of "
                "verdict from the old commit to the new one",
            )  # fmt: skip
        line = self._told("--first-parent", f"^{old}", new)
        begin = line[-1].parents[0] if line[-1].parents else None
        if begin is None:
            raise self._no_common_line(old, new)
        first = self._one(begin).change
        note = "" if begin == old else self._note(old, new, first)
        return History(changes=(first, *(told.change for told in reversed(line))), note=note)

    def touching(self, history: History, pathspecs: Sequence[str]) -> frozenset[str]:
        """Shas of ``history`` after its first whose diff to the commit before touches ``pathspecs``.

        A rename counts when its old or its new name matches: it is read as one file gone and another come.
        """
        ids = [change.id for change in history.changes]
        pairs = "".join(f"{new} {old}\n" for old, new in pairwise(ids))
        out = self._git("diff-tree", "--stdin", "-r", "--name-status", "--no-renames", "--", *pathspecs,
                        data=pairs.encode())  # fmt: skip
        return frozenset(line for line in out.decode(errors="replace").splitlines() if "\t" not in line and line in ids)

    def moves(self, history: History, pathspecs: Sequence[str]) -> list[tuple[Entry, ...]]:
        """For each change of ``history`` the files that match and differ from the commit before, as they are after it.

        The first change has all its files. A file that is gone has an id of zeros. One git process for the range.
        """
        ids = [change.id for change in history.changes]
        steps = "".join(f"{new} {old}\n" for old, new in pairwise(ids))
        listing = ("diff-tree", "--stdin", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", "--", *pathspecs)
        at = {sha: position for position, sha in enumerate(ids)}
        found: list[list[Entry]] = [[] for _ in ids]
        position = 0
        values = iter(self._git(*listing, data=steps.encode()).split(b"\0"))
        for value in values:  # SHA, then ":modes ids status", path, ":modes ids status", path, ...
            if value.startswith(b":"):
                meta = value.decode().split()
                found[position].append(Entry(path=os.fsdecode(next(values)), mode=meta[1], id=meta[3]))
            elif value:
                position = at[value.decode().strip()]
        return [tuple(self._entries(ids[0], pathspecs)), *map(tuple, found[1:])]

    def blobs(self, ids: Sequence[str]) -> dict[str, bytes]:
        """Contents of blobs by id, read by one git process."""
        asked = list(dict.fromkeys(ids))
        out = self._git("cat-file", "--batch", data="".join(f"{id}\n" for id in asked).encode()) if asked else b""
        found: dict[str, bytes] = {}
        at = 0
        for id in asked:
            end = out.index(b"\n", at)
            head = out[at:end].split()
            if len(head) != 3:
                raise RepositoryError(f"git cannot read the blob {id[:12]}", where=str(self.path),
                                      remedy=self._cure(f"missing {id}"))  # fmt: skip
            found[id] = out[end + 1 : end + 1 + int(head[2])]
            at = end + 2 + int(head[2])
        return found

    def entries(self, sha: str, pathspecs: Sequence[str]) -> tuple[Entry, ...]:
        """Files that match at ``sha``, sorted by path."""
        return tuple(self._entries(sha, pathspecs))

    def older(self, sha: str, steps: int) -> str:
        """The commit ``steps`` first parents before ``sha``, or the oldest that is there; "" when there is none."""
        told = self._told("--first-parent", f"--max-count={steps + 1}", self._full(sha))
        return told[-1].change.id if len(told) > 1 else ""

    def later_touching(self, sha: str, tip: str) -> tuple[Change, ...]:
        """Later first-parent commits up to ``tip`` that touch a file that ``sha`` touched, oldest first."""
        files = {os.fsencode(name) for name in self.changed_files(sha)}
        told = self._told("--first-parent", f"^{self._full(sha)}", self._full(tip))[::-1]
        steps = "".join(f"{one.change.id} {one.parents[0]}\n" for one in told if one.parents)
        out = self._git("diff-tree", "--stdin", "-r", "-z", "--raw", "--no-renames", data=steps.encode())
        touched: set[str] = set()
        current, is_path = "", False
        for value in out.split(b"\0"):  # SHA, then ":modes ids status", path, ":modes ids status", path, ...
            if is_path and value in files:
                touched.add(current)
            elif not is_path and not value.startswith(b":"):
                current = value.decode()
            is_path = not is_path and value.startswith(b":")
        return tuple(one.change for one in told if one.change.id in touched)

    def is_shallow(self) -> bool:
        shallow = self.mirror / "shallow"
        return shallow.is_file() and shallow.stat().st_size > 0

    # ---- trees and files ---------------------------------------------------------------------------------

    def tree_key(self, sha: str, pathspecs: Sequence[str]) -> str:
        """Hash over (path, mode, blob) of the files that match: a commit and the revert to it have the same one."""
        return digest([[e.path, e.mode, e.id] for e in self._entries(sha, pathspecs)])

    def files(self, sha: str, pathspecs: Sequence[str]) -> tuple[str, ...]:
        """Paths of the files (not submodules) that match; all files for ``()``."""
        return tuple(e.path for e in self._entries(sha, pathspecs) if e.mode != SUBMODULE)

    def read(self, sha: str, path: str) -> bytes | None:
        """Content of one file as it stands in the commit; None when there is no such file. A link yields its target."""
        if path.strip("/") != path or not path or ".." in PurePosixPath(path).parts:
            return None
        listed = self._git("ls-tree", "-z", self._full(sha), "--", path, literal=True)
        for record in listed.split(b"\0"):
            what, _, name = record.partition(b"\t")
            if os.fsdecode(name) == path and b" blob " in what:
                return self._git("cat-file", "blob", what.split()[2].decode())
        return None

    def changed_files(self, sha: str) -> tuple[str, ...]:
        """Paths that differ from the first parent; both names of a renamed file."""
        out = self._git("diff-tree", "-r", "-z", "--name-only", "--no-renames", *self._step(sha))
        return tuple(os.fsdecode(name) for name in out.split(b"\0") if name)

    def patch(self, sha: str, pathspecs: Sequence[str] = ()) -> str:
        """Unified diff to the first parent, renames shown as such. For reading: bytes outside UTF-8 are replaced."""
        shown = ("-r", "-p", "-M", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv")
        out = self._git("diff-tree", *shown, *self._step(sha), "--", *pathspecs)
        return out.decode(errors="replace")

    # ---- checkouts ---------------------------------------------------------------------------------------

    def checkout(self, sha: str, dest: Path, folders: Sequence[str]) -> None:
        """Write the files of ``folders`` (pathspecs; ``()`` = everything) at ``sha`` to the new folder ``dest``.

        The files are the blobs byte for byte: no filter (LFS), no line-ending or encoding change, no hook. Symbolic
        links that would lead out of ``dest`` are left out. ``dest`` has no .git, and is there whole or not at all.

        Raises:
            RepositoryError: none of ``folders`` exists at ``sha``, or objects are missing.
            StoreError: ``dest`` exists and is not empty, or cannot be written.
        """
        entries = self._entries(sha, folders)
        if folders and not entries:
            raise RepositoryError(
                f"{self._full(sha)[:9]} has none of {', '.join(folders)}", where=str(self.path),
                remedy="Is this the repository that the target is for?",
            )  # fmt: skip
        with appearing(dest) as temporary:
            self._write(entries, temporary)
            drop_escaping_links(temporary, [e.path for e in entries if e.mode == LINK])

    def submodules(self, sha: str) -> Mapping[str, Submodule]:
        """Path → submodule, for everything that ``sha`` pins."""
        pinned = {e.path: e.id for e in self._entries(sha, ()) if e.mode == SUBMODULE}
        listed = self._gitmodules(sha) if pinned else {}
        return {
            path: Submodule(path=path, sha=id, url=listed.get(path, ("", ""))[0], name=listed.get(path, ("", path))[1])
            for path, id in pinned.items()
        }

    def place_submodule(self, sha: str, dest: Path, path: str, source: Path | None) -> str:
        """Put the files of submodule ``path`` into the checkout ``dest`` and return a note, "" when there is none.

        ``source`` may be a repository of the submodule (its pinned commit is used when it has it) or a plain folder,
        whose files are used as they are: the note says so. Without one, the user's own clone under .git/modules or
        in the work tree is used. A commit that does not pin ``path`` gets nothing.

        Raises:
            RepositoryError: there is no usable source; the remedy names --submodule.
        """
        wanted = self.submodules(sha).get(path)
        if wanted is None:
            return ""
        target = dest / path
        if not inside(target, dest):
            raise RepositoryError(f"submodule {path} would be written outside the checkout", where=str(self.path))
        if source is None:
            self._own_clone(wanted).checkout(wanted.sha, target, ())
            return ""
        return self._place_given(wanted, target, Path(source).absolute())

    # ---- what the history says about a commit ------------------------------------------------------------

    def reverts_of(self, sha: str, tip: str) -> tuple[Change, ...]:
        """Commits of sha..tip that say they revert ``sha``, oldest first. See :mod:`dsabisect.outside.commitwords`."""
        original = self._one(sha)
        return tuple(later.change for later in self._later(sha, tip) if says_reverts(later, original))

    def relands_of(self, sha: str, tip: str) -> tuple[Change, ...]:
        """Commits of sha..tip that bring ``sha`` back: by their words, or by reverting a revert of it; oldest first."""
        original, later = self._one(sha), self._later(sha, tip)
        reverts = [told for told in later if says_reverts(told, original)]
        return tuple(
            told.change
            for told in later
            if says_relands(told, original) or any(says_reverts(told, revert) for revert in reverts)
        )

    # ---- inside ------------------------------------------------------------------------------------------

    def _git(self, *args: str, data: bytes = b"", literal: bool = False, into: Path | None = None,
             index: Path | None = None) -> bytes:  # fmt: skip
        """Run git in the private repository; its output, or the error that a person can act on."""
        status, out, told = _git(
            *args, git_dir=self.mirror, home=self.mirror, data=data, literal=literal, into=into, index=index
        )
        if status != 0:
            raise self._fault(args[0], status, told)
        return out

    def _fault(self, command: str, status: int, told: str) -> Exception:
        lines = [line for line in told.splitlines() if line.startswith(("fatal:", "error:"))] or told.split("\n")[:1]
        line = lines[0] or f"it ended with {status} and no message"
        unwritten = command == "checkout-index" and not MISSING.search(told)  # nothing else is written but by this one
        if unwritten or UNWRITABLE.search(told):
            return StoreError(f"git {command} could not write: {line}", where=str(self.mirror.parent),
                              remedy="Free some space, or check the folder's permissions")  # fmt: skip
        return RepositoryError(f"git {command} failed: {line}", where=str(self.path), remedy=self._cure(told))

    def _cure(self, told: str) -> str:
        if not MISSING.search(told):
            return f"`git -C {self.path} fsck` checks the repository"
        if any((self.common_dir / "objects" / "pack").glob("*.promisor")):
            return ("This is a partial clone and nothing is fetched behind your back: "
                    f"`git -C {self.path} fetch --refetch --no-filter` gets the missing files")  # fmt: skip
        if self.is_shallow():
            return f"This is a shallow clone: {self._deepen()}"
        return f"Objects are missing: `git -C {self.path} fsck` checks the repository"

    def _deepen(self) -> str:
        return f"`git -C {self.path} fetch --deepen 1000` or `--unshallow` gets older commits"

    def _full(self, sha: str) -> str:
        return sha if FULL_SHA.fullmatch(sha) else self.resolve(sha)

    def _told(self, *args: str, literal: bool = False) -> list[Told]:
        """`git log` of ``args``, in its order (newest first)."""
        fields = ("%H", "%P", "%s", "%an", "%cI", "%B")
        form = "%x00".join(fields)
        tail = () if "--" in args else ("--",)
        out = self._git("log", "-z", f"--format={form}", "--no-color", "--no-notes", *args, *tail, literal=literal)
        values = out.decode(errors="replace").split("\0")
        rows = zip(*(values[n :: len(fields)] for n in range(len(fields))), strict=False)
        return [
            Told(change=Change(id=id, title=title, author=author, date=date), parents=tuple(parents.split()), body=body)
            for id, parents, title, author, date, body in rows
        ]

    def _one(self, sha: str) -> Told:
        return self._told("--no-walk", self._full(sha))[0]

    def _later(self, sha: str, tip: str) -> list[Told]:
        """All commits of sha..tip, merged branches too, oldest first."""
        return self._told(f"^{self._full(sha)}", self._full(tip))[::-1]

    def _is_ancestor(self, old: str, new: str) -> bool:
        args = ("merge-base", "--is-ancestor", old, new)
        status, _, told = _git(*args, git_dir=self.mirror, home=self.mirror)
        if status not in (0, 1):
            raise self._fault("merge-base", status, told)
        return status == 0

    def _no_common_line(self, old: str, new: str) -> RepositoryError:
        if self.is_shallow():
            return RepositoryError(f"this shallow clone lacks part of the range {old[:9]}..{new[:9]}",
                                   where=str(self.path), remedy=self._deepen())  # fmt: skip
        return RepositoryError(f"good {old[:9]} and bad {new[:9]} share no history", where=str(self.path),
                               remedy="Give two commits of one line of development")  # fmt: skip

    def _note(self, old: str, new: str, first: Change) -> str:
        came = "came in through a merge" if self._is_ancestor(old, new) else f"is not an ancestor of bad {new[:9]}"
        return (f"good {old[:9]} {came}: the newest commit of bad's first-parent line that it contains, "
                f"{first.short} ({first.title}), takes its place")  # fmt: skip

    def _step(self, sha: str) -> tuple[str, str]:
        """The first parent (the empty tree for a root) and the commit itself."""
        told = self._one(sha)
        if told.parents:
            return told.parents[0], told.change.id
        if told.change.id in self._boundary():
            raise RepositoryError(f"the parent of {told.change.short} is not in this shallow clone",
                                  where=str(self.path), remedy=self._deepen())  # fmt: skip
        return self.empty_tree, told.change.id

    def _boundary(self) -> frozenset[str]:
        return frozenset((self.mirror / "shallow").read_text().split()) if self.is_shallow() else frozenset()

    def _entries(self, sha: str, pathspecs: Sequence[str]) -> list[Entry]:
        """Files that match, sorted by path. A diff to the empty tree: only diffs know every kind of pathspec."""
        listing = ("-r", "--raw", "-z", "--no-renames", "--no-abbrev")
        out = self._git("diff-tree", *listing, self.empty_tree, self._full(sha), "--", *pathspecs)
        values = out.split(b"\0")
        rows = zip(values[0::2], values[1::2], strict=False)
        entries = [(meta.decode().split(), os.fsdecode(path)) for meta, path in rows]
        return [Entry(path=path, mode=meta[1], id=meta[3]) for meta, path in entries]

    def _write(self, entries: Sequence[Entry], folder: Path) -> None:
        files = [e for e in entries if e.mode != SUBMODULE]
        listed = b"".join(f"{e.mode} {e.id}\t".encode() + os.fsencode(e.path) + b"\0" for e in files)
        with tempfile.TemporaryDirectory(dir=self.mirror, prefix="index-") as private:
            index = Path(private) / "index"
            self._git("update-index", "-z", "--index-info", data=listed, index=index)
            self._git("checkout-index", "--all", "--force", "--quiet", index=index, into=folder)
        for entry in entries:
            if entry.mode == SUBMODULE:  # an empty folder, as git itself leaves it
                (folder / entry.path).mkdir(parents=True, exist_ok=True)

    def _gitmodules(self, sha: str) -> dict[str, tuple[str, str]]:
        """Submodule path → (url, name), as .gitmodules says."""
        if self.read(sha, ".gitmodules") is None:
            return {}
        out = self._git("config", "-z", f"--blob={self._full(sha)}:.gitmodules", "--list")
        pairs = (record.partition("\n") for record in out.decode(errors="replace").split("\0") if record)
        found: dict[str, dict[str, str]] = {}
        for key, _, value in pairs:
            section, _, field = key.rpartition(".")
            found.setdefault(section, {})[field] = value
        return {v["path"]: (v.get("url", ""), s.partition(".")[2]) for s, v in found.items() if "path" in v}

    def _own_clone(self, wanted: Submodule) -> GitRepo:
        """The user's clone of a submodule that has the pinned commit."""
        top = next((p for p in (self.path, *self.path.parents) if (p / ".git").exists()), self.path)
        candidates = [top / wanted.path]
        name = PurePosixPath(wanted.name)
        if ".." not in name.parts and not name.is_absolute():  # it comes from the commit: it must not lead elsewhere
            candidates += [folder / "modules" / name for folder in (self.common_dir, self.git_dir)]
        for folder in candidates:
            clone = _own_repository(folder, self.mirror.parent.parent)
            if clone is not None and clone._has(wanted.sha):
                return clone
        raise RepositoryError(
            f"submodule {wanted.path} is pinned at {wanted.sha[:9]}, which is not on this machine",
            where=str(self.path),
            remedy=f"Give its files: --submodule {wanted.path}=PATH, a clone of {wanted.url or 'it'} or a folder",
        )

    def _place_given(self, wanted: Submodule, target: Path, source: Path) -> str:
        remedy = f"Give --submodule {wanted.path}=PATH, a clone of {wanted.url or 'it'} or a folder with its files"
        if not source.is_dir():
            raise RepositoryError(f"no folder for submodule {wanted.path}", where=str(source), remedy=remedy)
        clone = _own_repository(source, self.mirror.parent.parent)
        if clone is not None and clone._has(wanted.sha):
            clone.checkout(wanted.sha, target, ())
            return ""
        if clone is not None and not (source / ".git").exists():
            raise RepositoryError(f"the repository given for submodule {wanted.path} lacks its pinned commit "
                                  f"{wanted.sha[:9]}", where=str(source), remedy=remedy)  # fmt: skip
        copy_folder(source, target)
        why = "which lacks" if clone is not None else "not checked against"
        return f"submodule {wanted.path}: files of {source} as they are, {why} the pinned {wanted.sha[:9]}"

    def _has(self, sha: str) -> bool:
        args = ("cat-file", "-e", f"{sha}^{{commit}}")
        return _git(*args, git_dir=self.mirror, home=self.mirror)[0] == 0


# ---- the private repository, and running git ---------------------------------------------------------------


def _word_fault(rev: str) -> str:
    """What is wrong with a revision as a word, "" when it may be looked up."""
    if not rev.strip():
        return "is empty"
    if rev.startswith("-"):
        return "looks like an option"
    if any(ord(c) < 32 or ord(c) == 127 for c in rev) or rev != rev.strip():
        return "has control characters or spaces around it"
    if ".." in rev or rev.startswith("^") or rev.endswith(("^@", "^!", "^-")):
        return "is a range, not one commit"
    return ""


def _looks_like_git_dir(path: Path) -> bool:
    return (path / "HEAD").is_file() and (path / "objects").is_dir() and (path / "refs").is_dir()


def _own_repository(folder: Path, work: Path) -> GitRepo | None:
    """The repository that ``folder`` itself is; None for a plain folder, also when it lies inside some repository."""
    if not (folder / ".git").exists() and not _looks_like_git_dir(folder):
        return None
    try:
        return GitRepo(folder, work)
    except RepositoryError:
        return None


def _discover(path: Path, work: Path) -> tuple[Path, Path, str]:
    """(git directory, directory shared by linked worktrees, object format)."""
    if not path.is_dir():
        raise RepositoryError("no such folder" if not path.exists() else "not a folder", where=str(path),
                              remedy="Give the folder of a git repository with --repo")  # fmt: skip
    asked = ("rev-parse", "--git-dir", "--git-common-dir", "--show-object-format")
    given = path if _looks_like_git_dir(path) else None
    status, out, told = _git(*asked, git_dir=given, home=work, cwd=path)
    if status != 0:
        what = "not a git repository" if "not a git repository" in told else f"git cannot open it: {told.strip()}"
        raise RepositoryError(what, where=str(path), remedy="Give the folder of a git repository with --repo")
    git_dir, common_dir, form = os.fsdecode(out).splitlines()
    return (path / git_dir).resolve(), (path / common_dir).resolve(), form


def _private_mirror(git_dir: Path, common_dir: Path, form: str, work: Path) -> Path:
    """A bare repository under ``work`` with the user's objects borrowed and nothing else of the user's.

    Several processes may share it: all of them write the same bytes, each file at once.
    """
    mirror = work.absolute() / "mirrors" / f"{hashlib.sha256(os.fsencode(common_dir)).hexdigest()[:16]}.git"
    version, extension = (0, "") if form == "sha1" else (1, f"[extensions]\n\tobjectFormat = {form}\n")
    replaced = _replacements(git_dir, work)
    try:
        for folder in ("objects/info", "refs", "info"):
            (mirror / folder).mkdir(parents=True, exist_ok=True)
        _put(mirror / "HEAD", b"ref: refs/heads/none\n")
        _put(mirror / "config", f"[core]\n\trepositoryformatversion = {version}\n\tbare = true\n{extension}".encode())
        _put(mirror / "info" / "attributes", PLAIN_ATTRIBUTES.encode())
        _put(mirror / "objects" / "info" / "alternates", _alternates(common_dir / "objects"))
        _put(mirror / "packed-refs", replaced)
        for name in ("shallow", "info/grafts"):
            theirs = common_dir / name
            _put(mirror / name, theirs.read_bytes() if theirs.is_file() else b"")
    except OSError as error:
        raise StoreError(f"cannot write the cache: {error.strerror or error}", where=str(mirror),
                         remedy="Set DSABISECT_CACHE to a folder that can be written") from error  # fmt: skip
    return mirror


def _replacements(git_dir: Path, work: Path) -> bytes:
    """refs/replace of the user in the format of packed-refs."""
    asked = ("for-each-ref", "--format=%(objectname) %(refname)", "refs/replace")
    status, out, _ = _git(*asked, git_dir=git_dir, home=work)
    return out if status == 0 else b""


def _put(path: Path, content: bytes) -> None:
    """Write a small file at once; an empty one is removed, an equal one left alone."""
    if not content:
        path.unlink(missing_ok=True)
        return
    if path.is_file() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _alternates(objects: Path) -> bytes:
    """The user's object folder and those that it borrows from itself, absolute, one a line."""
    found: list[Path] = []
    waiting = [objects]
    while waiting:
        folder = waiting.pop(0).resolve()
        if folder in found or not folder.is_dir():
            continue
        found.append(folder)
        listed = folder / "info" / "alternates"
        lines = os.fsdecode(listed.read_bytes()).splitlines() if listed.is_file() else []
        waiting += [folder / line for line in lines if line and not line.startswith(("#", '"'))]
    return b"".join(_quoted(folder) + b"\n" for folder in found)


def _quoted(path: Path) -> bytes:
    raw = os.fsencode(path)
    if b"\n" not in raw and not raw.startswith((b'"', b"#")):
        return raw
    return b'"' + raw.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


def _environment(home: Path, index: Path | None) -> dict[str, str]:
    """Nothing of the machine's or the person's configuration, no prompts, no locks, no network."""
    fixed = {
        "HOME": str(home), "XDG_CONFIG_HOME": str(home), "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1",
        "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "false", "GIT_PAGER": "cat",
        "GIT_NO_LAZY_FETCH": "1",  # since 2.44, and 2.39.4 and other security releases
        "GIT_ALLOW_PROTOCOL": "none",  # the same for older ones: a fetch finds no protocol that it may use
    }  # fmt: skip
    return {**fixed, "GIT_INDEX_FILE": str(index)} if index else fixed


CONFIG = (
    "safe.directory=*", f"core.hooksPath={os.devnull}", "core.fsmonitor=false", f"core.attributesFile={os.devnull}",
    "core.quotePath=false", "core.autocrlf=false", "core.symlinks=true", "advice.graftFileDeprecated=false",
    "gc.auto=0", "maintenance.auto=false", "protocol.allow=never", f"checkout.workers={CHECKOUT_WORKERS}",
)  # fmt: skip


def _gitpython() -> Any:
    """GitPython, imported at the first use: it looks for the git program at once."""
    try:
        import git
    except ImportError as error:
        raise EnvironmentFault(f"git cannot be used: {str(error).strip().splitlines()[0]}",
                               remedy="Install git, and GitPython with `pip install gitpython`") from error  # fmt: skip
    return git


def _git(
    *args: str,
    git_dir: Path | None,
    home: Path,
    data: bytes = b"",
    literal: bool = False,
    cwd: Path | None = None,
    into: Path | None = None,
    index: Path | None = None,
) -> tuple[int, bytes, str]:
    """(exit status, stdout, stderr) of one git command, free of every GIT_* variable of the caller's."""
    library = _gitpython()
    env = _environment(home, index)
    stray = [name for name in os.environ if name.startswith("GIT_") and name not in env]
    clean = ["env", *(word for name in stray for word in ("-u", name))] if stray else []
    where = [f"--git-dir={git_dir}"] if git_dir else []
    where += [f"--work-tree={into}"] if into else []
    settings = [word for setting in CONFIG for word in ("-c", setting)]
    switches = ["--no-pager", *(["--literal-pathspecs"] if literal else [])]
    command = [*clean, library.Git.GIT_PYTHON_GIT_EXECUTABLE, *switches, *settings, *where, *args]
    try:
        process = library.Git(str(into or cwd or git_dir)).execute(command, istream=PIPE, as_process=True, env=env)
    except library.exc.GitCommandNotFound as error:
        raise EnvironmentFault("git is not installed", remedy="Install git") from error
    out, told = process.communicate(data)
    if clean and process.returncode == 127:
        raise EnvironmentFault("git is not installed", remedy="Install git")
    return process.returncode, out, told.decode(errors="replace")
