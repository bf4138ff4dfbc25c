"""What to do about a culprit: revert, revert one hunk, gate, or hold. Rules of docs/verdicts.md, "Advice".

GATE needs a condition that is fixed when the model is built and that separates the bad cells of the path from its good
ones, and a switch that turns the path off. A condition that depends on the batch cannot be gated for an instance.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from dsabisect.model import (
    Action,
    Change,
    Choice,
    Column,
    Facet,
    Gate,
    Observation,
    PathSpec,
    Reason,
    Recommendation,
    Verdict,
)  # fmt: skip

STATIC = ("rope", "arch", "heads", "page", "scale", "deep_gemm")  # fixed when the model is built
PER_BATCH = ("mode", "next_n", "layout", "lens", "graph", "data")  # differ from one batch to the next
DEFAULTS = ("default",)  # paths that force nothing: they follow whatever a gate selects
OTHER_ARCH = {"sm90": "sm100", "sm100": "sm90", "sm120": "sm90"}
Predicate = Mapping[str, Choice]
Cells = Sequence[Observation]


def advise(
    *,
    culprit: Change,
    suspects: Sequence[str],
    observations: Cells,
    diverging: Sequence[Column],
    path: PathSpec,
    switch: str,
    confirmed: bool,
    arch: str,
    flips: Sequence[str] = (),
    forced_unchanged: bool = False,
    context: Sequence[str] = (),
    known_notes: Collection[str] = (),
    defaults: Collection[str] = DEFAULTS,
    before: Cells = (),
    unsure: tuple[str, str] = ("", ""),
) -> Recommendation:
    """The recommendation for ``culprit`` from every cell measured there.

    ``observations``: all columns at the culprit. ``flips``: "old → new" lines of its patch that move a switch's
    default. ``forced_unchanged``: every forced path answers at the culprit as at its parent. ``known_notes``: what the
    probe noted at the parent too. ``defaults``: names of the paths that force nothing.
    ``before``: the same columns at the parent. ``unsure``: where runs disagree, why nobody is named and which run would
    tell more.
    """
    if len(suspects) != 1 or not confirmed:
        return _hold(suspects, culprit, context, unsure)
    broken = [o for o in observations if o.column in set(diverging) and o.verdict is Verdict.BAD]
    if not broken:
        return _unmeasured(culprit, context)
    because = [_what_broke(broken)]
    notes = (*_beside(observations, broken, before), *_notes(observations, context, known_notes))
    if flips and forced_unchanged:
        because.append("each forced path answers as at the parent: only the default selection changed")
        because += [f"the change moves a default: {flip}" for flip in flips]
        return Recommendation(action=Action.REVERT_HUNK, change=culprit.id, because=(*because, *notes))
    mine = [o for o in observations if o.path == path.name and o.reason is not Reason.ABSENT]
    bad, good = [o for o in broken if o.path == path.name], [o for o in mine if o.verdict is Verdict.GOOD]
    because += _spread(path, bad, good, observations)
    missing = (*_untested(mine, path), *_other_arch(culprit, path, mine or broken, arch))
    static = separating(bad, good, STATIC)
    refused = _why_not_gate(path, bad, good, static, switch) or _left_bad(path, static, broken, defaults)
    if refused:
        lines = (*because, *refused, *notes)
        return Recommendation(action=Action.REVERT, change=culprit.id, because=lines, missing=missing)
    if len(static) > 1:
        return _confounded(culprit, static, switch, good, (*because, *notes))
    return _gate(culprit, path, static[0], switch, bad, good, because, notes, missing)


# ---- predicates ---------------------------------------------------------------------------------------------


def separating(bad: Cells, good: Cells, facets: Sequence[str]) -> list[Predicate]:
    """Every smallest conjunction of ``facet == value`` or ``facet in values`` that all bad cells meet and no good one.

    A condition on a facet that some cells do not name would be a guess about them: such facets are left out. For each
    facet the narrowest condition is the set of values that the bad cells have, so that only the facets are searched.
    """
    if not bad or not good:
        return []
    every = (*bad, *good)
    narrowest = {f: _choice({o.facets[f] for o in bad}) for f in facets if all(f in o.facets for o in every)}
    for size in range(1, len(narrowest) + 1):
        tried = [{f: narrowest[f] for f in names} for names in combinations(narrowest, size)]
        found = [p for p in tried if not any(holds(p, o) for o in good)]
        if found:
            return list(found)
    return []


def _choice(values: set[Facet]) -> Choice:
    ordered = sorted(values, key=lambda v: (str(type(v)), v))
    return ordered[0] if len(ordered) == 1 else tuple(ordered)


def holds(predicate: Predicate, cell: Observation) -> bool:
    """Does the cell meet every condition? A facet that it does not name is met by nothing."""
    wanted = {f: v if isinstance(v, tuple) else (v,) for f, v in predicate.items()}
    return all(f in cell.facets and cell.facets[f] in values for f, values in wanted.items())


def text_of(predicate: Predicate) -> str:
    """`rope = neox and arch in {sm100, sm120}`"""
    return " and ".join(_condition(name, value) for name, value in predicate.items())


def _condition(name: str, value: Choice) -> str:
    return f"{name} in {{{', '.join(map(str, value))}}}" if isinstance(value, tuple) else f"{name} = {value}"


# ---- recommendations ----------------------------------------------------------------------------------------


def _gate(
    culprit: Change, path: PathSpec, predicate: Predicate, switch: str, bad: Cells, good: Cells,
    because: Sequence[str], notes: Sequence[str], missing: Sequence[str],
) -> Recommendation:  # fmt: skip
    told = (
        f"{text_of(predicate)} holds for all {len(bad)} bad cells of {path.name} and for none of its {len(good)} good"
        " ones; it is fixed when the model is built"
    )
    gate = Gate(
        predicate=dict(predicate),
        switch=switch,
        stays_on=_values(path, predicate, good),
        goes_off=_values(path, predicate, bad),
    )
    lines = (*because, told, *notes)
    return Recommendation(action=Action.GATE, change=culprit.id, gate=gate, because=lines, missing=tuple(missing))


def _values(path: PathSpec, predicate: Predicate, cells: Cells) -> tuple[str, ...]:
    seen = sorted({text_of({f: o.facets[f] for f in predicate}) for o in cells})
    return tuple(f"{path.name} for {text}" for text in seen)


def _confounded(
    culprit: Change, static: Sequence[Predicate], switch: str, good: Cells, because: Sequence[str]
) -> Recommendation:
    both = " or ".join(text_of(p) for p in static)
    others = tuple(dict(p) for p in static[1:])
    needed = dict.fromkeys(_apart(one, other, good) for one in static for other in static if one != other)
    return Recommendation(
        action=Action.HOLD,
        change=culprit.id,
        gate=Gate(predicate=dict(static[0]), alternatives=others, switch=switch),
        because=(*because, f"the cells that were run cannot tell {both} apart: each of them separates bad from good"),
        missing=tuple(f"a case with {case}, before a gate can be named: try --suite full" for case in needed),
    )


def _apart(one: Predicate, other: Predicate, good: Cells) -> str:
    """Facets of a case that meets ``one`` and not ``other``, in values that good cells have."""
    fails: dict[str, Choice] = {f: _choice({o.facets[f] for o in good}) for f in other if f not in one}
    return text_of({**one, **fails})


def _hold(suspects: Sequence[str], culprit: Change, context: Sequence[str], unsure: tuple[str, str]) -> Recommendation:
    if unsure[0]:
        return Recommendation(action=Action.HOLD, because=(unsure[0], *context), missing=(unsure[1],))
    if len(suspects) > 1:
        some = ", ".join(s[:9] for s in suspects[:6]) + (f" and {len(suspects) - 6} more" if len(suspects) > 6 else "")
        because = f"any of {len(suspects)} commits may be the cause: the ones between could not be tested"
        missing = f"make one of {some} testable"
        return Recommendation(action=Action.HOLD, because=(because, *context), missing=(missing,))
    return _unmeasured(culprit, context)


def _unmeasured(culprit: Change, context: Sequence[str]) -> Recommendation:
    return Recommendation(
        action=Action.HOLD,
        change=culprit.id,
        because=("the culprit was not confirmed: see the notes", *context),
        missing=(f"run again with --good {culprit.short}~1 --bad {culprit.short}",),
    )


# ---- why not a gate -----------------------------------------------------------------------------------------


def _why_not_gate(
    path: PathSpec, bad: Cells, good: Cells, static: Sequence[Predicate], switch: str
) -> list[str]:  # fmt: skip
    """Reasons, none when a gate is possible."""
    no_switch = [] if switch else [f"nothing in the repository turns {path.name} off: there is no switch to gate"]
    if any(o.reason in (Reason.NONDETERMINISTIC, Reason.FLAKY) for o in bad):
        return [f"{path.name} is not repeatable under identical inputs: no condition makes that right"]
    if not good:
        return [f"every cell of {path.name} that could be run is bad: there is nothing to keep on", *no_switch]
    if static:
        return [f"{' or '.join(map(text_of, static))} separates bad from good", *no_switch] if no_switch else []
    batch = separating(bad, good, PER_BATCH)
    if batch:
        told = " or ".join(text_of(p) for p in batch[:3])
        return [f"the condition is {told}: it changes from batch to batch, no instance can be gated on it", *no_switch]
    apart = _by_failure(bad, good)
    return [*(apart or ["no condition over the facets separates the bad cells from the good ones"]), *no_switch]


def _by_failure(bad: Cells, good: Cells) -> list[str]:
    """Where the change broke several things at once: the condition of each, told apart by how it fails."""
    kinds: dict[str, list[Observation]] = {}
    for cell in bad:
        kinds.setdefault(cell.failure.signature if cell.failure else cell.reason.value, []).append(cell)
    if len(kinds) < 2:
        return []
    lines = []
    for cells in kinds.values():
        found = separating(cells, good, (*STATIC, *PER_BATCH))
        when = " or ".join(map(text_of, found[:3])) or "no condition separates them"
        lines.append(f"{len(cells)} cells, when {when}: {cells[0].detail}")
    return lines


def _left_bad(path: PathSpec, static: Sequence[Predicate], broken: Cells, defaults: Collection[str]) -> list[str]:
    """What would stay bad if ``path`` went off where the condition holds; none when the gate mends everything."""
    forced = sorted({o.path for o in broken} - {path.name, *defaults})
    if forced:
        return [f"{', '.join(forced)} diverges too, and a gate on {path.name} does not turn that off"]
    follows = [o for o in broken if o.path != path.name]
    left = [o for o in follows if not all(holds(p, o) for p in static)]
    if left:
        told = " or ".join(map(text_of, static))
        return [f"off for {told}, {len(left)} of {len(follows)} bad default cells stay bad, such as {left[0].column}"]
    return []


# ---- sentences ----------------------------------------------------------------------------------------------


def _what_broke(broken: Cells) -> str:
    worst = broken[0]
    many = f"{len(broken)} cells that are good at the parent are"
    cells = "1 cell that is good at the parent is" if len(broken) == 1 else many
    return f"{cells} bad here ({worst.reason.value}); {worst.column}: {worst.detail}"


def _spread(path: PathSpec, bad: Cells, good: Cells, every: Cells) -> list[str]:
    lines = [f"path {path.name}: {len(bad)} cells diverge, {len(good)} are good"]
    for other in sorted({o.path for o in every} - {path.name}):
        mine = [o for o in every if o.path == other and o.reason is not Reason.ABSENT]
        if mine:
            lines.append(f"path {other}: {sum(o.verdict is Verdict.GOOD for o in mine)} of {len(mine)} cells good")
    return lines


def _beside(every: Cells, broken: Cells, before: Cells) -> tuple[str, ...]:
    """Bad cells that this answer does not accuse the change of: they were bad before, or fail in another way."""
    earlier = {o.column: o.detail for o in before}
    ours = {o.column for o in broken}
    others = [o for o in every if o.verdict is Verdict.BAD and o.column not in ours]
    if not others:
        return ()
    kinds = sorted({o.reason.value for o in others})
    first = others[0]
    told = f"{len(others)} more bad cell(s) ({', '.join(kinds)}), such as {first.column}: {first.detail}"
    was = earlier.get(first.column, "")
    at_parent = f"; at the parent: {was}" if was and was != first.detail else ""
    return (f"not laid to this change: {told}{at_parent}",)


def _notes(observations: Cells, context: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    noted = dict.fromkeys(note for o in observations for note in o.notes)
    return (*context, *(f"{note} (at the parent too)" if note in known else note for note in noted))


def _untested(mine: Cells, path: PathSpec) -> tuple[str, ...]:
    skipped = [o for o in mine if o.verdict is Verdict.SKIP]
    if not skipped:
        return ()
    kinds = ", ".join(sorted({o.reason.value for o in skipped}))
    return (f"{len(skipped)} cell(s) of {path.name} could not be tested ({kinds}), such as {skipped[0].column}",)


def _other_arch(culprit: Change, path: PathSpec, cells: Cells, arch: str) -> tuple[str, ...]:
    """The run on another architecture without which nothing is known about a gate on ``arch``."""
    archs = {str(o.facets.get("arch", arch)) for o in cells}
    if len(archs) != 1 or next(iter(archs)) not in OTHER_ARCH:
        return ()
    only = next(iter(archs))
    other = OTHER_ARCH[only]
    return (
        f"only {only} was run: what holds on {other}, and so a gate on arch, needs an {other} run. On such a device:"
        f" dsabisect check {culprit.id[:12]} --path {path.name} --device cuda:0 with the same --repo and --target",
    )


# ---- what a patch does beside its purpose -------------------------------------------------------------------

THRESHOLD = re.compile(r"threshold|accuracy|\batol\b|\brtol\b|toleranc|baseline|min_score|\bscore", re.IGNORECASE)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def threshold_edits(patch: str) -> tuple[str, ...]:
    """`file: old → new` for lines of a unified diff in which only a number changed beside a word for a threshold."""
    found: list[str] = []
    removed: list[str] = []
    file = ""
    for line in patch.splitlines():
        if line.startswith("+++ "):
            file, removed = line[4:].removeprefix("b/"), []
        elif line.startswith("@@"):
            removed = []
        elif line.startswith("-") and not line.startswith("---"):
            removed.append(line[1:].strip())
        elif line.startswith("+") and THRESHOLD.search(line):
            new = line[1:].strip()
            same = [old for old in removed if old != new and NUMBER.sub("N", old) == NUMBER.sub("N", new)]
            found += [f"{file}: {old} → {new}" for old in same]
    return tuple(dict.fromkeys(found))
