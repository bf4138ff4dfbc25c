"""Commits as the byte stream that ``git fast-import`` reads (git-fast-import(1)); a pure function of the steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dsabisect.demo.edits import Step, Tree

BRANCH = "refs/heads/main"
BEGIN = 1_746_000_000  # seconds since the epoch: the first commit
HOURS_BETWEEN = 7
AUTHORS = (
    "Ada Osei <ada@example.com>",
    "Bruno Keller <bruno@example.com>",
    "Chen Min <chen@example.com>",
    "Dana Virtanen <dana@example.com>",
)
FIRST_PULL = 11  # number of the first pull request in the titles


def numbered(index: int, step: Step) -> str:
    """Title with the number of its pull request, as squash merges leave it."""
    return f"{step.title} (#{FIRST_PULL + index})"


def fast_import(steps: Sequence[Step]) -> bytes:
    """The whole history on ``main``, marks 1..n; after each commit its sha is asked for (``get-mark``)."""
    out: list[bytes] = [b"feature done\n"]
    tree: Tree = {}
    for index, step in enumerate(steps):
        before = dict(tree)
        for edit in step.edits:
            edit.apply(tree)
        out.extend(_commit(index, step, changes(before, tree)))
    out.append(b"done\n")
    return b"".join(out)


def changes(before: Tree, after: Tree) -> Iterator[tuple[str, str | None]]:
    """Paths that differ, sorted, with their new text or None when they are gone."""
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            yield path, after.get(path)


def _commit(index: int, step: Step, changed: Iterable[tuple[str, str | None]]) -> Iterator[bytes]:
    when = f"{BEGIN + index * HOURS_BETWEEN * 3600} +0000"
    who = AUTHORS[index * index % 7 % len(AUTHORS)]
    message = numbered(index, step) + "\n" + (f"\n{step.body}\n" if step.body else "")
    yield f"commit {BRANCH}\nmark :{index + 1}\nauthor {who} {when}\ncommitter {who} {when}\n".encode()
    yield _data(message)
    if index:
        yield f"from :{index}\n".encode()
    for path, text in changed:
        if text is None:
            yield f"D {path}\n".encode()
        else:
            yield f"M 100644 inline {path}\n".encode()
            yield _data(text)
    yield f"\nget-mark :{index + 1}\n".encode()


def _data(text: str) -> bytes:
    raw = text.encode()
    return b"data %d\n%b\n" % (len(raw), raw)
