"""What to do about a culprit: revert, revert one hunk, gate, or hold. Rules of docs/verdicts.md, "Advice".

GATE needs a condition that is fixed when the model is built and that separates the bad cells of the path from its good
ones, and a switch that turns the path off. A condition that depends on the batch cannot be gated for an instance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations, product

from dsabisect.model import Action, Change, Column, Facet, Gate, Observation, PathSpec, Reason, Recommendation, Verdict

STATIC = ("rope", "arch", "heads", "page", "scale", "deep_gemm")
PER_BATCH = ("mode", "next_n", "layout", "lens", "graph", "data")
Predicate = Mapping[str, Facet]


def advise(
    *,
    culprit: Change,
    suspects: Sequence[str],
    observations: Sequence[Observation],
    diverging: Sequence[Column],
    path: PathSpec,
    switch: str,
    confirmed: bool,
    arch: str,
    flips: Sequence[str] = (),
    forced_unchanged: bool = False,
    context: Sequence[str] = (),
) -> Recommendation:
    """The recommendation for ``culprit`` from every cell measured there.

    ``observations``: all columns at the culprit. ``flips``: "old → new" lines of its patch that move a switch's default.
    ``forced_unchanged``: every forced path answers at the culprit as at its parent.
    """
    if len(suspects) != 1 or not confirmed:
        return _hold(suspects, culprit, context)
    because = [_what_broke(observations, diverging)]
    notes = _notes(observations, context)
    if flips and forced_unchanged:
        because.append("each forced path answers as at the parent: only the default selection changed")
        because += [f"the change moves a default: {flip}" for flip in flips]
        return Recommendation(action=Action.REVERT_HUNK, change=culprit.id, because=(*because, *notes))
    mine = [o for o in observations if o.path == path.name and o.reason is not Reason.ABSENT]
    bad = [o for o in mine if o.column in set(diverging)]
    good = [o for o in mine if o.verdict is Verdict.GOOD]
    because += _spread(path, bad, good, observations)
    missing = _missing(arch)
    static = separating(bad, good, STATIC)
    nondeterministic = any(o.reason is Reason.NONDETERMINISTIC for o in bad)
    if not static or not switch or nondeterministic:
        why = _why_not_gate(bad, good, static, switch, nondeterministic)
        return Recommendation(
            action=Action.REVERT, change=culprit.id, because=(*because, *why, *notes), missing=missing
        )
    if len(static) > 1:
        return _confounded(culprit, static, because, notes)
    return _gate(culprit, path, static[0], switch, bad, good, (*because, *notes), missing)


# ---- predicates ---------------------------------------------------------------------------------------------


def separating(bad: Sequence[Observation], good: Sequence[Observation], facets: Sequence[str]) -> list[Predicate]:
    """Every smallest conjunction of ``facet == value`` that holds for all bad cells and for no good one."""
    if not bad or not good:
        return []
    values = {f: sorted({o.facets[f] for o in bad if f in o.facets}, key=str) for f in facets}
    known = [f for f in facets if len(values[f]) == 1 and all(f in o.facets for o in (*bad, *good))]
    for size in range(1, len(known) + 1):
        found = [p for names in combinations(known, size) for p in _conjunctions(names, values) if not _holds_any(p, good)]
        if found:
            return found
    return []


def _conjunctions(names: Sequence[str], values: Mapping[str, Sequence[Facet]]) -> list[Predicate]:
    return [dict(zip(names, chosen, strict=True)) for chosen in product(*(values[n] for n in names))]


def _holds_any(predicate: Predicate, cells: Sequence[Observation]) -> bool:
    return any(all(o.facets.get(f) == v for f, v in predicate.items()) for o in cells)


def text_of(predicate: Predicate) -> str:
    return " and ".join(f"{name} = {value}" for name, value in predicate.items())


# ---- recommendations ----------------------------------------------------------------------------------------


def _gate(
    culprit: Change, path: PathSpec, predicate: Predicate, switch: str, bad: Sequence[Observation],
    good: Sequence[Observation], because: Sequence[str], missing: Sequence[str],
) -> Recommendation:  # fmt: skip
    return Recommendation(
        action=Action.GATE,
        change=culprit.id,
        gate=Gate(
            predicate=dict(predicate),
            switch=switch,
            stays_on=_values(path, predicate, good),
            goes_off=_values(path, predicate, bad),
        ),
        because=(
            *because,
            f"{text_of(predicate)} holds for all {len(bad)} bad cells of {path.name} and for none of its {len(good)} good ones;"
            " it is fixed when the model is built",
        ),
        missing=tuple(missing),
    )


def _values(path: PathSpec, predicate: Predicate, cells: Sequence[Observation]) -> tuple[str, ...]:
    seen = sorted({" ".join(f"{f}={o.facets[f]}" for f in predicate) for o in cells})
    return tuple(f"{path.name} for {text}" for text in seen)


def _confounded(culprit: Change, static: Sequence[Predicate], because: Sequence[str], notes: Sequence[str]) -> Recommendation:
    both = " or ".join(text_of(p) for p in static)
    first, second = static[0], static[1]
    return Recommendation(
        action=Action.HOLD,
        change=culprit.id,
        gate=Gate(predicate=dict(first), alternatives=tuple(dict(p) for p in static[1:])),
        because=(*because, f"the cells that were run cannot tell {both} apart", *notes),
        missing=(f"a case with {text_of(first)} but not {text_of(second)}, and one the other way round: try --suite full",),
    )


def _hold(suspects: Sequence[str], culprit: Change, context: Sequence[str]) -> Recommendation:
    if len(suspects) > 1:
        because = f"any of {len(suspects)} commits may be the cause: the ones between could not be tested"
        missing = f"make one of {', '.join(s[:9] for s in suspects[:6])} testable"
    else:
        because = "the culprit was not confirmed: see the notes"
        missing = "run again, with the culprit and its parent as ends"
    return Recommendation(
        action=Action.HOLD, change=culprit.id if len(suspects) == 1 else "", because=(because, *context), missing=(missing,)
    )


# ---- sentences ----------------------------------------------------------------------------------------------


def _what_broke(observations: Sequence[Observation], diverging: Sequence[Column]) -> str:
    broken = [o for o in observations if o.column in set(diverging)]
    if not broken:
        return "the diverging cells were not measured again"
    worst = broken[0]
    return f"{len(broken)} cells that are good at the parent are bad here ({worst.reason.value}); {worst.column}: {worst.detail}"


def _spread(path: PathSpec, bad: Sequence[Observation], good: Sequence[Observation], every: Sequence[Observation]) -> list[str]:
    lines = [f"path {path.name}: {len(bad)} cells diverge, {len(good)} are good"]
    others = sorted({o.path for o in every} - {path.name})
    for other in others:
        mine = [o for o in every if o.path == other and o.reason is not Reason.ABSENT]
        if mine:
            lines.append(f"path {other}: {sum(o.verdict is Verdict.GOOD for o in mine)} of {len(mine)} cells good")
    return lines


def _why_not_gate(
    bad: Sequence[Observation], good: Sequence[Observation], static: Sequence[Predicate], switch: str, nondeterministic: bool
) -> list[str]:
    if nondeterministic:
        return ["the path is not repeatable under identical inputs: no condition makes that right"]
    if not good:
        return ["every cell of the path is bad: there is nothing to keep on"]
    if static and not switch:
        return [f"{text_of(static[0])} separates, but the change has no switch to gate"]
    batch = separating(bad, good, PER_BATCH)
    if batch:
        told = " or ".join(text_of(p) for p in batch[:3])
        end = "" if switch else ", and the change has no switch"
        return [f"the condition is {told}: it changes from batch to batch, so that no instance can be gated on it{end}"]
    return ["no condition over the facets separates the bad cells from the good ones"]


def _missing(arch: str) -> tuple[str, ...]:
    if arch == "cpu":
        return ()
    other = "sm100" if arch != "sm100" else "sm90"
    return (f"only {arch} was run: whether {other} is good, and so a gate on arch, needs the same command on an {other} device",)


def _notes(observations: Sequence[Observation], context: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*context, *(note for o in observations for note in o.notes))))


# ---- what a patch does beside its purpose -------------------------------------------------------------------

THRESHOLD = re.compile(r"threshold|accuracy|\batol\b|\brtol\b|toleranc|baseline|min_score|\bscore", re.IGNORECASE)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def threshold_edits(patch: str) -> tuple[str, ...]:
    """`file: old → new` for lines of a unified diff in which only a number changed beside a word for a threshold."""
    found, file, removed = [], "", []
    for line in patch.splitlines():
        if line.startswith("+++ "):
            file, removed = line[4:].removeprefix("b/"), []
        elif line.startswith("@@"):
            removed = []
        elif line.startswith("-") and not line.startswith("---"):
            removed.append(line[1:].strip())
        elif line.startswith("+") and THRESHOLD.search(line):
            new = line[1:].strip()
            found += [f"{file}: {old} → {new}" for old in removed if old != new and NUMBER.sub("N", old) == NUMBER.sub("N", new)]
    return tuple(found)
