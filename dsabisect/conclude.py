"""From what was seen to an answer: name the steps, confirm each accusation, advise on the first.

Only a step that *breaks* something accuses a commit, so only those are confirmed: parent and culprit, neighbours in the
full history, from clean builds, P, C, P, C. Steps that mend are located, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsabisect import flaky, terminal
from dsabisect.errors import RepositoryError
from dsabisect.model import Action, Change, Column, Observation, Recommendation, Transition, TransitionKind, to_json
from dsabisect.outside.gitrepo import GitRepo, History
from dsabisect.reason import advise, judge, timeline
from dsabisect.reason.plan import Plan, first_step
from dsabisect.reason.timeline import Kind, Step
from dsabisect.session import Session

EXIT_CLEAN, EXIT_CONFIRMED, EXIT_SUSPECTS, EXIT_GOOD_END = 0, 1, 2, 3
CONFIRM_ROUNDS = 2
ACCUSING = (TransitionKind.INTRODUCED, TransitionKind.EXPOSED)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The commits that are searched, as positions; ``at`` says where each stands in the full history."""

    history: History
    at: tuple[int, ...]
    keys: tuple[str, ...]
    why: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # position → why it must be looked at
    before_undoing: frozenset[int] = frozenset()  # positions right before commits that take something back

    def __getitem__(self, position: int) -> Change:
        return self.history.changes[self.at[position]]

    def position(self, sha: str) -> int | None:
        """Position of a commit; None when it was left out, or lies outside."""
        return next((i for i, p in enumerate(self.at) if self.history.changes[p].id == sha), None)

    def between(self, after: int, upto: int) -> tuple[str, ...]:
        """Shas of the full history in (after, upto]: those that were left out come back as suspects."""
        return tuple(c.id for c in self.history.changes[self.at[after] + 1 : self.at[upto] + 1])


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The last clean run of parent and culprit, and whether all runs held, by column."""

    held: Mapping[Column, bool] = field(default_factory=dict)
    parent: tuple[Observation, ...] = ()
    culprit: tuple[Observation, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One step of one column, with its name and how sure it is."""

    column: Column
    step: Step
    kind: TransitionKind
    suspects: tuple[str, ...]
    good: str
    confirmed: bool = False
    confidence: float = 1.0

    @property
    def accuses(self) -> bool:
        return self.kind in ACCUSING


def conclude(session: Session, axis: Axis, search: Plan, ends: judge.Endpoints) -> tuple[str, int]:
    """Transitions and the recommendation, in the journal; the status line and the exit code."""
    steps = name_steps(session, search)
    located = sorted({step.upto for _, step, kind in steps if kind in ACCUSING and step.upto - step.after == 1})
    confirmations: dict[int, Confirmation] = {}
    tallies = flaky.Tallies()
    for column in sorted(session.flaky):
        tallies.begin(column, search, {})
    for position in located:
        accused = [(c, s) for c, s, kind in steps if s.upto == position and s.upto - s.after == 1 and kind in ACCUSING]
        if confirmations and session.out_of_budget():
            session.note(f"{axis[position].short} was not confirmed: the budget is spent")
            continue
        confirmations[position] = _confirm(session, axis, search, accused, tallies, everything=not confirmations)
    found = [_finding(axis, c, s, kind, confirmations) for c, s, kind in steps if c not in search.closed]
    found += [_of_flaky(axis, verdict) for verdict in flaky.settle(session, axis, search, tallies)]
    found.sort(key=lambda f: (f.step.upto, f.step.after, session.columns.index(f.column)))
    for finding in found:
        session.journal.append("transition", to_json(_transition(axis, finding)))
    return _answer(session, axis, search, found, confirmations, ends)


def name_steps(session: Session, search: Plan) -> list[tuple[Column, Step, TransitionKind]]:
    """Every step of every column, by its name (see :func:`timeline.kind_of`)."""
    defaults = [name for name, path in session.evaluator.paths.items() if path.default_selection]
    named = []
    for column in session.columns:
        if column in search.closed:
            continue
        series = search.series[column]
        forced = timeline.partners(column, search.series, defaults)
        for step in timeline.steps(series) if search.window else first_step(series):
            named.append((column, step, timeline.kind_of(step, forced)))
    return named


