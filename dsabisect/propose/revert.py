"""Take one commit back on top of another: a three-way merge of trees, without a work tree.

Base is the culprit, ours the tip, theirs the culprit's parent: what `git revert` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsabisect.errors import RepositoryError
from dsabisect.model import Change
from dsabisect.outside.workshop import Workshop

MARKERS = (b"<<<<<<< ", b">>>>>>> ")
LATER_LIMIT = 200  # commits looked at for each conflicting file


@dataclass(frozen=True, kw_only=True)
class Conflict:
    path: str
    later: tuple[Change, ...]  # commits after the culprit that touch the lines in conflict, oldest first


@dataclass(frozen=True, kw_only=True)
class Existing:
    """A commit that already takes the culprit back, or brings it back, and how that is known."""

    change: Change
    kind: str  # "revert" | "reland"
    by: str  # "its words" | "its patch"


@dataclass(frozen=True, kw_only=True)
class Revert:
    culprit: Change
    onto: str  # sha
    tree: str  # "" when there is nothing to propose
    files: tuple[str, ...]
    conflicts: tuple[Conflict, ...]
    existing: tuple[Existing, ...]

    @property
    def applies(self) -> bool:
        return bool(self.tree) and not self.conflicts and not self.existing


def plan(workshop: Workshop, culprit: str, onto: str) -> Revert:
    """What a revert of ``culprit`` on top of ``onto`` would be.

    Raises:
        RepositoryError: ``onto`` does not contain the culprit, or the culprit has no parent.
    """
    repo = workshop.repo
    culprit, onto = workshop.user.resolve(culprit), workshop.user.resolve(onto)  # branches are the user's
    if not _contains(workshop, onto, culprit):
        raise RepositoryError(f"{onto[:9]} does not contain {culprit[:9]}", where=str(workshop.user.path),
                              remedy="Give a later commit or a branch with --onto")  # fmt: skip
    parent = repo.resolve(f"{culprit}^1")
    existing = find_existing(workshop, culprit, parent, onto)
    if existing:
        return Revert(culprit=repo.change(culprit), onto=onto, tree="", files=(), conflicts=(), existing=existing)
    merged = workshop.merge(base=culprit, ours=onto, theirs=parent)
    conflicts = tuple(
        Conflict(path=path, later=_touching_lines(workshop, culprit, parent, onto, path)) for path in merged.conflicts
    )
    files = workshop.differing(onto, merged.tree)
    tree = merged.tree if files else ""
    return Revert(culprit=repo.change(culprit), onto=onto, tree=tree, files=files, conflicts=conflicts, existing=())


def find_existing(workshop: Workshop, culprit: str, parent: str, onto: str) -> tuple[Existing, ...]:
    """Reverts and relands of the culprit up to ``onto``: by what commits say, and by the patch itself."""
    repo = workshop.repo
    found: dict[str, Existing] = {}
    for kind, told in (("revert", repo.reverts_of(culprit, onto)), ("reland", repo.relands_of(culprit, onto))):
        for change in told:
            found.setdefault(change.id, Existing(change=change, kind=kind, by="its words"))
    back, again = workshop.patch_id(culprit, parent), workshop.patch_id(parent, culprit)
    later = repo.later_touching(culprit, onto)
    for change in later:
        id = workshop.patch_id(f"{change.id}^1", change.id)
        if id and id in (back, again):
            kind = "revert" if id == back else "reland"
            found.setdefault(change.id, Existing(change=change, kind=kind, by="its patch"))
    order = {change.id: at for at, change in enumerate(later)}
    return tuple(sorted(found.values(), key=lambda e: (order.get(e.change.id, len(order)), e.change.date)))


def _contains(workshop: Workshop, tip: str, sha: str) -> bool:
    if tip == sha:
        return True
    try:
        return workshop.repo.history(sha, tip).changes[0].id == sha
    except RepositoryError:
        return False


def _touching_lines(workshop: Workshop, culprit: str, parent: str, onto: str, path: str) -> tuple[Change, ...]:
    """Later commits after which the conflict in ``path`` is another one than before: these touch its lines."""
    later = workshop.repo.later_touching(culprit, onto)[-LATER_LIMIT:]
    found = []
    for change in later:
        before = f"{change.id}^1"
        if path not in workshop.differing(before, change.id):
            continue
        seen = [_conflict_text(workshop, culprit, parent, at, path) for at in (before, change.id)]
        if seen[0] != seen[1]:
            found.append(change)
    return tuple(found)


def _conflict_text(workshop: Workshop, culprit: str, parent: str, onto: str, path: str) -> tuple[bytes, ...]:
    """The blocks between conflict markers of ``path``, markers left out; a note when there are none to show."""
    merged = workshop.merge(base=culprit, ours=onto, theirs=parent)
    if path not in merged.conflicts:
        return ()
    content = workshop.read_tree_file(merged.tree, path)
    if content is None:
        return (b"file gone",)
    blocks: list[bytes] = []
    inside = False
    for line in content.splitlines(keepends=True):
        if line.startswith(MARKERS):
            inside = line.startswith(MARKERS[0])
            blocks += [b""] if inside else []
        elif inside:
            blocks[-1] += line
    return tuple(blocks) or (b"no text",)
