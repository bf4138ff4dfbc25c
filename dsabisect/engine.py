"""The only loop: endpoints → search → confirm → advise, every measured cell in the journal before it is used.

`run` answers about a range, `check` about one commit. Both return the report document and the exit code.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsabisect
from dsabisect import targets
from dsabisect.errors import EnvironmentFault, Interrupted, RepositoryError, UsageError
from dsabisect.model import (
    Action,
    Change,
    Column,
    Device,
    Limits,
    Observation,
    Outcome,
    PathSpec,
    Recommendation,
    Transition,
    TransitionKind,
    Verdict,
    to_json,
)  # fmt: skip
from dsabisect.outside import store
from dsabisect.outside.gitrepo import GitRepo, History
from dsabisect.outside.runner import Runner
from dsabisect.reason import advise, judge, search
from dsabisect.report import build as report_build

if TYPE_CHECKING:
    from dsabisect import evaluate
    from dsabisect.outside import golden

Say = Callable[[str], None]
EXIT_CLEAN, EXIT_CONFIRMED, EXIT_SUSPECTS, EXIT_GOOD_END = 0, 1, 2, 3
CHECK_GOOD, CHECK_BAD, CHECK_SKIP = 0, 1, 125
CONFIRM_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that a person may ask for."""

    repo: Path
    target: str
    good: str | None = None  # None: `check`, one commit
    bad: str = ""
    paths: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()  # ids or prefixes; () = the whole suite
    suite: str = "default"
    device: str = "cpu"
    golden: Path | tuple[Path, ...] = ()  # folders of golden sets; () = the one that comes with the package
    out: Path | None = None
    build_env: Mapping[str, str] = field(default_factory=dict)
    submodules: Mapping[str, Path] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    max_evals: int | None = None
    max_minutes: float | None = None
    jobs: int = 1
    interpreter: str = sys.executable
    limits: Limits = field(default_factory=Limits)
    resume: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    report: Mapping[str, Any]
    exit_code: int
    run_dir: Path


@dataclass(kw_only=True)
class Session:
    """One run in flight."""

    request: Request
    evaluator: evaluate.Evaluator
    journal: store.Journal
    columns: tuple[Column, ...]
    say: Say
    began: float
    evaluated: set[str] = field(default_factory=set)

    def out_of_budget(self) -> bool:
        request = self.request
        spent = (time.monotonic() - self.began) / 60
        return (request.max_evals is not None and len(self.evaluated) >= request.max_evals) or (
            request.max_minutes is not None and spent >= request.max_minutes
        )

    def note(self, text: str) -> None:
        self.journal.append("note", {"text": text})
        self.say(text)

    def evaluate(self, change: Change, columns: Sequence[Column], *, purpose: str) -> list[Observation]:
        began = time.monotonic()
        observations = self.evaluator.evaluate(change.id, columns, purpose=purpose)
        self.evaluated.add(change.id)
        self.say(f"{change.short}  {summary(observations)}  {time.monotonic() - began:5.1f} s  {change.title[:60]}")
        return observations


def summary(observations: Sequence[Observation]) -> str:
    """`4 good · 2 bad (diverged) · 1 skip (build_failed)`"""
    parts = []
    for verdict in Verdict:
        of = [o for o in observations if o.verdict is verdict]
        if of:
            reasons = sorted({o.reason.value for o in of} - {"matched"})
            parts.append(f"{len(of)} {verdict.value}" + (f" ({', '.join(reasons)})" if reasons else ""))
    return " · ".join(parts) or "nothing measured"


# ---- opening -----------------------------------------------------------------------------------------------


def choose_paths(target: Any, asked: Sequence[str]) -> dict[str, PathSpec]:
    known = {path.name: path for path in target.PATHS}
    names = tuple(dict.fromkeys(asked or target.DEFAULT_PATHS))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"unknown path {unknown[0]!r}", where=f"target {target.NAME}", remedy=f"Known: {', '.join(known)}"
        )
    return {name: known[name] for name in names}


def choose_columns(
    target: Any, paths: Mapping[str, PathSpec], cases: Sequence[Any], device: Device
) -> tuple[tuple[Column, ...], dict[str, str]]:
    """Columns that can run here, and for each path without one the reason why."""
    columns: list[Column] = []
    refused: dict[str, str] = {}
    for name, path in paths.items():
        why = [(case, target.supports(path, case, device)) for case in cases]
        mine = [Column(path=name, case=case.id) for case, no in why if no is None]
        if not mine:
            refused[name] = next((no for _, no in why if no), "no case fits")
        columns += mine
    return tuple(columns), refused


