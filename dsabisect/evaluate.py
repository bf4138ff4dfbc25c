"""One evaluation: a commit is checked out, built, measured and compared; every cell becomes one Observation.

Used by the engine alone. All that is slow or foreign happens behind `outside`: git, processes, files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsabisect import targets
from dsabisect.errors import StoreError
from dsabisect.indexer import compare
from dsabisect.model import (
    Build,
    Case,
    Cell,
    Column,
    Comparison,
    Device,
    Failure,
    Limits,
    Measurement,
    Observation,
    Outcome,
    PathSpec,
    Stage,
    digest,
    to_json,
)  # fmt: skip
from dsabisect.outside import cache, golden, locks, store
from dsabisect.outside.gitrepo import GitRepo
from dsabisect.outside.runner import Runner
from dsabisect.reason import judge
from dsabisect.relevance import Relevance

AGAIN = ("confirm", "flake", "speed")  # purposes whose cells are measured although their answer is known
RUNS = ("a", "b", "a")  # poison patterns, in order: run 1 shows poison, run 2 shows repeats


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A commit on disk, built or not."""

    sha: str
    checkout: Path
    build: Build
    built: bool  # False: pure Python, nothing to keep
    failure: Failure | None
    timing: Mapping[str, float]
    binaries: str = ""  # hash of the compiled modules; "" when there are none


