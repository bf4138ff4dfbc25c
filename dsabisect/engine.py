"""The only loop: ends → probes → confirm → advise, every measured cell in the journal before it is used.

`run` answers about a range, `check` about one commit. Both return the report document and the exit code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsabisect import conclude
from dsabisect.conclude import Axis
from dsabisect.errors import EnvironmentFault, Interrupted, UsageError
from dsabisect.model import Action, Column, Observation, Outcome, Reason, Recommendation, Verdict, to_json
from dsabisect.outside import store
from dsabisect.outside.gitrepo import History
from dsabisect.reason import judge, plan, timeline
from dsabisect.reason.plan import Plan, Probe
from dsabisect.reason.timeline import Kind, State
from dsabisect.relevance import before_undoing
from dsabisect.report import build as report_build
from dsabisect.session import Request, Say, Session, commits_of, marks, now, open_session

CHECK_GOOD, CHECK_BAD, CHECK_SKIP = 0, 1, 125
MARKED = {
    "good": timeline.GOOD,
    "bad": State(kind=Kind.BAD, signature=timeline.MARKED),
    "skip": State(kind=Kind.SKIP, signature="asked"),
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    report: Mapping[str, Any]
    exit_code: int
    run_dir: Path


def run(request: Request, say: Say) -> Answer:
    """Tell the timeline between two commits, name the first diverging change and say what to do about it."""
    with ExitStack() as stack:
        session, history, _ = open_session(request, say, stack)
        assert history is not None
        return _finishing(session, lambda: _run(session, history))


def check(request: Request, say: Say) -> Answer:
    """Measure one commit. Speaks `git bisect run`: 0 good, 1 bad, 125 skip; every fault of ours is 128 or more."""
    with ExitStack() as stack:
        session, _, sha = open_session(request, say, stack)
        return _finishing(session, lambda: _check(session, sha))


def _finishing(session: Session, work: Callable[[], tuple[str, int]]) -> Answer:
    """Whatever happens, the journal says how it ended and the report of what was measured is written."""
    keep = True
    try:
        status, code = work()
        keep = False
    except KeyboardInterrupt as stop:
        _end(session, "interrupted", 130)
        raise Interrupted(
            "interrupted; what was measured is kept",
            where=str(session.evaluator.run_dir),
            remedy=f"Go on with the same command and --resume --out {session.evaluator.run_dir}",
        ) from stop
    except BaseException as fault:
        _end(session, f"stopped: {type(fault).__name__}: {fault}", getattr(fault, "exit_code", 131))
        raise
    finally:
        for evaluator in session.evaluators:
            if keep:
                evaluator.runner.close()  # first: else the pool waits for builds that nobody wants any more
            evaluator.close(keep=keep)
    return _end(session, status, code)


def _end(session: Session, status: str, code: int) -> Answer:
    seconds = round(time.monotonic() - session.began, 3)
    session.journal.append("end", {"status": status, "exit_code": code, "finished": now(), "seconds": seconds})
    report = report_build.build(session.journal.events())
    run_dir = session.evaluator.run_dir
    store.write_text(run_dir / "report.json", report_build.dumps(report))
    return Answer(report=report, exit_code=code, run_dir=run_dir)


# ---- check -------------------------------------------------------------------------------------------------


def _check(session: Session, sha: str) -> tuple[str, int]:
    change = session.evaluator.repo.change(sha)
    session.journal.append("range", {"changes": [to_json(change)], "relevant": [sha], "note": ""})
    observations = session.evaluate(change, session.columns, purpose="check")
    return check_answer(observations)


def check_answer(observations: Sequence[Observation]) -> tuple[str, int]:
    """Bad when any cell is bad, good when any is good and none is bad, else untestable.

    A path that is absent is good: before it was introduced it cannot have diverged.
    """
    verdicts = {o.verdict for o in observations}
    if Verdict.BAD in verdicts:
        return "bad", CHECK_BAD
    if Verdict.GOOD not in verdicts:
        return "untestable", CHECK_SKIP
    measured = any(o.verdict is Verdict.GOOD and o.outcome is not Outcome.ABSENT for o in observations)
    return "good" if measured else "good: the path is absent at this commit", CHECK_GOOD


# ---- run ---------------------------------------------------------------------------------------------------


def axis_of(session: Session, history: History) -> Axis:
    """Positions to search: the good end, every commit that changes what matters, the bad end."""
    commits = commits_of(session, history)
    at = [0, *(p for p in range(1, len(commits) - 1) if commits[p].relevant), len(commits) - 1]
    axis = Axis(
        history=history,
        at=tuple(at),
        keys=tuple(commits[p].key for p in at),
        why={i: commits[p].why for i, p in enumerate(at) if commits[p].why},
        before_undoing=before_undoing([commits[p] for p in at]),
    )
    request = session.request
    window = 0 if request.first else (request.window or plan.window_for(len(at)))
    session.journal.append(
        "range",
        {
            "changes": [to_json(c) for c in history.changes],
            "relevant": [c.id for c, commit in zip(history.changes, commits, strict=True) if commit.relevant],
            "must_look": [] if request.first else [{"sha": axis[i].id, "why": list(w)} for i, w in axis.why.items()],
            "window": window,
            "note": history.note,
        },
    )
    if history.note:
        session.say(history.note)
    touching = sum(commit.relevant for commit in commits)
    looked = "" if request.first else f", {len(axis.why)} of them say that they may change answers"
    session.say(f"{len(commits) - 1} commits, {touching} touch the indexer{looked}")
    return axis


def _run(session: Session, history: History) -> tuple[str, int]:
    axis = axis_of(session, history)
    request = session.request
    asked = {session.evaluator.repo.resolve(rev) for rev in request.skip}
    for end in (axis[0], axis[len(axis.at) - 1]):
        if end.id in asked:
            raise UsageError(f"{end.short} is an end of the range and cannot be skipped", remedy="Choose another end")
    for sha in sorted(asked):
        session.journal.append("skip", {"sha": sha, "reason": "asked"})
    wanted = _suspected(session, axis)
    search = Plan(
        keys=axis.keys,
        columns=session.columns,
        suspects=frozenset((*(() if request.first else axis.why), *wanted)),
        also=frozenset((*(() if request.first else axis.before_undoing), *(p - 1 for p in wanted if p))),
        window=0 if request.first else (request.window or plan.window_for(len(axis.keys))),
    )
    _take_marks(session, axis, search, asked)
    ends, failures = _ends(session, axis, search)
    if ends.status is judge.EndpointStatus.BOTH_FAIL_ALIKE:
        raise EnvironmentFault(ends.hint, where="both endpoints", remedy=ends.remedy)
    empty = ends.status in (judge.EndpointStatus.NOTHING_DIVERGES, judge.EndpointStatus.UNTESTABLE)
    if empty and not request.first and not _hopeless(ends, search):
        session.say("neither end is bad: looking for what lies between")
    elif ends.hint:
        if request.first and ends.status is judge.EndpointStatus.NOTHING_DIVERGES:
            session.note("only both ends were measured: without --first the commits between are looked at too")
        session.note(ends.hint + (f". {_remedy(session, history, ends)}" if ends.remedy else ""))
    if ends.status is not judge.EndpointStatus.SEARCHABLE and (request.first or _hopeless(ends, search)):
        return _not_searchable(session, ends)
    sought = {column: failures[column] for column in ends.diverging} if request.first else {}
    search.closed |= {c for c in session.columns if request.first and c not in sought}
    _search(session, axis, search, sought)
    return conclude.conclude(session, axis, search, ends)


def _hopeless(ends: judge.Endpoints, search: Plan) -> bool:
    """Is there nothing that a timeline could tell? Bad at both ends in all columns, or nothing learnt at either.

    A path that is absent at one end and not taken at the other may well have come and been bad in between.
    """
    if ends.status is judge.EndpointStatus.GOOD_END_IS_BAD:
        return not ends.mended and not ends.steady
    seen = [series[p].kind for series in search.series.values() for p in (0, search.last) if p in series]
    return all(kind is Kind.SKIP for kind in seen)


def _remedy(session: Session, history: History, ends: judge.Endpoints) -> str:
    """What to do about ends that do not hold, with a commit to try: as far back again as the range is long."""
    if ends.status is not judge.EndpointStatus.GOOD_END_IS_BAD:
        return ends.remedy
    older = session.evaluator.repo.older(history.changes[0].id, len(history.changes) - 1)
    return f"{ends.remedy}; try --good {older[:12]}" if older else ends.remedy


def _suspected(session: Session, axis: Axis) -> list[int]:
    """Positions of the commits that a person suspects."""
    asked = [session.evaluator.repo.resolve(rev) for rev in session.request.suspect]
    at = {sha: axis.position(sha) for sha in asked}
    if left_out := [sha for sha, position in at.items() if position is None]:
        session.note(f"{_shas(left_out)}: nothing that matters changes there, or not in the range: not suspected")
    return [position for position in at.values() if position is not None]


def _shas(shas: Sequence[str]) -> str:
    """`1111111, 2222222 and 3 more`"""
    some = ", ".join(sha[:9] for sha in shas[:3])
    return some + (f" and {len(shas) - 3} more" if len(shas) > 3 else "")


def _take_marks(session: Session, axis: Axis, search: Plan, skipped: set[str]) -> None:
    """What a person said counts as seen, at that commit alone."""
    said = [*({"sha": sha, "verdict": "skip", "column": ""} for sha in sorted(skipped)), *marks(session)]
    idle = []
    for mark in said:
        position = axis.position(mark["sha"])
        if position is None:
            idle.append(mark["sha"])
            continue
        session.marked.add(position)
        for column in session.columns:
            if mark["column"] in ("", str(column)):
                search.series[column][position] = MARKED[mark["verdict"]]
    if idle:
        told = _shas(list(dict.fromkeys(idle)))
        session.note(f"{told}: nothing that matters changes there: skipping or marking it changes nothing")


def _ends(session: Session, axis: Axis, search: Plan) -> tuple[judge.Endpoints, dict[Column, str]]:
    """Both ends are measured before anything is believed. Also the failures at the bad end, by column."""
    session.evaluator.prefetch([axis[0].id, axis[search.last].id])
    good, bad = (session.evaluate(axis[p], session.columns, purpose="endpoint") for p in (0, search.last))
    for position, observations in ((0, good), (search.last, bad)):
        for observation in observations:
            if position not in search.series[observation.column]:  # a person's word stands
                search.take(position, observation.column, timeline.state_of(observation))
            if observation.reason is Reason.NONDETERMINISTIC:
                search.closed.add(observation.column)
                session.flaky.add(observation.column)
    return judge.endpoints(good, bad), {o.column: judge.signature(o) for o in bad}


def _not_searchable(session: Session, ends: judge.Endpoints) -> tuple[str, int]:
    status = ends.status
    nothing = status is judge.EndpointStatus.NOTHING_DIVERGES
    action = Action.NONE if nothing else Action.HOLD
    recommendation = Recommendation(action=action, because=(ends.hint,) if ends.hint else ())
    session.journal.append("recommendation", {**to_json(recommendation), "columns": []})
    if nothing:
        return "nothing diverges", conclude.EXIT_CLEAN
    if status is judge.EndpointStatus.GOOD_END_IS_BAD:
        return "the good endpoint does not hold", conclude.EXIT_GOOD_END
    return "untestable", conclude.EXIT_SUSPECTS


# ---- search ------------------------------------------------------------------------------------------------


def _search(session: Session, axis: Axis, search: Plan, sought: Mapping[Column, str]) -> None:
    """Measure what the plan asks for until it asks for nothing, or the budget ends."""
    while (probe := search.next()) is not None:
        if session.out_of_budget():
            session.note("the budget is spent: what follows is the best that was reached")
            return
        left = search.remaining()
        ahead = search.ahead(max(session.request.jobs, len(session.evaluators)) + 1)
        for evaluator in session.evaluators:
            if evaluator.jobs > 1:
                evaluator.prefetch(axis[p].id for p in ahead[: evaluator.jobs])
        others = [search.probe_at(p) for p in ahead[1 : len(session.evaluators)]]
        batch = [probe, *(other for other in others if other.columns)]
        for one, observations in zip(batch, _measure(session, axis, batch, left), strict=True):
            for observation in observations:
                search.take(one.position, observation.column, _state(observation, sought.get(observation.column, "")))
                if observation.reason is Reason.NONDETERMINISTIC:  # searched by repetition: see flaky
                    search.closed.add(observation.column)
                    session.flaky.add(observation.column)


def _state(observation: Observation, sought: str) -> State:
    """In a plain bisection another failure than the sought one is untestable, and so is a path that was not taken."""
    state = timeline.state_of(observation)
    other = state.kind is Kind.BAD and judge.against(observation, sought) is Verdict.SKIP
    if sought and (other or state.kind is Kind.OFF):
        return State(kind=Kind.SKIP, signature=state.signature or observation.reason.value)
    return state


def _measure(session: Session, axis: Axis, batch: Sequence[Probe], left: int) -> list[list[Observation]]:
    """The probes of a batch, one a device, side by side; results in the order of the batch."""

    def one(number: int) -> list[Observation]:
        probe = batch[number]
        return session.evaluate(axis[probe.position], probe.columns, purpose="search", on=number, left=left - 1)

    if len(batch) == 1:
        return [one(0)]
    with ThreadPoolExecutor(max_workers=len(batch), thread_name_prefix="device") as pool:
        return list(pool.map(one, range(len(batch))))
