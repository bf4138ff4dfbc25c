"""What a commit does to a tree of text files: put, swap, move, drop, and the undoing of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

Tree = dict[str, str]  # path → text


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One edit and the one that takes it back. ``apply`` changes the tree that it is given."""

    apply: Callable[[Tree], None]
    undo: Callable[[Tree], None]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One commit. ``name`` marks those that tests and the demo speak of."""

    title: str
    edits: tuple[Edit, ...]
    body: str = ""
    name: str = ""


def source(name: str) -> str:
    """Text of ``files/<name>.in``."""
    return (resources.files("dsabisect.demo") / "files" / f"{name}.in").read_text(encoding="utf-8")


def step(title: str, *edits: Edit, body: str = "", name: str = "") -> Step:
    return Step(title=title, edits=edits, body=body, name=name)


def put(path: str, text: str) -> Edit:
    """A new file."""

    def apply(tree: Tree) -> None:
        if path in tree:
            raise ValueError(f"{path} is already there")
        tree[path] = text

    return Edit(apply=apply, undo=lambda tree: _remove(tree, path))


def swap(path: str, old: str, new: str) -> Edit:
    """Replace the one place where ``old`` stands."""
    return Edit(apply=lambda tree: _replace(tree, path, old, new), undo=lambda tree: _replace(tree, path, new, old))


def after(path: str, old: str, added: str) -> Edit:
    """Insert ``added`` behind the one place where ``old`` stands."""
    return swap(path, old, old + added)


def append(path: str, added: str) -> Edit:
    """Add to the end of a file."""

    def apply(tree: Tree) -> None:
        tree[path] += added

    return Edit(apply=apply, undo=lambda tree: _replace(tree, path, added, ""))


def move(old: str, new: str) -> Edit:
    def there(tree: Tree) -> None:
        tree[new] = tree.pop(old)

    def back(tree: Tree) -> None:
        tree[old] = tree.pop(new)

    return Edit(apply=there, undo=back)


def undone(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edits of a revert: each taken back, the last one first."""
    return tuple(Edit(apply=edit.undo, undo=edit.apply) for edit in reversed(edits))


def _remove(tree: Tree, path: str) -> None:
    del tree[path]


def _replace(tree: Tree, path: str, old: str, new: str) -> None:
    if tree[path].count(old) != 1:
        raise ValueError(f"{path}: {tree[path].count(old)} places hold {old!r}")
    tree[path] = tree[path].replace(old, new)