def _finding(
    axis: Axis, column: Column, step: Step, kind: TransitionKind, confirmations: Mapping[int, Confirmation]
) -> Finding:
    exact = step.upto - step.after == 1
    held = exact and kind in ACCUSING and bool(confirmations.get(step.upto, Confirmation()).held.get(column))
    alone = held or (exact and kind not in ACCUSING)  # nobody is accused: the commits left out need not come back
    suspects = (axis[step.upto].id,) if alone else axis.between(step.after, step.upto)
    before = axis.history.changes[axis.at[step.upto] - 1] if alone else axis[step.after]
    return Finding(column=column, step=step, kind=kind, suspects=suspects, good=before.id, confirmed=held)


def _of_flaky(axis: Axis, verdict: flaky.Settled) -> Finding:
    position, sure = verdict.position, verdict.confidence >= flaky.SURE
    first, last = (position, position) if sure else (verdict.credible[0], verdict.credible[-1])
    old, new = timeline.GOOD, timeline.State(kind=Kind.BAD, signature="flaky")
    return Finding(
        column=verdict.column,
        step=Step(after=first - 1, upto=last, old=old, new=new),
        kind=TransitionKind.INTRODUCED,
        suspects=(axis[position].id,) if sure else axis.between(first - 1, last),
        good=axis.history.changes[axis.at[first] - 1].id,
        confirmed=sure,
        confidence=min(round(verdict.confidence, 4), 0.9999),  # 1 says that all runs agree
    )


def _transition(axis: Axis, finding: Finding) -> Transition:
    return Transition(
        path=finding.column.path,
        case=finding.column.case,
        kind=finding.kind,
        good=finding.good,
        bad=axis[finding.step.upto].id,
        suspects=finding.suspects,
        confirmed=finding.confirmed,
        confidence=finding.confidence,
    )


def _answer(
    session: Session,
    axis: Axis,
    search: Plan,
    found: Sequence[Finding],
    confirmations: Mapping[int, Confirmation],
    ends: judge.Endpoints,
) -> tuple[str, int]:
    accusing = [f for f in found if f.accuses]
    if not accusing:
        return _nothing_accused(session, axis, search, found, ends)
    first = accusing[0]
    mine = [f for f in accusing if (f.suspects, f.confirmed) == (first.suspects, first.confirmed)]
    confirmation = confirmations.get(first.step.upto, Confirmation())
    unsteady = [f.column for f in mine if f.confidence < 1]
    if unsteady:
        parent, culprit = flaky.observed(session, axis, first.step.upto, unsteady)
        confirmation = Confirmation(parent=parent, culprit=culprit)
    _recommend(session, axis, mine, confirmation)
    if first.confirmed:
        return "first diverging change confirmed", EXIT_CONFIRMED
    count = len(first.suspects)
    return ("unconfirmed" if count == 1 else f"narrowed to {count} suspects"), EXIT_SUSPECTS


def _nothing_accused(
    session: Session, axis: Axis, search: Plan, found: Sequence[Finding], ends: judge.Endpoints
) -> tuple[str, int]:
    mended = tuple(dict.fromkeys(f"{f.kind.value} by {_name(axis, f)}" for f in found))
    because = (*((ends.hint,) if ends.hint else ()), *mended)
    if not found and ends.hint and not ends.broken:
        session.note(f"{ends.hint}. {ends.remedy}")
    action = Action.HOLD if ends.broken else Action.NONE
    recommendation = Recommendation(action=action, because=because)
    session.journal.append("recommendation", {**to_json(recommendation), "columns": []})
    if ends.broken:
        return "the good endpoint does not hold", EXIT_GOOD_END
    if search.next() is not None:
        return "not finished: the budget is spent before anything was found", EXIT_SUSPECTS
    if _untestable_between(search):
        return "untestable between the ends", EXIT_SUSPECTS
    if not any(state.kind is Kind.GOOD for series in search.series.values() for state in series.values()):
        return "untestable", EXIT_SUSPECTS
    _say_what_may_hide(session, search)
    return "nothing diverges", EXIT_CLEAN


