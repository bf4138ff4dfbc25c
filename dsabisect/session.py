"""One run in flight: what was asked, what it works with, and how it is opened or gone on with."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsabisect
from dsabisect import targets, terminal
from dsabisect.errors import UsageError
from dsabisect.model import Change, Column, Device, Limits, Observation, PathSpec, Verdict, digest, to_json
from dsabisect.outside import cache, locks, store
from dsabisect.outside.gitrepo import GitRepo, History
from dsabisect.outside.runner import Runner
from dsabisect.relevance import Commit, Relevance, pathspecs_of

if TYPE_CHECKING:
    from dsabisect import evaluate
    from dsabisect.outside import golden

Say = Callable[[str], None]


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
    device: str = "cpu"  # or several, "cuda:0,cuda:1"
    golden: Path | tuple[Path, ...] = ()  # folders of golden sets; () = the one that comes with the package
    out: Path | None = None
    build_env: Mapping[str, str] = field(default_factory=dict)
    submodules: Mapping[str, Path] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    suspect: tuple[str, ...] = ()
    first: bool = False  # plain bisection to the first diverging change, instead of the whole timeline
    window: int | None = None  # None: chosen by the length of the axis
    max_evals: int | None = None
    max_minutes: float | None = None
    jobs: int = 1
    interpreter: str = sys.executable
    limits: Limits = field(default_factory=Limits)
    resume: bool = False
    rerun: bool = False  # measure anew what earlier runs have measured
    command: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # option → value and source, for the record

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.device.split(",")) or ("",)


@dataclass(kw_only=True)
class Session:
    """What a run works with. One evaluator a device; all of them share the journal and what is known."""

    request: Request
    evaluators: tuple[evaluate.Evaluator, ...]
    journal: store.Journal
    columns: tuple[Column, ...]
    say: Say
    began: float
    measured: set[str] = field(default_factory=set)  # commits that cost something
    marked: set[int] = field(default_factory=set)  # positions of which a person said what they are
    flaky: set[Column] = field(default_factory=set)  # columns whose repeats disagreed
    spent: list[float] = field(default_factory=list)  # seconds of each evaluation that measured something

    @property
    def evaluator(self) -> evaluate.Evaluator:
        return self.evaluators[0]

    def out_of_budget(self) -> bool:
        request = self.request
        spent = (time.monotonic() - self.began) / 60
        return (request.max_evals is not None and len(self.measured) >= request.max_evals) or (
            request.max_minutes is not None and spent >= request.max_minutes
        )

    def note(self, text: str) -> None:
        """Something that belongs to the answer: a resumed run answers anew."""
        self.journal.append("note", {"text": text, "about": "answer"})
        self.say(text)

    def evaluate(
        self, change: Change, columns: Sequence[Column], *, purpose: str, turn: int = 0, on: int = 0, left: int = 0
    ) -> list[Observation]:
        """Measure one commit on device number ``on``. ``left``: about how many evaluations are to come."""
        began = time.monotonic()
        terminal.doing(self.say, f"measuring {change.short} ({purpose}) {change.title[:60]}", left=left or None)
        observations = self.evaluators[on].evaluate(change.id, columns, purpose=purpose, turn=turn)
        self.count(observations)
        seconds = time.monotonic() - began
        if any(o.source == "measured" for o in observations):
            self.spent.append(seconds)
        self.say(f"{change.short}  {summary(observations)}  {seconds:5.1f} s  {change.title[:60]}{self._ahead(left)}")
        return observations

    def _ahead(self, left: int) -> str:
        """`  (about 5 more, 2 min)`: if nothing changes in between, and the confirmation aside."""
        if left < 1:
            return ""
        seconds = left * sum(self.spent) / len(self.spent) / len(self.evaluators) if self.spent else 0.0
        lasts = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        return f"  (about {left} more, {lasts})"

    def count(self, observations: Sequence[Observation]) -> None:
        self.measured |= {o.sha for o in observations if o.source == "measured"}


def summary(observations: Sequence[Observation]) -> str:
    """`4 good · 2 bad (diverged) · 1 skip (build_failed)`"""
    parts = []
    for verdict in Verdict:
        of = [o for o in observations if o.verdict is verdict]
        if of:
            reasons = sorted({o.reason.value for o in of} - {"matched"})
            parts.append(f"{len(of)} {verdict.value}" + (f" ({', '.join(reasons)})" if reasons else ""))
    known = all(o.source != "measured" for o in observations) if observations else False
    return (" · ".join(parts) or "nothing measured") + (" (known)" if known else "")


# ---- choosing ----------------------------------------------------------------------------------------------


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
    ids, chosen = {c.id for c in cases}, set[str]()
    for name in asked:
        found = {name} & ids or {id for id in ids if id.startswith(name)}  # a whole id is that case, no longer one too
        if not found:
            raise UsageError(f"no case of suite {suite!r} begins with {name!r}", remedy="`dsabisect cases` lists them")
        chosen |= found
    return tuple(c for c in cases if c.id in chosen)


# ---- opening -----------------------------------------------------------------------------------------------


def open_session(request: Request, say: Say, stack: ExitStack) -> tuple[Session, History | None, str]:
    """Everything that can be wrong with a request is found here, the cheap things first."""
    target = targets.load(request.target)
    paths = choose_paths(target, request.paths)
    work = store.work_root()
    repo = GitRepo(request.repo, work)
    history = repo.history(request.good, request.bad) if request.good is not None else None
    sha = history.changes[-1].id if history else repo.resolve(request.bad)
    default = run_name(request, history, sha)
    run_dir = (request.out or store.default_run_dir(Path.cwd() / "dsabisect-runs", default)).absolute()
    store.nothing_foreign(run_dir)
    store.writable(run_dir)
    runners = [
        stack.enter_context(
            Runner(
                interpreter=request.interpreter,
                work=run_dir / "work" / (f"device{number}" if number else ""),
                limits=request.limits,
                build_env=request.build_env,
                log_root=run_dir / "logs",
            )
        )
        for number in range(len(request.devices))
    ]
    with ThreadPoolExecutor(max_workers=len(runners)) as pool:  # the candidates' torch is loaded while ours is
        asked = [pool.submit(r.environment, name) for r, name in zip(runners, request.devices, strict=True)]
        # Here and not above: these load torch, and a wrong word on the command line deserves its answer at once.
        from dsabisect import evaluate
        from dsabisect.outside import calibration, golden

        goldens = golden.load(request.golden)
        cases = choose_cases(goldens, request.suite, request.cases)
        environments = [answer.result() for answer in asked]
    environment = _alike(environments, request.devices)
    devices = [Device(name=name, arch=environment["arch"]) for name in request.devices]
    columns, refused = choose_columns(target, paths, cases, devices[0])
    for name, why in refused.items():
        say(f"path {name}: not measured here: {why}")
    if not columns:
        raise UsageError(
            f"nothing to measure on {request.device}: " + "; ".join(f"{n}: {w}" for n, w in refused.items()),
            remedy="Choose another --path, --suite or --device; `dsabisect cases --target` shows what runs where",
        )
    used = {c.case for c in columns}
    goldens, told = calibration.applied(
        goldens, [c for c in cases if c.id in used], target=target.NAME, device=devices[0]
    )
    if told:
        say(told)
    golden.verify_controls(goldens, [c for c in cases if c.id in used], work / "controls")
    goes_on = request.resume and (run_dir / store.JOURNAL).exists()
    journal = store.Journal.resume(run_dir) if goes_on else store.Journal.create(run_dir)
    stack.callback(journal.close)
    results = cache.Results.open(
        work / "cache" / "results.sqlite3", note=lambda text: journal.append("note", {"text": text})
    )
    stack.callback(results.close)
    relevance = Relevance(repo=repo, target=target, pathspecs=pathspecs_of(target, paths.values()))
    known: dict[tuple[str, Column], Observation] = {}
    evaluators = tuple(
        evaluate.Evaluator(
            repo=repo,
            target=target,
            runner=runner,
            goldens=goldens,
            device=device,
            paths=paths,
            cases={c.id: c for c in cases},
            run_dir=run_dir,
            environment_key=evaluate.environment_key(environment, goldens.key, target, request.limits),
            build_env=request.build_env,
            submodules=request.submodules,
            interpreter=request.interpreter,
            record=lambda observations: journal.append_all("observation", [to_json(o) for o in observations]),
            note=lambda text: journal.append("note", {"text": text}),
            jobs=request.jobs,
            relevance=relevance,
            results=results,
            rerun=request.rerun,
            known=known,
            say=say,
            card=locks.card(
                device.name,
                uuid=runner.uuids[device.name],
                model=environment["device_name"],
                mask=os.environ.get(locks.MASK),
            ),
        )
        for runner, device in zip(runners, devices, strict=True)
    )
    session = Session(
        request=request, evaluators=evaluators, journal=journal, columns=columns, say=say, began=time.monotonic()
    )
    begin = {
        "tool_version": dsabisect.__version__,
        "repo": str(request.repo.absolute()),
        "target": target.NAME,
        "good": history.changes[0].id if history else "",
        "bad": sha,
        "device": to_json(devices[0]),
        "paths": list(paths),
        "suite": request.suite,
        "environment": dict(environment),
        "golden": {"root": str(goldens.root), "key": goldens.key, "cases": len(used), "baselines": told},
        "command": list(request.command),
        "settings": dict(request.settings),
        "started": now(),
    }
    _begin_or_resume(session, begin, refused)
    return session, history, sha


def _alike(environments: Sequence[Mapping[str, str]], names: Sequence[str]) -> Mapping[str, str]:
    """What the devices have in common: results of unlike ones would be mixed otherwise."""
    first = environments[0]
    for name, environment in zip(names, environments, strict=True):
        unlike = [k for k in first if environment.get(k) != first[k]]
        if unlike:
            raise UsageError(
                f"{names[0]} and {name} differ in {unlike[0]}: {first[unlike[0]]} and {environment.get(unlike[0])}",
                remedy="Give devices of one kind, or one device",
            )
    return first


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
    for name in ("key", "cases"):
        if before["golden"][name] != begin["golden"][name]:
            what = "the golden set has changed" if name == "key" else "other cases are asked for than before"
            raise UsageError(f"cannot resume: {what}", remedy="Start anew with another --out")
    observations = [
        Observation.from_json({k: v for k, v in event.items() if k != "event"})
        for event in earlier
        if event["event"] == "observation"
    ]
    session.evaluator.remember(observations)
    session.count(observations)
    session.say(f"resumed: {len(observations)} cells already measured")


def marks(session: Session) -> Sequence[Mapping[str, Any]]:
    """What a person said by `dsabisect mark`, without what was taken back."""
    from dsabisect.report import build

    return build.marks(session.journal.events())


def commits_of(session: Session, history: History) -> list[Commit]:
    """What the history says of each commit; kept, since it follows from the commits alone."""
    evaluator = session.evaluator
    relevance, results = evaluator.relevance, evaluator.results
    ids = [c.id for c in history.changes]
    key = digest(["relevance", evaluator.environment_key, list(relevance.pathspecs), ids])
    kept = results.get(key)
    if kept is not None:
        found = [Commit(key=k, relevant=r, why=tuple(w), undoes=u) for k, r, w, u in kept["commits"]]
        relevance.remember(zip(ids, (c.key for c in found), strict=True))
        return found
    found = relevance.commits(history)
    results.put(key, {"commits": [[c.key, c.relevant, list(c.why), c.undoes] for c in found]})
    return found


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