def choose_cases(goldens: golden.GoldenSet, suite: str, asked: Sequence[str]) -> tuple[Any, ...]:
    cases = goldens.cases(suite)
    if not asked:
        return tuple(cases)
    chosen = tuple(c for c in cases if any(c.id == name or c.id.startswith(name) for name in asked))
    if not chosen:
        raise UsageError(f"no case of suite {suite!r} begins with {asked[0]!r}", remedy="`dsabisect cases` lists them")
    return chosen


def open_session(request: Request, say: Say, stack: ExitStack) -> tuple[Session, History | None, str]:
    """Everything that can be wrong with a request is found here, the cheap things first."""
    target = targets.load(request.target)
    paths = choose_paths(target, request.paths)
    work = store.work_root()
    repo = GitRepo(request.repo, work)
    history = repo.history(request.good, request.bad) if request.good is not None else None
    sha = history.changes[-1].id if history else repo.resolve(request.bad)
    # Here and not above: these load torch, and a wrong word on the command line deserves its answer at once.
    from dsabisect import evaluate
    from dsabisect.outside import calibration, golden

    goldens = golden.load(request.golden)
    cases = choose_cases(goldens, request.suite, request.cases)
    default = run_name(request, history, sha)
    run_dir = (request.out or store.default_run_dir(Path.cwd() / "dsabisect-runs", default)).absolute()
    evaluate.writable(run_dir)
    runner = stack.enter_context(
        Runner(
            interpreter=request.interpreter,
            work=run_dir / "work",
            limits=request.limits,
            build_env=request.build_env,
            log_root=run_dir / "logs",
        )
    )
    environment = runner.environment(request.device)
    device = Device(name=request.device, arch=environment["arch"])
    columns, refused = choose_columns(target, paths, cases, device)
    for name, why in refused.items():
        say(f"path {name}: not measured here: {why}")
    if not columns:
        raise UsageError(
            f"nothing to measure on {request.device}: " + "; ".join(f"{n}: {w}" for n, w in refused.items()),
            remedy="Choose another --path, --suite or --device; `dsabisect cases --target` shows what runs where",
        )
    used = {c.case for c in columns}
    goldens, said = calibration.applied(goldens, [c for c in cases if c.id in used], target=target.NAME, device=device)
    if said:
        say(said)
    golden.verify_controls(goldens, [c for c in cases if c.id in used], work / "controls")
    journal = store.Journal.resume(run_dir) if request.resume else store.Journal.create(run_dir)
    stack.callback(journal.close)
    evaluator = evaluate.Evaluator(
        repo=repo,
        target=target,
        runner=runner,
        goldens=goldens,
        device=device,
        paths=paths,
        cases={c.id: c for c in cases},
        run_dir=run_dir,
        environment_key=evaluate.environment_key(environment, goldens.key),
        build_env=request.build_env,
        submodules=request.submodules,
        interpreter=request.interpreter,
        record=lambda observation: journal.append("observation", to_json(observation)),
        note=lambda text: journal.append("note", {"text": text}),
        jobs=request.jobs,
    )
    session = Session(
        request=request, evaluator=evaluator, journal=journal, columns=columns, say=say, began=time.monotonic()
    )
    begin = {
        "tool_version": dsabisect.__version__,
        "repo": str(request.repo),
        "target": target.NAME,
        "good": history.changes[0].id if history else "",
        "bad": sha,
        "device": to_json(device),
        "paths": list(paths),
        "suite": request.suite,
        "environment": dict(environment),
        "golden": {"root": str(goldens.root), "key": goldens.key, "cases": len(used)},
        "command": list(request.command),
        "started": _now(),
    }
    _begin_or_resume(session, begin, refused)
    return session, history, sha


def run_name(request: Request, history: History | None, sha: str) -> str:
    ends = f"{history.changes[0].short}..{history.changes[-1].short}" if history else sha[:9]
    return f"{request.target}-{ends}"