def _say_what_may_hide(session: Session, search: Plan) -> None:
    """An all-clear rests on the window: what came and went within it was not looked for."""
    seen = {position for series in search.series.values() for position in series}
    left = search.last + 1 - len(seen)
    if search.window > 1 and left:
        session.note(
            f"{left} relevant commits between equal answers were not measured: a change that came and went within fewer"
            f" than {search.window} of them would be missed; --window 1 looks at each"
        )


def _untestable_between(search: Plan) -> bool:
    """Was everything that was asked between the ends untestable?"""
    between = [s for series in search.series.values() for p, s in series.items() if 0 < p < search.last]
    return bool(between) and all(state.kind is Kind.SKIP for state in between)


def _name(axis: Axis, finding: Finding) -> str:
    change = axis[finding.step.upto]
    one = len(finding.suspects) == 1
    return f"{change.short} {change.title}" if one else f"one of {len(finding.suspects)} commits up to {change.short}"


# ---- confirmation ------------------------------------------------------------------------------------------


def _confirm(
    session: Session,
    axis: Axis,
    search: Plan,
    accused: Sequence[tuple[Column, Step]],
    tallies: flaky.Tallies,
    *,
    everything: bool,
) -> Confirmation:
    """Parent and culprit, adjacent in the full history, from clean builds, interleaved P, C, P, C.

    ``everything``: every column of the run is measured, so that the advice sees the good cells beside the bad ones.
    A column whose answer did not repeat goes to the search by repetition.
    """
    position = accused[0][1].upto
    culprit, parent = axis[position], axis.history.changes[axis.at[position] - 1]
    columns = session.columns if everything else tuple(column for column, _ in accused)
    session.say(f"confirming {culprit.short} against its parent {parent.short}: P, C, P, C from clean builds")
    terminal.doing(session.say, f"confirming {culprit.short} from clean builds")
    runs = session.evaluator.confirm((parent.id, culprit.id), columns, CONFIRM_ROUNDS)
    session.count([o for turns in runs.values() for turn in turns for o in turn])
    same = session.evaluator.build_of(parent.id).key == session.evaluator.build_of(culprit.id).key
    if same:
        session.note(f"{culprit.short} has the same relevant tree and pins as its parent: it cannot be the cause")
    parents, culprits = (session.evaluator.binaries.get(sha, "") for sha in (parent.id, culprit.id))
    if parents and parents == culprits:
        session.note("the compiled modules of parent and culprit are byte for byte the same: the cause is not in them")
    held: dict[Column, bool] = {}
    against: dict[str, list[tuple[Column, str]]] = {}
    for column, step in accused:
        of = {sha: [next(o for o in turn if o.column == column) for turn in turns] for sha, turns in runs.items()}
        before, after = of[parent.id], of[culprit.id]
        answer = disagreement(step, before, after)
        held[column] = answer is None and not same
        if answer is not None:
            against.setdefault(answer.partition(": ")[0], []).append((column, answer))
            if {position - 1, position} & session.marked:
                continue
            search.closed.add(column)
            tallies.begin(column, search, {position - 1: before, position: after})
    for told in against.values():
        session.note(f"{flaky.several([column for column, _ in told])}: not confirmed: {told[0][1]}")
    if against and {position - 1, position} & session.marked:
        session.note(f"a mark at {axis[position].short} or right before it contradicts what was measured")
    return Confirmation(held=held, parent=tuple(runs[parent.id][-1]), culprit=tuple(runs[culprit.id][-1]))


def disagreement(step: Step, parent: Sequence[Observation], culprit: Sequence[Observation]) -> str | None:
    """None when every run of the parent shows the old state and every run of the culprit the new one, else why not."""
    for run, state in [*((run, step.old) for run in parent), *((run, step.new) for run in culprit)]:
        seen = timeline.state_of(run)
        fine = {Kind.GOOD, Kind.ABSENT}
        said = timeline.MARKED in (seen.signature, state.signature) and seen.kind is state.kind
        if seen != state and not said and not {seen.kind, state.kind} <= fine:
            who = "the parent " if state is step.old else ""
            return f"{who}{run.sha[:9]} was {run.verdict.value} ({run.reason.value}) when run again: {run.detail}"
    if len(parent) < 2 or len(culprit) < 2:
        return "it was not run again at least twice"
    return None


