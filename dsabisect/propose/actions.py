"""What each action changes: a tree for it on top of a commit, or why there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsabisect.outside.workshop import Workshop
from dsabisect.propose import gate, hunks, revert

LITERAL = re.compile(rb"\b(?:True|False)\b")
OTHER = {b"True": b"False", b"False": b"True"}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tree with the action, and what a reader of the proposal must know of it."""

    kind: str  # "revert" | "revert_hunk" | "gate" (in the source) | "switch" (default of the existing switch)
    title: str  # subject of the commit
    tree: str  # "" when there is nothing to propose
    files: tuple[str, ...] = ()
    refused: str = ""  # why there is nothing to propose, one line
    conflicts: tuple[revert.Conflict, ...] = ()
    existing: tuple[revert.Existing, ...] = ()
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # what a person can run


def by_revert(workshop: Workshop, culprit: str, onto: str) -> Made:
    """The culprit taken back as a whole."""
    plan = revert.plan(workshop, culprit, onto)
    refused = ""
    if plan.existing:
        words = {"revert": "reverted", "reland": "relanded"}
        told = " and ".join(f"{words[e.kind]} by {e.change.short} (known by {e.by})" for e in plan.existing)
        refused = f"{plan.culprit.short} is already {told}"
    elif plan.conflicts:
        refused = (f"a revert of {plan.culprit.short} conflicts in {len(plan.conflicts)} files: HOLD, or fix forward "
                   "on top of the later commits")  # fmt: skip
    elif not plan.tree:
        refused = f"nothing of {plan.culprit.short} is left at {onto[:9]}"
    return Made(
        kind="revert", title=f'Revert "{plan.culprit.title}"', tree="" if refused else plan.tree, files=plan.files,
        refused=refused, conflicts=plan.conflicts, existing=plan.existing,
    )  # fmt: skip


def by_hunks(workshop: Workshop, culprit: str, onto: str, mends: Callable[[str], bool], limit: int) -> Made:
    """The smallest part of the culprit whose revert mends; ``mends`` measures a commit made on top of the culprit."""
    repo = workshop.repo
    change = repo.change(culprit)
    title = f'Revert part of "{change.title}"'
    existing = revert.find_existing(workshop, culprit, repo.resolve(f"{culprit}^1"), onto)
    if existing:
        return by_revert(workshop, culprit, onto)
    paths = repo.changed_files(culprit)
    parent = repo.resolve(f"{culprit}^1")
    old, new = ({p: repo.read(sha, p) for p in paths} for sha in (parent, culprit))
    found = hunks.split(old, new)

    def without(subset: Iterable[int]) -> str:
        tree = workshop.tree_with(culprit, hunks.reverted(found, subset, old, new))
        return workshop.commit(tree=tree, parents=(culprit,), message="subset\n", date=workshop.date_of(culprit))

    answer = hunks.smallest(len(found), lambda subset: mends(without(subset)), limit)
    if answer is None:
        why = "taking back every hunk does not mend it" if found else "it changes modes or submodules only"
        return Made(kind="revert_hunk", title=title, tree="", refused=f"no part of {change.short} can be chosen: {why}")
    chosen = [found[n] for n in answer.hunks]
    merged = workshop.merge(base=culprit, ours=onto, theirs=without(answer.hunks))
    files = workshop.differing(onto, merged.tree)
    refused = "" if files else f"nothing of these hunks is left at {onto[:9]}"
    if merged.conflicts:
        refused = f"these hunks conflict in {', '.join(merged.conflicts)}: HOLD, or fix forward"
    smallest = "no smaller part mends it" if answer.smallest else "no single hunk of these can be left out"
    notes = [f"{len(chosen)} of {len(found)} hunks, {answer.tried} parts measured; {smallest}",
             *(f"taken back: {h}" for h in chosen)]  # fmt: skip
    if answer.interacting:
        notes.append("these hunks are needed together")
    return Made(kind="revert_hunk", title=title, tree="" if refused else merged.tree, files=files, refused=refused,
                notes=tuple(notes))  # fmt: skip


def by_gate(workshop: Workshop, onto: str, predicate: Mapping[str, Any], path: str, target: Any, switch: str) -> Made:
    """A gate in the source; where none can be made, the default of the existing switch, and it says which it is."""
    shown = " and ".join(
        f"{k} = {v if not isinstance(v, list) else '/'.join(map(str, v))}" for k, v in predicate.items()
    )
    try:
        return _in_source(workshop, onto, predicate, path, target, shown)
    except gate.NoGate as why:
        return by_switch(workshop, onto, switch, target, f"no gate in the source: {why}")