def _begin_or_resume(session: Session, begin: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """A resumed run takes over what was measured, provided that nothing that decides a result has changed."""
    earlier = session.journal.events()
    before = next((e for e in earlier if e["event"] == "run"), None)
    if before is None:
        session.journal.append("run", begin)
        for name, why in refused.items():
            session.journal.append("note", {"text": f"path {name}: not measured here: {why}"})
        return
    for name in ("target", "good", "bad", "device", "environment", "suite", "paths"):
        if before[name] != begin[name]:
            raise UsageError(
                f"cannot resume: {name} was {before[name]!r} and is {begin[name]!r}",
                where=str(session.evaluator.run_dir),
                remedy="Give the same options, or start anew with another --out",
            )
    if before["golden"]["key"] != begin["golden"]["key"]:
        raise UsageError("cannot resume: the golden set has changed", remedy="Start anew with another --out")
    for event in earlier:
        if event["event"] == "observation" and event["purpose"] != "confirm":
            observation = Observation.from_json({k: v for k, v in event.items() if k != "event"})
            session.evaluator.known[observation.build, observation.column] = observation
    session.say(f"resumed: {sum(e['event'] == 'observation' for e in earlier)} cells already measured")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


# ---- run ---------------------------------------------------------------------------------------------------


def run(request: Request, say: Say) -> Answer:
    """Name the first diverging change between two commits and say what to do about it."""
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
        if keep:
            session.evaluator.runner.close()  # first: else the pool waits for builds that nobody wants any more
        session.evaluator.close(keep=keep)
    return _end(session, status, code)


def _end(session: Session, status: str, code: int) -> Answer:
    seconds = round(time.monotonic() - session.began, 3)
    session.journal.append("end", {"status": status, "exit_code": code, "finished": _now(), "seconds": seconds})
    report = report_build.build(session.journal.events())
    run_dir = session.evaluator.run_dir
    store.write_text(run_dir / "report.json", report_build.dumps(report))
    return Answer(report=report, exit_code=code, run_dir=run_dir)


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


def axis_of(session: Session, history: History) -> list[Change]:
    """Positions to search: the good end, every commit that touches what matters, the bad end.

    Dropping the others is a hypothesis: the confirmation measures the culprit and its direct parent.
    """
    touching = session.evaluator.repo.touching(history, session.evaluator.target.RELEVANT)
    changes = history.changes
    session.journal.append(
        "range",
        {
            "changes": [to_json(c) for c in changes],
            "relevant": [c.id for c in changes if c.id in touching],
            "note": history.note,
        },
    )
    if history.note:
        session.say(history.note)
    axis = [changes[0], *(c for c in changes[1:-1] if c.id in touching), changes[-1]]
    session.say(f"{len(changes) - 1} commits, {len(touching & {c.id for c in changes[1:]})} touch the indexer")
    return axis


def _run(session: Session, history: History) -> tuple[str, int]:
    axis = axis_of(session, history)
    skipped = {session.evaluator.repo.resolve(rev) for rev in session.request.skip}
    for sha in sorted(skipped):
        session.journal.append("skip", {"sha": sha, "reason": "asked"})
    session.evaluator.prefetch([axis[0].id, axis[-1].id, *(axis[p].id for p in _ahead(session, len(axis), {}, {}))])
    good = session.evaluate(axis[0], session.columns, purpose="endpoint")
    bad = session.evaluate(axis[-1], session.columns, purpose="endpoint")
    ends = judge.endpoints(good, bad)
    if ends.status is judge.EndpointStatus.BOTH_FAIL_ALIKE:
        raise EnvironmentFault(ends.hint, where="both endpoints", remedy=ends.remedy)
    if ends.hint:
        session.note(ends.hint + (f". {ends.remedy}" if ends.remedy else ""))
    if ends.status is not judge.EndpointStatus.SEARCHABLE:
        return _not_searchable(session, ends)
    seen = _search(session, axis, ends.diverging, bad, skipped)
    return _conclude(session, history, axis, seen)


def _not_searchable(session: Session, ends: judge.Endpoints) -> tuple[str, int]:
    status = ends.status
    nothing = status is judge.EndpointStatus.NOTHING_DIVERGES
    action = Action.NONE if nothing else Action.HOLD
    recommendation = Recommendation(action=action, because=(ends.hint,) if ends.hint else ())
    session.journal.append("recommendation", {**to_json(recommendation), "columns": []})
    if nothing:
        return "nothing diverges", EXIT_CLEAN
    if status is judge.EndpointStatus.GOOD_END_IS_BAD:
        return "the good endpoint does not hold", EXIT_GOOD_END
    return "untestable", EXIT_SUSPECTS


# ---- search ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Seen:
    """What is known of one diverging column, by position on the axis."""

    sought: str
    verdicts: dict[int, Verdict]
    blocks: dict[int, str] = field(default_factory=dict)


def _ahead(session: Session, n: int, verdicts: Mapping[int, Verdict], blocks: Mapping[int, str]) -> tuple[int, ...]:
    return search.lookahead(n, verdicts, blocks, session.request.jobs) if session.request.jobs > 1 else ()


def _search(
    session: Session, axis: Sequence[Change], diverging: Sequence[Column], bad: Sequence[Observation], skipped: set[str]
) -> dict[Column, Seen]:
    """Binary search for each diverging column; every evaluation serves all columns that are still undecided."""
    last = len(axis) - 1
    by_column = {o.column: o for o in bad}
    asked = {p: Verdict.SKIP for p in range(1, last) if axis[p].id in skipped}
    seen = {
        column: Seen(
            sought=judge.signature(by_column[column]),
            verdicts={0: Verdict.GOOD, last: Verdict.BAD, **asked},
            blocks=dict.fromkeys(asked, "asked"),
        )
        for column in diverging
    }
    while not session.out_of_budget():
        wanted = {c: search.next_probe(len(axis), s.verdicts, s.blocks) for c, s in seen.items()}
        probes = [p for p in wanted.values() if p is not None]
        if not probes:
            return seen
        position = min(probes)  # the earliest first: the headline is the first diverging change
        column = next(c for c, p in wanted.items() if p == position)
        session.evaluator.prefetch(
            axis[p].id for p in (position, *_ahead(session, len(axis), seen[column].verdicts, seen[column].blocks))
        )
        open_columns = [c for c, p in wanted.items() if p is not None and position not in seen[c].verdicts]
        for observation in session.evaluate(axis[position], open_columns, purpose="search"):
            _take(seen[observation.column], position, observation)
    session.note("the budget is spent: what follows is the best that was reached")
    return seen


def _take(seen: Seen, position: int, observation: Observation) -> None:
    seen.verdicts[position] = judge.against(observation, seen.sought)
    if seen.verdicts[position] is Verdict.SKIP:
        seen.blocks[position] = judge.signature(observation)


# ---- conclusion --------------------------------------------------------------------------------------------


def _conclude(
    session: Session, history: History, axis: Sequence[Change], seen: Mapping[Column, Seen]
) -> tuple[str, int]:
    """Group columns by their suspects, confirm each single suspect, then advise on the first."""
    groups: dict[tuple[int, ...], list[Column]] = {}
    for column, s in seen.items():
        groups.setdefault(tuple(search.suspects(len(axis), s.verdicts)), []).append(column)
    position = {c.id: i for i, c in enumerate(history.changes)}
    first: tuple[tuple[str, ...], list[Column], bool, Confirmation] | None = None
    for group in sorted(groups):
        columns = groups[group]
        suspects = _full_suspects(history, axis, group, position)
        confirmation = _confirm(session, history, axis[group[0]], columns, seen) if len(group) == 1 else Confirmation()
        confirmed = confirmation.held
        if confirmed:
            suspects = (axis[group[0]].id,)
        for column in columns:
            transition = Transition(
                path=column.path,
                case=column.case,
                kind=TransitionKind.INTRODUCED,
                good=axis[group[0] - 1].id if not confirmed else history.changes[position[suspects[0]] - 1].id,
                bad=axis[group[-1]].id,
                suspects=suspects,
                confirmed=confirmed,
            )
            session.journal.append("transition", to_json(transition))
        if first is None:
            first = (suspects, columns, confirmed, confirmation)
    assert first is not None
    suspects, columns, confirmed, confirmation = first
    _recommend(session, history, suspects, columns, confirmation)
    if confirmed:
        return "first diverging change confirmed", EXIT_CONFIRMED
    return ("unconfirmed" if len(suspects) == 1 else f"narrowed to {len(suspects)} suspects"), EXIT_SUSPECTS


def _full_suspects(
    history: History, axis: Sequence[Change], group: Sequence[int], position: Mapping[str, int]
) -> tuple[str, ...]:
    """Suspects in the full history: the dropped commits between the last good and the first bad come back."""
    good, bad = position[axis[group[0] - 1].id], position[axis[group[-1]].id]
    return tuple(c.id for c in history.changes[good + 1 : bad + 1])


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The last clean run of parent and culprit, and whether all runs held."""

    held: bool = False
    parent: tuple[Observation, ...] = ()
    culprit: tuple[Observation, ...] = ()


def _confirm(
    session: Session, history: History, culprit: Change, columns: Sequence[Column], seen: Mapping[Column, Seen]
) -> Confirmation:
    """Parent and culprit, adjacent in the full history, from clean builds, interleaved P, C, P, C.

    Every column of the run is measured, so that the advice sees the good cells beside the bad ones.
    """
    at = [c.id for c in history.changes].index(culprit.id)
    parent = history.changes[at - 1]
    session.say(f"confirming {culprit.short} against its parent {parent.short}: P, C, P, C from clean builds")
    runs = session.evaluator.confirm((parent.id, culprit.id), session.columns, CONFIRM_ROUNDS)
    session.evaluated |= {parent.id, culprit.id}
    held = True
    for column in columns:
        of = {sha: [next(o for o in turn if o.column == column) for turn in turns] for sha, turns in runs.items()}
        answer = judge.confirmed(of[parent.id], of[culprit.id], seen[column].sought)
        if answer is not None:
            session.note(f"{column}: not confirmed: {answer}")
            held = False
    same = session.evaluator.build_of(parent.id).key == session.evaluator.build_of(culprit.id).key
    if held and same:
        session.note(f"{culprit.short} has the same relevant tree and pins as its parent: it cannot be the cause")
        held = False
    return Confirmation(held=held, parent=tuple(runs[parent.id][-1]), culprit=tuple(runs[culprit.id][-1]))


def _forced_unchanged(session: Session, confirmation: Confirmation) -> bool:
    """Does every forced path answer at the culprit as it does at the parent?"""
    paths, before = session.evaluator.paths, {o.column: o.verdict for o in confirmation.parent}
    forced = [o for o in confirmation.culprit if not paths[o.path].default_selection]
    return bool(forced) and all(before.get(o.column) is o.verdict for o in forced)


def _recommend(
    session: Session,
    history: History,
    suspects: Sequence[str],
    columns: Sequence[Column],
    confirmation: Confirmation,
) -> None:
    evaluator = session.evaluator
    culprit = next(c for c in history.changes if c.id == suspects[-1])
    paths = sorted({c.path for c in columns})
    forced = [p for p in paths if not evaluator.paths[p].default_selection]
    name = (forced or paths)[0]
    recommendation = advise.advise(
        culprit=culprit,
        suspects=tuple(suspects),
        observations=confirmation.culprit,
        diverging=tuple(columns),
        path=evaluator.paths[name],
        switch=evaluator.target.gate_switch(evaluator.paths[name]),
        confirmed=confirmation.held,
        arch=evaluator.device.arch,
        flips=_flips(session, culprit),
        forced_unchanged=_forced_unchanged(session, confirmation),
        context=_context(session, history, culprit),
        known_notes=frozenset(note for o in confirmation.parent for note in o.notes),
        defaults=tuple(name for name, path in evaluator.paths.items() if path.default_selection),
        before=confirmation.parent,
    )
    session.journal.append("recommendation", {**to_json(recommendation), "columns": [str(c) for c in columns]})


def _flips(session: Session, culprit: Change) -> tuple[str, ...]:
    """Lines of the culprit's patch that move the default of a known switch."""
    evaluator = session.evaluator
    switches = {evaluator.target.gate_switch(p) for p in evaluator.target.PATHS} - {""}
    lines = [
        line
        for line in evaluator.repo.patch(culprit.id).splitlines()
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    removed = {line[1:].strip() for line in lines if line[0] == "-"}
    added = {line[1:].strip() for line in lines if line[0] == "+"}
    return tuple(
        sorted(
            f"{old} → {new}"
            for switch in switches
            for old in removed
            for new in added
            if switch in old and switch in new
        )
    )


def _context(session: Session, history: History, culprit: Change) -> tuple[str, ...]:
    """What the history says about the culprit: reverts, relands, edits of thresholds inside it."""
    repo = session.evaluator.repo
    tips = _tips(repo, history)
    reverts = {c.id: c for tip in tips for c in repo.reverts_of(culprit.id, tip)}
    relands = {c.id: c for tip in tips for c in repo.relands_of(culprit.id, tip)}
    lines = [f"already reverted by {c.short} {c.title}" for c in reverts.values()]
    lines += [f"relanded by {c.short} {c.title}" for c in relands.values()]
    lines += [f"the change itself moves a threshold: {edit}" for edit in advise.threshold_edits(repo.patch(culprit.id))]
    return tuple(lines)


def _tips(repo: GitRepo, history: History) -> tuple[str, ...]:
    """The bad end, and HEAD: the revert usually lies after the range."""
    try:
        return tuple(dict.fromkeys((history.changes[-1].id, repo.resolve("HEAD"))))
    except RepositoryError:  # a HEAD that names nothing is no fault of the run
        return (history.changes[-1].id,)