# ---- advice ------------------------------------------------------------------------------------------------


def _recommend(
    session: Session,
    axis: Axis,
    mine: Sequence[Finding],
    confirmation: Confirmation,
) -> None:
    evaluator = session.evaluator
    first = mine[0]
    culprit = axis[first.step.upto]
    columns = tuple(f.column for f in mine)
    paths = sorted({c.path for c in columns})
    forced = [p for p in paths if not evaluator.paths[p].default_selection]
    name = (forced or paths)[0]
    patch = evaluator.repo.patch(culprit.id)
    recommendation = advise.advise(
        culprit=culprit,
        suspects=first.suspects,
        observations=confirmation.culprit,
        diverging=columns,
        path=evaluator.paths[name],
        switch=evaluator.target.gate_switch(evaluator.paths[name]),
        confirmed=first.confirmed,
        arch=evaluator.device.arch,
        flips=_flips(session, patch),
        forced_unchanged=_forced_unchanged(session, confirmation),
        context=_context(evaluator.repo, axis.history, culprit, patch),
        known_notes=frozenset(note for o in confirmation.parent for note in o.notes),
        defaults=tuple(name for name, path in evaluator.paths.items() if path.default_selection),
        before=confirmation.parent,
        unsure=_unsure(axis, first),
    )
    session.journal.append("recommendation", {**to_json(recommendation), "columns": [str(c) for c in columns]})


def _unsure(axis: Axis, first: Finding) -> tuple[str, str]:
    """(why nobody is named, the run that would tell more) of a column whose runs disagree; ("", "") of others."""
    if first.confidence == 1 or first.confirmed:
        return "", ""
    good, bad = axis[first.step.after].short, axis[first.step.upto].short
    return (
        f"{first.column} does not repeat, and its runs do not tell these commits apart (posterior"
        f" {first.confidence:.2f} for the likeliest)",
        f"more runs on fewer commits: --good {good} --bad {bad} --rerun",
    )


def _forced_unchanged(session: Session, confirmation: Confirmation) -> bool:
    """Does every forced path answer at the culprit as it does at the parent?"""
    paths, before = session.evaluator.paths, {o.column: o.verdict for o in confirmation.parent}
    forced = [o for o in confirmation.culprit if not paths[o.path].default_selection]
    return bool(forced) and all(before.get(o.column) is o.verdict for o in forced)


def _flips(session: Session, patch: str) -> tuple[str, ...]:
    """Lines of the culprit's patch that move the default of a known switch."""
    target = session.evaluator.target
    switches = {target.gate_switch(p) for p in target.PATHS} - {""}
    lines = [line for line in patch.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    removed = {line[1:].strip() for line in lines if line[:1] == "-"}
    added = {line[1:].strip() for line in lines if line[:1] == "+"}
    return tuple(
        sorted(
            f"{old} → {new}"
            for switch in switches
            for old in removed
            for new in added
            if switch in old and switch in new
        )
    )


def _context(repo: GitRepo, history: History, culprit: Change, patch: str) -> tuple[str, ...]:
    """What the history says about the culprit: reverts, relands, edits of thresholds inside it."""
    tips = _tips(repo, history)
    reverts = {c.id: c for tip in tips for c in repo.reverts_of(culprit.id, tip)}
    relands = {c.id: c for tip in tips for c in repo.relands_of(culprit.id, tip)}
    lines = [f"already reverted by {c.short} {c.title}" for c in reverts.values()]
    lines += [f"relanded by {c.short} {c.title}" for c in relands.values()]
    if merged := repo.merged(culprit.id):
        lines.append(f"it is a merge: what it brought in can be searched with --good {merged[0]} --bad {merged[1]}")
    lines += [f"the change itself moves a threshold: {edit}" for edit in advise.threshold_edits(patch)]
    return tuple(lines)


def _tips(repo: GitRepo, history: History) -> tuple[str, ...]:
    """The bad end, and HEAD: the revert usually lies after the range."""
    try:
        return tuple(dict.fromkeys((history.changes[-1].id, repo.resolve("HEAD"))))
    except RepositoryError:  # a HEAD that names nothing is no fault of the run
        return (history.changes[-1].id,)