def _in_source(workshop: Workshop, onto: str, predicate: Mapping[str, Any], path: str, target: Any, shown: str) -> Made:
    source = next((s for s in getattr(target, "GATES", ()) if s.path == path), None)
    if source is None:
        raise gate.NoGate(f"target {target.NAME} does not say where the switch of path {path} is read")
    file = next((f for f in source.files if workshop.repo.read(onto, f) is not None), None)
    if file is None:
        raise gate.NoGate(f"{', '.join(source.files)} is not there at {onto[:9]}")
    condition = expression(predicate, source.arguments)
    content = workshop.repo.read(onto, file) or b""
    try:
        made = gate.gate(content.decode(), switch=source.switch, predicate=condition)
    except UnicodeDecodeError as error:
        raise gate.NoGate(f"{file} is not UTF-8") from error
    tree = workshop.tree_with(onto, {file: made.source.encode()})
    notes = [f"{len(made.replaced)} reads in class {made.cls} now read self.{made.attribute}",
             f"in __init__: {made.assignment}"]  # fmt: skip
    notes += [f"still reads the global switch, look at it: {u.where}, line {u.line}" for u in made.left]
    return Made(kind="gate", title=f"Turn {source.switch} off where {shown}", tree=tree, files=(file,),
                notes=tuple(notes))  # fmt: skip


def expression(predicate: Mapping[str, Any], arguments: Mapping[str, Mapping[str, str]]) -> str:
    """`{"rope": "neox"}` → `is_neox_style`; several facets with `and`, several values of one with `or`.

    Raises:
        NoGate: a facet or a value that the constructor does not know.
    """
    parts = []
    for facet, wanted in predicate.items():
        values = wanted if isinstance(wanted, (list, tuple)) else [wanted]
        known = arguments.get(facet, {})
        missing = [v for v in values if str(v) not in known]
        if missing:
            raise gate.NoGate(f"no argument of the constructor tells {facet} = {missing[0]}")
        some = [known[str(v)] for v in values]
        parts.append(some[0] if len(some) == 1 else "(" + " or ".join(some) + ")")
    return " and ".join(parts)


def by_switch(workshop: Workshop, onto: str, switch: str, target: Any, because: str) -> Made:
    """The default of the existing switch, turned round where it is written as one True or False."""
    title = f"Turn round the default of {switch}" if switch else "No switch"
    if not switch:
        return Made(kind="switch", title=title, tree="", refused=f"{because}; and there is no switch to turn off")
    changed: dict[str, bytes | None] = {}
    for path in workshop.repo.files(onto, target.RELEVANT):
        content = workshop.repo.read(onto, path) if path.endswith(".py") else None
        turned = turned_round(content, switch.encode()) if content else None
        if turned is not None:
            changed[path] = turned
    if len(changed) != 1:
        where = "no line" if not changed else f"several files ({', '.join(changed)})"
        return Made(kind="switch", title=title, tree="", commands=(f"export {switch}=...",),
                    refused=f"{because}; and {where} can be told to hold the default of {switch}")  # fmt: skip
    tree = workshop.tree_with(onto, changed)
    return Made(kind="switch", title=title, tree=tree, files=tuple(changed),
                notes=(because, "this turns the default of the switch round for all; it is no gate"))  # fmt: skip


def turned_round(content: bytes, switch: bytes) -> bytes | None:
    """``content`` with the one line that names ``switch`` and holds one True or False turned round; else None."""
    named = re.compile(rb"(?<![\w])" + re.escape(switch) + rb"(?![\w])")
    lines = content.splitlines(keepends=True)
    hits = [n for n, line in enumerate(lines) if named.search(line) and len(LITERAL.findall(line)) == 1]
    if len(hits) != 1:
        return None
    lines[hits[0]] = LITERAL.sub(lambda m: OTHER[m[0]], lines[hits[0]])
    return b"".join(lines)


def lines_of(conflicts: Sequence[revert.Conflict]) -> list[tuple[str, list[str]]]:
    """For each file in conflict the later commits that touch its lines, as `sha title`."""
    return [(c.path, [f"{x.short} {x.title}" for x in c.later]) for c in conflicts]
