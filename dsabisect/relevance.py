"""What of each commit can change an answer, as one key a commit; and which commits must be looked at.

A commit whose key is its parent's is left out of the search. That is a hypothesis: it stays among the suspects until
the culprit and its direct parent were measured.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsabisect.model import PathSpec, digest
from dsabisect.outside.gitrepo import SUBMODULE, Entry, GitRepo, History
from dsabisect.targets import Part

Files = dict[str, Entry]
WORDS = re.compile(
    r"\b(revert\w*|re-?land\w*|re-?enabl\w*|enabl\w*|disabl\w*|default\w*|turn (?:on|off))\b", re.IGNORECASE
)
UNDOING = re.compile(r"\brevert", re.IGNORECASE)
GONE = re.compile("0+")


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What the history itself says of one commit, before anything is measured."""

    key: str  # equal keys: interchangeable
    relevant: bool  # its key is not its parent's
    why: tuple[str, ...] = ()  # why it must be looked at; () = it need not
    undoes: bool = False  # it takes something back: what stood right before it must be looked at too


@dataclass(kw_only=True)
class Relevance:
    """Keys of commits, for one set of paths of a target."""

    repo: GitRepo
    target: Any
    pathspecs: tuple[str, ...]
    _blobs: dict[str, bytes] = field(default_factory=dict)
    _keys: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts: dict[str, Part] = {part.path: part for part in self.target.PARTS}

    def key(self, sha: str) -> str:
        """Key of one commit."""
        if sha not in self._keys:
            self._keys[sha] = self._key({e.path: e for e in self.repo.entries(sha, self.pathspecs)})
        return self._keys[sha]

    def remember(self, keys: Iterable[tuple[str, str]]) -> None:
        """Keys by sha, known from an earlier run."""
        self._keys.update(keys)

    def commits(self, history: History) -> list[Commit]:
        """One entry a change of ``history``; all of it is read by a handful of git processes."""
        moves = self.repo.moves(history, self.pathspecs)
        if self._parts:
            read = [e.id for moved in moves for e in moved if self._is_read(e)]
            self._blobs.update(self.repo.blobs(read))
        files: Files = {}
        found: list[Commit] = []
        earlier: dict[str, set[str]] = {}  # path → what it held before
        flags: Mapping[str, str] = {}
        for position, (change, moved) in enumerate(zip(history.changes, moves, strict=True)):
            before = {e.path: self._part(files[e.path], files) for e in moved if e.path in files}
            for entry in moved:
                files.pop(entry.path, None)
                if not GONE.fullmatch(entry.id):
                    files[entry.path] = entry
            key = self._key(files) if moved or not found else found[-1].key
            self._keys[change.id] = key
            relevant = position > 0 and key != found[-1].key
            why: list[str] = []
            if position == 0 or any(e.path in self._parts for e in moved):
                now = self._flags(files)
                why += _flag_words(flags, now) if position else []
                flags = now
            undoes = False
            if relevant:
                returns, words = self._returns(moved, files, before, earlier), title_says(change.title)
                undoes = bool(returns) or bool(UNDOING.search(change.title))
                why += [*returns, *(f"moves the submodule {e.path}" for e in moved if e.mode == SUBMODULE), *words]
            for path, content in before.items():
                earlier.setdefault(path, set()).add(content)
            found.append(
                Commit(key=key, relevant=relevant, why=tuple(why), undoes=undoes)
                if relevant
                else Commit(key=key, relevant=False)
            )
        return found

    # ---- inside ------------------------------------------------------------------------------------------

    def _key(self, files: Files) -> str:
        return digest(sorted([e.path, e.mode, self._part(e, files)] for e in files.values()))

    def _part(self, entry: Entry, files: Files) -> str:
        """What counts of a file: the id of its content, or a hash of the part that matters."""
        part = self._parts.get(entry.path)
        if part is None or entry.mode == SUBMODULE:
            return entry.id
        return hashlib.sha256(part.distil(self._content(entry), self._others(files))).hexdigest()

    def _flags(self, files: Files) -> dict[str, str]:
        """Flag → its default, as the parts of ``files`` define them."""
        present = [(part, files[path]) for path, part in self._parts.items() if path in files]
        return {k: v for part, e in present for k, v in part.flags(self._content(e), self._others(files)).items()}

    def _is_read(self, entry: Entry) -> bool:
        """Is its content looked at: a part itself, or a module that may mention what a part defines?"""
        here = entry.mode != SUBMODULE and not GONE.fullmatch(entry.id)
        return here and (entry.path in self._parts or entry.path.endswith(".py"))

    def _others(self, files: Files) -> Collection[bytes]:
        entries = [e for e in files.values() if self._is_read(e) and e.path not in self._parts]
        unread = [e.id for e in entries if e.id not in self._blobs]
        self._blobs.update(self.repo.blobs(unread))
        return [self._blobs[e.id] for e in entries]

    def _content(self, entry: Entry) -> bytes:
        if entry.id not in self._blobs:
            self._blobs.update(self.repo.blobs([entry.id]))
        return self._blobs[entry.id]

    def _returns(
        self, moved: Sequence[Entry], files: Files, before: Mapping[str, str], earlier: Mapping[str, set[str]]
    ) -> list[str]:
        """Files that hold again what they held before: a revert, whatever its title says."""
        back = [
            e.path for e in moved if e.path in files and self._part(files[e.path], files) in earlier.get(e.path, ())
        ]
        back = [path for path in back if before.get(path) != self._part(files[path], files)]
        return [f"{path} holds again what it held before" for path in back]


def title_says(title: str) -> list[str]:
    """Why a commit must be looked at, by its title alone."""
    word = WORDS.search(title)
    return [f"its title says {word[0].lower()!r}"] if word else []


def before_undoing(commits: Sequence[Commit]) -> frozenset[int]:
    """Positions right before those that take something back: a fault that came and went at once shows only there."""
    return frozenset(position - 1 for position, commit in enumerate(commits) if commit.undoes and position)


def _flag_words(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    moved = [
        f"moves the default of {name}: {old[name]} → {new[name]}"
        for name in new
        if old.get(name, new[name]) != new[name]
    ]
    return [*moved, *(f"adds the flag {name}" for name in new if name not in old)]


def pathspecs_of(target: Any, paths: Collection[PathSpec]) -> tuple[str, ...]:
    """What decides the answers of ``paths``."""
    return tuple(dict.fromkeys(spec for path in paths for spec in (path.relevant or target.RELEVANT)))