@dataclass(kw_only=True)
class Evaluator:
    """What one run needs to measure any commit of its range."""

    repo: GitRepo
    target: Any
    runner: Runner
    goldens: golden.GoldenSet
    device: Device
    paths: Mapping[str, PathSpec]
    cases: Mapping[str, Case]
    run_dir: Path
    environment_key: str
    build_env: Mapping[str, str]
    submodules: Mapping[str, Path]
    interpreter: str
    record: Callable[[Sequence[Observation]], None]
    note: Callable[[str], None]  # something about the run that a reader must know, said once
    relevance: Relevance
    results: cache.Results
    say: Callable[[str], None]
    card: str  # names the lock of the accelerator: one run measures on it at a time
    rerun: bool = False  # measure what an earlier run has measured
    jobs: int = 1
    seen: Callable[[Case, Sequence[Mapping[str, Any]]], None] | None = None  # gets the outputs of every run (calibrate)
    known: dict[tuple[str, Column], Observation] = field(default_factory=dict)  # (build key, column) → measured
    _again: dict[tuple[str, ...], Observation] = field(
        default_factory=dict
    )  # of a resumed run: clean and repeated runs
    binaries: dict[str, str] = field(default_factory=dict)  # sha → hash of the compiled modules of its clean build
    _builds: dict[str, Build] = field(default_factory=dict)
    _prepared: dict[str, Future[Prepared]] = field(default_factory=dict)
    _inputs: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)  # cases whose input files were checked in this evaluation
    _compared: dict[tuple[str, ...], tuple[Comparison, ...]] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=max(1, self.jobs), thread_name_prefix="build")

    def close(self, *, keep: bool) -> None:
        """Stop builds that nobody waits for; remove checkouts unless the run is to be resumed."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if not keep:
            shutil.rmtree(self.run_dir / "work", ignore_errors=True)

    # ---- what decides a result ---------------------------------------------------------------------------

    def build_of(self, sha: str) -> Build:
        if sha not in self._builds:
            self._builds[sha] = Build(
                target=self.target.NAME,
                tree=self.relevance.key(sha),
                pins=self.target.pins(lambda path: self.repo.read(sha, path)),
                flags=dict(self.build_env),
                device=self.device.arch,
                environment=self.environment_key,
            )
        return self._builds[sha]

    def remember(self, observations: Iterable[Observation]) -> None:
        """Take over what a resumed run has measured."""
        for o in observations:
            if o.purpose in AGAIN:
                self._again[o.purpose, o.about, o.sha, str(o.turn), str(o.column)] = o
            else:
                self.known[o.build, o.column] = o

    def cell_key(self, build: Build, column: Column, *more: str) -> str:
        """Key of one result in the cache of all runs: everything that decides it."""
        case, path = self.cases[column.case], self.paths[column.path]
        return digest([build.key, to_json(case), to_json(path), *more])

    def jit_key(self, sha: str) -> str:
        """Commits with equal kernel sources share what was compiled at run time."""
        sources = self.target.JIT_SOURCES or self.target.RELEVANT
        return f"kernels-{self.repo.tree_key(sha, sources)[:20]}"

    # ---- checkout and build ------------------------------------------------------------------------------

    def prefetch(self, shas: Iterable[str]) -> None:
        """Start checkouts and builds that will probably be asked for, when more than one may run at a time."""
        if self.jobs > 1:
            for sha in shas:
                self._submit(sha)

    def _submit(self, sha: str) -> Future[Prepared]:
        with self._lock:
            if sha not in self._prepared:
                self._prepared[sha] = self._pool.submit(self._prepare, sha, sha)
            return self._prepared[sha]

    def _prepare(self, sha: str, name: str) -> Prepared:
        """Check out and build ``sha`` into a folder called ``name``. A built folder of an earlier try is kept."""
        build = self.build_of(sha)
        checkout = self.run_dir / "work" / "checkouts" / name
        stamp = checkout.with_name(checkout.name + ".built")
        if stamp.is_file() and stamp.read_text() == build.key and checkout.is_dir():
            return Prepared(sha=sha, checkout=checkout, build=build, built=True, failure=None, timing={})
        began = time.monotonic()
        shutil.rmtree(checkout, ignore_errors=True)
        checkout.parent.mkdir(parents=True, exist_ok=True)
        self.repo.checkout(sha, checkout, self.target.CHECKOUT)
        self._place_submodules(sha, checkout)
        steps = self.target.prepare(
            targets.BuildRequest(
                checkout=checkout,
                device=self.device,
                interpreter=self.interpreter,
                submodules=self.submodules,
                build_env=self.build_env,
            )
        )
        checked_out = time.monotonic()
        failure = self.runner.build(build_key=name, steps=steps, checkout=checkout) if steps else None
        timing = {"checkout": checked_out - began}
        if steps:
            timing["build"] = time.monotonic() - checked_out
        if steps and failure is None:
            store.write_text(stamp, build.key)
        return Prepared(
            sha=sha, checkout=checkout, build=build, built=bool(steps), failure=failure, timing=timing,
            binaries=_binaries(checkout) if steps else "",
        )  # fmt: skip

    def _place_submodules(self, sha: str, checkout: Path) -> None:
        for path in self.target.SUBMODULES:
            said = self.repo.place_submodule(sha, checkout, path, self.submodules.get(path))
            with self._lock:
                if said and said not in self._noted:
                    self._noted.add(said)
                    self.note(said)

    def prepared(self, sha: str) -> Prepared:
        result = self._submit(sha).result()
        if result.built and not result.checkout.is_dir():  # a candidate removed what it was built in
            with self._lock:
                self._prepared.pop(sha, None)
            result = self._submit(sha).result()
        if not result.built:  # pure Python: cheap to make anew, and a candidate may have changed its own files
            with self._lock:
                self._prepared.pop(sha, None)
        return result

    # ---- measuring ---------------------------------------------------------------------------------------

    def evaluate(
        self, sha: str, columns: Sequence[Column], *, purpose: str, turn: int = 0, calls: int = 0
    ) -> list[Observation]:
        """Observations of ``columns`` at ``sha``, in that order; equal builds share one measurement.

        Purpose ``flake`` measures anew each ``turn``: what is asked then is whether the answer repeats. ``calls`` of
        each cell are timed besides (purpose ``speed``), where its probe can do that.
        """
        began = time.monotonic()
        build, jit_key = self.build_of(sha), self.jit_key(sha)
        looked_up = time.monotonic() - began
        found = self._known(sha, build, columns, purpose, turn)
        missing = [c for c in columns if c not in found]
        if missing:
            prepared = self.prepared(sha)
            try:
                spent = {"lookup": looked_up, **prepared.timing}
                for observation in self._measure(
                    prepared, missing, purpose=purpose, turn=turn, key=build.key, jit_key=jit_key, spent=spent,
                    calls=calls,
                ):  # fmt: skip
                    found[observation.column] = observation
                    if purpose not in AGAIN:
                        self.known[build.key, observation.column] = observation
                        self.results.put(self.cell_key(build, observation.column), to_json(observation))
            finally:
                self._drop(prepared)
        return [found[c] for c in columns]

    def _known(
        self, sha: str, build: Build, columns: Sequence[Column], purpose: str, turn: int
    ) -> dict[Column, Observation]:
        """What need not be measured: it stands in the journal, an equal tree has it, or an earlier run."""
        if purpose in AGAIN:
            keys = {c: (purpose, "", sha, str(turn), str(c)) for c in columns}
            return {c: self._again[key] for c, key in keys.items() if key in self._again}
        twins = {c: self.known[build.key, c] for c in columns if (build.key, c) in self.known}
        found = {c: _shared(sha, twin, purpose, "twin") for c, twin in twins.items()}
        for column, observation in self._cached(build, [c for c in columns if c not in found]).items():
            found[column] = self.known[build.key, column] = _shared(sha, observation, purpose, "cache")
        self.record([o for c, o in found.items() if o is not twins.get(c)])
        return found

    def _cached(self, build: Build, columns: Sequence[Column], *more: str) -> dict[Column, Observation]:
        if self.rerun:
            return {}
        keys = {self.cell_key(build, c, *more): c for c in columns}
        return {keys[key]: Observation.from_json(value) for key, value in self.results.get_many(list(keys)).items()}

    # ---- confirmation ------------------------------------------------------------------------------------

    def confirm(
        self, pair: tuple[str, str], columns: Sequence[Column], rounds: int = 2
    ) -> dict[str, list[list[Observation]]]:
        """Parent and culprit from clean builds and empty JIT caches, interleaved: P, C, P, C.

        Turns that a killed run has measured, and those that an earlier run has, are taken over.
        """
        empty = secrets.token_hex(4)  # names JIT caches that nothing has ever written to
        seen: dict[str, list[list[Observation]]] = {sha: [] for sha in pair}
        futures: dict[str, Future[Prepared]] = {}
        try:
            for turn in range(rounds):
                for sha in pair:
                    seen[sha].append(self._confirm_one(pair, sha, turn, columns, empty, futures))
        finally:
            for sha in futures:
                shutil.rmtree(self.run_dir / "work" / "checkouts" / f"{sha}.clean", ignore_errors=True)
        return seen

    def _confirm_one(
        self,
        pair: tuple[str, str],
        sha: str,
        turn: int,
        columns: Sequence[Column],
        empty: str,
        futures: dict[str, Future[Prepared]],
    ) -> list[Observation]:
        build, about = self.build_of(sha), pair[1]
        clean = ("confirm", self.build_of(pair[0]).key, self.build_of(pair[1]).key, str(turn))
        found: dict[Column, Observation] = {}
        for column in columns:
            key = ("confirm", about, sha, str(turn), str(column))
            if key in self._again:
                found[column] = self._again[key]
        cached = self._cached(build, [c for c in columns if c not in found], *clean)
        known = {c: replace(_shared(sha, o, "confirm", "cache"), about=about, turn=turn) for c, o in cached.items()}
        self.record(list(known.values()))
        found |= known
        missing = [c for c in columns if c not in found]
        if missing:
            prepared = self._clean(pair, sha, futures)
            self.binaries.setdefault(sha, prepared.binaries)
            for observation in self._measure(
                prepared, missing, purpose="confirm", turn=turn, about=about, key=f"{sha}.clean",
                jit_key=f"{sha}.{empty}", spent=prepared.timing,
            ):  # fmt: skip
                found[observation.column] = observation
                self.results.put(self.cell_key(build, observation.column, *clean), to_json(observation))
            self._drop(prepared)
        return [found[c] for c in columns]

    def _clean(self, pair: tuple[str, str], sha: str, futures: dict[str, Future[Prepared]]) -> Prepared:
        """The clean build of ``sha``. What a candidate has removed, and what is not built, is made anew."""
        if not futures:  # both at once, on the first turn
            futures.update({s: self._pool.submit(self._prepare_clean, s, f"{s}.clean") for s in pair})
            return futures[sha].result()
        futures[sha].result()
        return self._prepare(sha, f"{sha}.clean")

    def _prepare_clean(self, sha: str, name: str) -> Prepared:
        (self.run_dir / "work" / "checkouts" / f"{name}.built").unlink(missing_ok=True)
        return self._prepare(sha, name)

    def _drop(self, prepared: Prepared) -> None:
        if not prepared.built:
            shutil.rmtree(prepared.checkout, ignore_errors=True)

    def _measure(
        self,
        prepared: Prepared,
        columns: Sequence[Column],
        *,
        purpose: str,
        key: str,
        jit_key: str,
        spent: Mapping[str, float],
        turn: int = 0,
        about: str = "",
        calls: int = 0,
    ) -> Iterator[Observation]:
        """``spent``: seconds that led up to this, counted once: on the first cell."""
        of_run = {"purpose": purpose, "turn": turn, "about": about}
        if prepared.failure is not None:
            for column in columns:
                yield self._observe(prepared, self._not_built(column, prepared.failure), (), spent, of_run)
                spent = {"compare": 0.0}
            return
        began = time.monotonic()
        outputs = self.run_dir / "work" / "outputs" / key
        shutil.rmtree(outputs, ignore_errors=True)
        self._checked.clear()
        cells = [self._cell(column, outputs, calls) for column in columns]
        measurements = self.runner.measure(
            build_key=key,
            checkout=prepared.checkout,
            probe=self.target.PROBE,
            device=self.device,
            env=self.target.environment(prepared.checkout, self.device),
            cells=cells,
            jit_key=jit_key,
            shared=self.target.DEPENDENCY_CACHES,
        )
        spent = {**spent, "inputs": time.monotonic() - began}
        with locks.held(self.card, store.work_root(), self.say, shown=self.device.name):
            for measurement in measurements:
                began = time.monotonic()
                comparisons = self._compare(measurement)
                timing = {**spent, **measurement.timing, "compare": time.monotonic() - began}
                spent = {}
                yield self._observe(prepared, measurement, comparisons, timing, of_run)
        shutil.rmtree(outputs, ignore_errors=True)

    def _not_built(self, column: Column, failure: Failure) -> Measurement:
        return Measurement(
            path=column.path, case=column.case, outcome=Outcome.BUILD_FAILED, failure=failure, detail=failure.message
        )

    def _cell(self, column: Column, outputs: Path, calls: int) -> Cell:
        path = self.paths[column.path]
        timed = {"timed_calls": calls} if calls else {}
        out = outputs / hashlib.sha256(str(column).encode()).hexdigest()[:16]
        out.mkdir(parents=True, exist_ok=True)
        return Cell(
            path=replace(path, settings={**path.settings, **timed}),
            case=self.cases[column.case],
            inputs=self._input_files(column.case),
            out=str(out),
        )

    def _input_files(self, case_id: str) -> tuple[str, ...]:
        """Input files of a case, written by us and checked again in each evaluation: a candidate may write anywhere."""
        if case_id in self._inputs:
            files, hashes = self._inputs[case_id]
            if case_id in self._checked or hashes == tuple(_file_hash(Path(f)) for f in files):
                self._checked.add(case_id)
                return tuple(files[("a", "b").index(run)] for run in RUNS)
        folder = self.run_dir / "work" / "inputs"
        folder.mkdir(parents=True, exist_ok=True)
        case = self.cases[case_id]
        name = hashlib.sha256(case_id.encode()).hexdigest()[:16]
        files = tuple(
            str(self.goldens.write_inputs(case, folder / f"{name}-{poison}.safetensors", poison=poison))
            for poison in ("a", "b")
        )
        self._inputs[case_id] = (files, tuple(_file_hash(Path(f)) for f in files))
        self._checked.add(case_id)
        return tuple(files[("a", "b").index(run)] for run in RUNS)

    def _compare(self, measurement: Measurement) -> tuple[Comparison, ...]:
        if measurement.outcome is not Outcome.COMPLETED:
            return ()
        case, path = self.cases[measurement.case], self.paths[measurement.path]
        required = path.outputs if case.stage in (Stage.END_TO_END, Stage.LOGITS) else ()
        raws = [_bytes(Path(name)) for name in measurement.outputs]  # read once: its process may still be running
        key = (case.id, *required, *(hashlib.sha256(raw).hexdigest() for raw in raws))
        if key not in self._compared:  # most commits of a range yield the very same bytes
            self._compared[key] = self._judged(case, raws, required)
        return self._compared[key]

    def _judged(self, case: Case, raws: Sequence[bytes], required: Sequence[str]) -> tuple[Comparison, ...]:
        try:
            runs = [golden.outputs_of(raw) for raw in raws]
        except StoreError as fault:  # the candidate's process wrote these bytes
            return (Comparison(stage=case.stage, name="missing", ok=False, metrics={"unreadable": str(fault)}),)
        if self.seen is not None:
            self.seen(case, runs)
        return compare.compare(case, self.goldens.golden(case.id), runs, required)

    def _observe(
        self,
        prepared: Prepared,
        measurement: Measurement,
        comparisons: Sequence[Comparison],
        timing: Mapping[str, float],
        of_run: Mapping[str, Any],  # purpose, turn, about
    ) -> Observation:
        verdict, reason, detail = judge.judge(measurement, comparisons)
        case = self.cases[measurement.case]
        observation = Observation(
            sha=prepared.sha,
            build=prepared.build.key,
            path=measurement.path,
            case=measurement.case,
            outcome=measurement.outcome,
            verdict=verdict,
            reason=reason,
            facets={"arch": self.device.arch, **case.facets},
            comparisons=tuple(comparisons),
            failure=measurement.failure,
            detail=detail,
            proof=measurement.proof,
            stood_in=measurement.stood_in,
            notes=measurement.notes,
            repeats=len(measurement.outputs) or 1,
            timing={name: round(value, 6) for name, value in timing.items()},
            speed=measurement.speed,
            log=measurement.log,
            **of_run,
        )
        self.record([observation])
        return observation


def _shared(sha: str, observation: Observation, purpose: str, source: str) -> Observation:
    """The same answer for another commit, or from another run, whose log stays where it is."""
    if observation.sha == sha and source == "twin":
        return observation
    log = observation.log if source == "twin" else ""
    return replace(observation, sha=sha, purpose=purpose, timing={}, repeats=0, source=source, log=log)


def _binaries(checkout: Path) -> str:
    """One hash over the compiled modules of a build, "" when it has none."""
    files = sorted(p for p in checkout.rglob("*.so") if p.is_file() and not p.is_symlink())
    return digest([[p.relative_to(checkout).as_posix(), _file_hash(p)] for p in files]) if files else ""


def _bytes(path: Path) -> bytes:
    """Content of a file that a candidate may have removed: nothing then."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _file_hash(path: Path) -> str:
    return hashlib.sha256(_bytes(path)).hexdigest()


def harness_key() -> str:
    """Hash of our own code: results of another version of the tool are never mixed with these."""
    package = Path(__file__).resolve().parent
    files = sorted(p for p in package.rglob("*.py") if "__pycache__" not in p.parts)
    return digest([[p.relative_to(package).as_posix(), _file_hash(p)] for p in files])[:20]


def target_key(target: Any) -> str:
    """Hash of a target's own modules, which may come from another package."""
    modules = [getattr(target, "__name__", type(target).__module__), target.PROBE]
    specs = [importlib.util.find_spec(name) for name in modules]
    return digest([_file_hash(Path(spec.origin)) if spec and spec.origin else "" for spec in specs])[:20]


def environment_key(environment: Mapping[str, str], golden_key: str, target: Any, limits: Limits) -> str:
    """Everything but the commit, the path and the case that decides a result."""
    return digest([to_json(environment), golden_key, harness_key(), target_key(target), to_json(limits)])[:20]
