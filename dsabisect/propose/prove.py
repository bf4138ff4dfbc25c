"""The proof of a proposal: old, new and new with the action, measured on the same columns; and what it says.

The one way to the measuring side is :data:`Measure`. A proof holds when everything that broke is mended and nothing
that was good is not good any more. What could not be measured is never counted as mended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsabisect.model import Action, Column, Observation, Outcome, Verdict

Measure = Callable[[str, Sequence[Column]], Sequence[Observation]]  # (sha, columns) → one observation a column


@dataclass(frozen=True, kw_only=True)
class Row:
    """One column at the three trees."""

    column: Column
    old: Observation
    new: Observation
    applied: Observation

    @property
    def broke(self) -> bool:
        return self.old.verdict is Verdict.GOOD and self.new.verdict is Verdict.BAD


@dataclass(frozen=True, kw_only=True)
class Proof:
    action: Action
    rows: tuple[Row, ...]
    mended: tuple[Column, ...]
    not_mended: tuple[Column, ...]
    newly_broken: tuple[Column, ...]
    lost: tuple[Column, ...]  # good before the action by its own path, and that path is not taken or there any more
    still_bad: tuple[Column, ...]  # bad at all three: not this change's doing

    @property
    def holds(self) -> bool:
        return bool(self.mended) and not self.not_mended and not self.newly_broken

    @property
    def words(self) -> str:
        """`12 cells mended, none broken`, or why it does not hold."""
        return self.why_not or f"{cells(len(self.mended))} mended, none broken"

    @property
    def why_not(self) -> str:
        """ "" when it holds."""
        if self.not_mended:
            return f"{_some(self.not_mended)} not mended by it"
        if self.newly_broken:
            return f"{_some(self.newly_broken)} broken by it"
        return "" if self.mended else "nothing that it could mend is bad on top of what it is applied to"


def prove(*, action: Action, old: str, new: str, applied: str, columns: Sequence[Column], measure: Measure) -> Proof:
    """Measure three commits on ``columns`` and judge the action."""
    seen = [{o.column: o for o in measure(sha, columns)} for sha in (old, new, applied)]
    rows = tuple(Row(column=c, old=seen[0][c], new=seen[1][c], applied=seen[2][c]) for c in columns)
    return Proof(
        action=action,
        rows=rows,
        mended=_columns(rows, lambda r: r.new.verdict is Verdict.BAD and is_mended(r, action)),
        not_mended=_columns(rows, lambda r: r.broke and not is_mended(r, action)),
        newly_broken=_columns(rows, lambda r: r.new.verdict is Verdict.GOOD and _breaks(r, action)),
        lost=_columns(rows, lambda r: r.new.verdict is Verdict.GOOD and _gone(r.applied) and not _gone(r.new)),
        still_bad=_columns(rows, lambda r: r.old.verdict is r.new.verdict is r.applied.verdict is Verdict.BAD),
    )


def is_mended(row: Row, action: Action) -> bool:
    """Good again; or, for a gate, not taken any more: a forced path that refuses is what a gate is for.

    A revert may take a path away altogether: it is absent then, as it was before the change.
    """
    if row.applied.verdict is Verdict.GOOD:
        return True
    return action is Action.GATE and row.applied.outcome is Outcome.NOT_EXERCISED


def _breaks(row: Row, action: Action) -> bool:
    """Good without the action; with it bad, or not measurable though the parent was good too.

    A path that the culprit brought goes with it: that is a loss, and told as one. A gate must leave it on.
    """
    applied = row.applied
    if applied.verdict is Verdict.GOOD:
        return _gone(applied) and not _gone(row.new) and action is Action.GATE
    brought = _gone(row.old)
    return not (action is not Action.GATE and brought and _gone(applied))


def cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def shown(observation: Observation) -> str:
    """Verdict as reports show it: an absent path is neither good nor bad."""
    return "absent" if observation.outcome is Outcome.ABSENT else observation.verdict.value


def _gone(observation: Observation) -> bool:
    return observation.outcome in (Outcome.ABSENT, Outcome.NOT_EXERCISED)


def _columns(rows: Sequence[Row], wanted: Callable[[Row], bool]) -> tuple[Column, ...]:
    return tuple(r.column for r in rows if wanted(r))


def _some(columns: Sequence[Column]) -> str:
    shown = ", ".join(map(str, columns[:3]))
    return (
        f"{shown} and {len(columns) - 3} more are" if len(columns) > 3 else f"{shown} {'are' if columns[1:] else 'is'}"
    )


def dependents(
    *, plain: Mapping[str, str], reverted: Callable[[str], str], columns: Sequence[Column], measure: Measure
) -> dict[str, tuple[Column, ...]]:
    """Later commits whose own columns break when the culprit goes.

    Args:
        plain: later commit → its own parent, for those that may depend on the culprit.
        reverted: gives the commit with the culprit taken back, "" when that does not apply.
    Returns:
        later commit → columns that it made good (bad or absent at its parent) and that are not good without the
        culprit. A commit on which the revert does not apply is not in it: its conflict says so already.
    """
    found: dict[str, tuple[Column, ...]] = {}
    for sha, parent in plain.items():
        without = reverted(sha)
        if not without:
            continue
        before, own, after = ({o.column: o for o in measure(s, columns)} for s in (parent, sha, without))
        broken = tuple(
            c
            for c in columns
            if own[c].verdict is Verdict.GOOD
            and not _gone(own[c])
            and (before[c].verdict is not Verdict.GOOD or _gone(before[c]))
            and (after[c].verdict is not Verdict.GOOD or _gone(after[c]))
        )
        if broken:
            found[sha] = broken
    return found
