"""Builds and measures candidates in processes of their own, and says what happened: an outcome, never a verdict.

What the machine or our own harness did wrong is raised (EnvironmentFault, HarnessFault); everything else that a
candidate can do to its process comes back as a :class:`~dsabisect.model.Measurement`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dsabisect.errors import EnvironmentFault, HarnessFault, UsageError
from dsabisect.model import Cell, Device, Failure, Limits, Measurement, Outcome, digest, to_json
from dsabisect.outside import failures
from dsabisect.outside.failures import Origin
from dsabisect.outside.processes import MARK, Child, Ended, Zygote, kill_marked
from dsabisect.targets import BuildStep

PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "TZ", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH",
    "LD_LIBRARY_PATH", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS",
    "OMP_NUM_THREADS", "PYTHONPATH",
)  # fmt: skip
FIXED = {
    "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_MODULE_LOADING": "LAZY",
}  # fmt: skip
CACHES = {
    "TRITON_CACHE_DIR": "triton", "TRITON_HOME": "triton-home",
    "DG_JIT_CACHE_DIR": "deep_gemm", "DG_CACHE_DIR": "deep_gemm",
    "SGLANG_DG_CACHE_DIR": "deep_gemm", "SGL_DG_CACHE_DIR": "deep_gemm", "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TORCH_EXTENSIONS_DIR": "torch-extensions", "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "PYTORCH_KERNEL_CACHE_PATH": "jiterator",
    "CUDA_CACHE_PATH": "cuda", "SGLANG_CACHE_DIR": "sglang", "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang", "CUTE_DSL_CACHE_DIR": "cute-dsl", "NUMBA_CACHE_DIR": "numba",
}  # fmt: skip
# Read when torch is loaded, so that a zygote that already has it comes too late for another value.
EARLY = ("TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "ATEN_", "LD_", "PYTHON")
SOURCES = (".py", ".so", ".cu", ".cuh", ".h", ".hpp", ".cpp")
OUR_FAULT = "This is a fault of dsabisect or of its probe, not of the commit: please report it with the log"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One call of :meth:`Runner.measure`."""

    key: str
    checkout: Path
    probe: str
    device: Device
    env: Mapping[str, str]
    cells: Sequence[Cell]
    caches: Path
    files: int  # in the checkout, before anything ran


@dataclass(kw_only=True)
class _Progress:
    """Of one child: what was heard so far."""

    child: Child
    log: str
    waiting: list[int]  # indices of cells not measured yet; the child works on the first
    began: float
    asked: float
    opened: bool = False
    timing: dict[str, float] = field(default_factory=dict)  # counted once, on the first cell
    mark: int = 0  # in the log, where the cell began


class Runner:
    """Starts processes and ends them. Use it as a context manager; leaving it leaves nothing running."""

    def __init__(
        self,
        *,
        interpreter: str = sys.executable,
        work: Path,
        limits: Limits = Limits(),  # noqa: B008  (frozen)
        build_env: Mapping[str, str] = {},  # never written to
        log_root: Path,
    ) -> None:
        self.interpreter, self.limits = interpreter, limits
        self.work, self.log_root = Path(work).absolute(), Path(log_root).absolute()
        self.build_env = dict(build_env)
        self._mark = secrets.token_hex(8)
        self._idle: dict[str, list[Zygote]] = {}
        self._busy: set[Zygote] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process that was started here, and everything that those have started."""
        with self._lock:
            zygotes = [*self._busy, *(z for idle in self._idle.values() for z in idle)]
            self._idle.clear()
        for zygote in zygotes:
            zygote.close()
        kill_marked(self._mark)
        shutil.rmtree(self.work / "scratch", ignore_errors=True)

    # ---- environment of the machine ----------------------------------------------------------------------

    def environment(self, device: str) -> dict[str, str]:
        """Versions, device name and ``arch`` as the candidate's interpreter sees them.

        Raises:
            UsageError: ``device`` is neither ``cpu`` nor ``cuda:N``.
            EnvironmentFault: no torch, no such device, or a device that cannot be used.
        """
        if not re.fullmatch(r"cpu|cuda:\d{1,3}", device):
            raise UsageError(f"unknown device {device!r}", remedy="Give cpu, or cuda:N such as cuda:0")
        with self._scratch() as scratch:
            env = self._env({}, {}, scratch, self.work / "jit" / "environment")
            request = {"do": "environment", "device": device, "env": env, "cwd": str(scratch / "cwd")}
            log, name = self._new_log("environment")
            with self._zygote({}) as zygote:
                events = list(self._fork(zygote, request, log, seconds=max(60.0, self.limits.start_seconds)).events())
        message = next((e for e in events if isinstance(e, dict)), None)
        if message is None:
            raise EnvironmentFault(
                f"the device {device} could not be examined: {_how_it_ended(events[-1])}", where=self.interpreter,
                remedy=f"See {self.log_root / name}",
            )  # fmt: skip
        if "fault" in message:
            raise EnvironmentFault(message["fault"], where=self.interpreter, remedy=message["remedy"])
        return {str(k): str(v) for k, v in message["facts"].items()}

    # ---- builds ------------------------------------------------------------------------------------------

    def build(self, *, build_key: str, steps: Sequence[BuildStep], checkout: Path) -> Failure | None:
        """Run the steps of a recipe in ``checkout``, each in a session of its own. None: built.

        Raises:
            EnvironmentFault: a missing compiler or program, a full disk: no commit would build.
        """
        if not steps:
            return None
        zygote = Zygote(
            interpreter=self.interpreter, env=self._base_env(), mark=self._mark, work=self.work, torch=False
        )  # one for each build, so that builds run side by side
        with self._lock:
            self._busy.add(zygote)
        try:
            for step in steps:
                failure = self._step(zygote, _safe(build_key), step, checkout)
                if failure is not None:
                    return failure
            return None
        finally:
            zygote.close()
            with self._lock:
                self._busy.discard(zygote)

    def _step(self, zygote: Zygote, key: str, step: BuildStep, checkout: Path) -> Failure | None:
        log, name = self._new_log(f"build/{key}")
        with self._scratch() as scratch:
            # a recipe may import what lies beside its script or below its folder (setup.py, python -m package.build)
            env = self._env({"PYTHONSAFEPATH": "", **step.env}, {}, scratch, self.work / "jit" / key)
            request = {"do": "execute", "argv": list(step.argv), "env": env, "cwd": str(checkout)}
            child = self._fork(zygote, request, log, seconds=step.seconds)
            try:
                events = list(child.events())
            finally:
                child.stop()
        text = log.read_text(errors="replace")
        for message in events[:-1]:
            assert isinstance(message, dict)
            raise EnvironmentFault(
                f"{message.get('program', step.title)}: {message['error']}", where=f"build step {step.title!r}",
                remedy="Install it, or name another with --build-env",
            )  # fmt: skip
        return self._built(events[-1], step, text, checkout, name)

    def _built(self, ended: Any, step: BuildStep, text: str, checkout: Path, name: str) -> Failure | None:
        if ended.cause == "exited" and ended.status == 0:
            return None
        if ended.cause in ("stopped", "zygote"):
            raise HarnessFault(f"build step {step.title!r} was stopped", where=name, remedy="Run again with --resume")
        if line := failures.build_is_machine(text):
            raise EnvironmentFault(
                f"build step {step.title!r} lacks something: {line}", where=str(self.log_root / name),
                remedy="Install it, make room, or set it with --build-env K=V",
            )  # fmt: skip
        if ended.cause == "timed_out":
            return _limit_failure("TimedOut", f"{step.title} took longer than {step.seconds:g} s")
        if ended.cause == "out_of_memory":
            return _limit_failure("OutOfMemory", f"{step.title} used more than {self.limits.memory_bytes >> 20} MiB")
        if os.WIFSIGNALED(ended.status):
            return failures.crash(ended.status, text, checkout)
        line = failures.first_error(text) or f"{step.title} exited {os.WEXITSTATUS(ended.status)}"
        return Failure(type="BuildFailed", message=line, signature=failures.signature("", line), traceback=text[-2000:])

    # ---- measuring ---------------------------------------------------------------------------------------

    def measure(
        self,
        *,
        build_key: str,
        checkout: Path,
        probe: str,
        device: Device,
        env: Mapping[str, str],
        cells: Sequence[Cell],
        fresh: bool = False,
    ) -> Iterator[Measurement]:
        """One Measurement a cell, in the order of ``cells``, as they come.

        Cells whose paths share environment and settings share a forked child, until one of them fails; the next then
        begins in a fresh one. ``fresh``: with empty JIT caches that are thrown away afterwards.

        Raises:
            HarnessFault: our own code or the probe failed.
            EnvironmentFault: no torch, device lost or taken by others, disk full.
        """
        checkout = Path(checkout).absolute()
        if not checkout.is_dir():
            raise HarnessFault(
                "the checkout is not there", where=str(checkout), remedy="Run again with --resume: it is made anew"
            )
        key = _safe(build_key)
        caches = self.work / "jit" / (f"{key}.{secrets.token_hex(4)}" if fresh else key)
        job = _Job(
            key=key, checkout=checkout, probe=probe, device=device, env=env, cells=cells, caches=caches,
            files=_count_files(checkout),
        )  # fmt: skip
        ready: dict[int, Measurement] = {}
        position = 0
        try:
            for group in _groups(cells):
                for index, measurement in self._group(job, group):
                    ready[index] = measurement
                    while position in ready:
                        yield ready.pop(position)
                        position += 1
        finally:
            if fresh:
                shutil.rmtree(caches, ignore_errors=True)

    def _group(self, job: _Job, indices: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        """Measure cells that may share a process, in as many processes as it takes."""
        waiting, lost, began = list(indices), 0, False
        while waiting:
            if began and (gone := job.files - _count_files(job.checkout)) > 0:
                yield from self._robbed(job, waiting, gone)
                return
            before, began = len(waiting), True
            for index, measurement in self._child(job, waiting, last_try=lost > 0):
                waiting.remove(index)
                yield index, measurement
            lost = lost + 1 if len(waiting) == before else 0

    def _robbed(self, job: _Job, waiting: Sequence[int], gone: int) -> Iterator[tuple[int, Measurement]]:
        """The candidate deleted its own files: a fresh process could only load something else of that name."""
        failure = _limit_failure("CheckoutRemoved", f"it removed {gone} of its own source files")
        for index in waiting:
            cell = job.cells[index]
            yield (
                index,
                Measurement(
                    path=cell.path.name,
                    case=cell.case.id,
                    outcome=Outcome.RAISED,
                    failure=failure,
                    detail=failure.message,
                ),
            )

    def _child(self, job: _Job, waiting: Sequence[int], *, last_try: bool) -> Iterator[tuple[int, Measurement]]:
        """One child: measurements until it has done all, or one failed."""
        path = job.cells[waiting[0]].path
        with self._scratch() as scratch:
            env = self._env(job.env, path.env, scratch, job.caches)
            request = {
                "do": "measure", "env": env, "cwd": str(scratch / "cwd"), "probe": job.probe,
                "roots": [str(job.caches)],
                "setup": {
                    "checkout": str(job.checkout), "device": job.device.name, "arch": job.device.arch,
                    "settings": to_json(path.settings), "scratch": str(scratch / "cwd"),
                },
                "cells": [_cell_request(job.cells[i]) for i in waiting],
            }  # fmt: skip
            log, name = self._new_log(f"measure/{job.key}")
            began = time.monotonic()
            with self._zygote({**job.env, **path.env}) as zygote:
                child = self._fork(zygote, request, log, seconds=self.limits.start_seconds)
                progress = _Progress(child=child, log=name, waiting=list(waiting), began=began, asked=began)
                try:
                    yield from self._listen(job, progress, last_try=last_try)
                finally:
                    child.stop()

    def _listen(self, job: _Job, progress: _Progress, *, last_try: bool) -> Iterator[tuple[int, Measurement]]:
        finished = False
        for event in progress.child.events():
            if isinstance(event, Ended):
                if not finished:
                    yield from self._ended(job, progress, event, last_try=last_try)
                return
            kind = event["event"]
            if kind == "started":
                progress.timing["fork"] = event["received"] - progress.asked
            elif kind == "opened":
                progress.opened, progress.timing["import"] = True, event["import"]
                progress.mark = event["log_mark"]
            elif kind == "cell":
                yield progress.waiting[0], self._measured(job, progress, event)
                progress.waiting.pop(0)
                progress.mark = event["log_mark"]
            elif kind == "failed":
                finished = True
                yield from self._failed(job, progress, event)
            elif kind == "fault":
                raise EnvironmentFault(
                    f"no process could be forked: {event['error']}", remedy="Free memory or processes, then --resume"
                )
            else:
                finished = finished or kind == "finished"

    def _measured(self, job: _Job, progress: _Progress, event: Mapping[str, Any]) -> Measurement:
        cell = job.cells[progress.waiting[0]]
        outputs = tuple(str(Path(cell.out) / f"run{n}.safetensors") for n in range(event.get("runs", 0)))
        return Measurement(
            path=cell.path.name,
            case=cell.case.id,
            outcome=Outcome(event["outcome"]),
            outputs=outputs,
            detail=event.get("detail", ""),
            proof=event.get("proof", {}),
            stood_in=tuple(event.get("stood_in", ())),
            notes=tuple(event.get("notes", ())),
            timing=self._timing(progress, event["timing"], event["received"]),
            log=progress.log,
        )

    def _timing(self, progress: _Progress, parts: Mapping[str, float], received: float) -> dict[str, float]:
        """Seconds by part; ``host`` is what the waiting took beyond them."""
        timing = {**progress.timing, **parts}
        spent = sum(v for k, v in timing.items() if k != "first_run")
        timing["host"] = max(received - progress.began - spent, 0.0)
        progress.began, progress.timing = received, {}
        return timing

    def _failed(self, job: _Job, progress: _Progress, event: Mapping[str, Any]) -> Iterator[tuple[int, Measurement]]:
        """An exception. While opening it is every cell's; once there is a cell, it is that one's."""
        facts = event["facts"]
        everyone = event["phase"] in ("probe", "open")
        judged = failures.judge(
            facts, phase=event["phase"], checkout=job.checkout, log=progress.child.log.since(progress.mark)
        )
        outcome = _OUTCOMES.get(judged.origin)
        if outcome is None:
            self._raise(job, progress, judged)
        seconds = event["received"] - progress.began
        for index in list(progress.waiting) if everyone else progress.waiting[:1]:
            cell = job.cells[index]
            decided = outcome in (Outcome.ABSENT, Outcome.NOT_EXERCISED)
            yield index, Measurement(
                path=cell.path.name, case=cell.case.id, outcome=outcome, log=progress.log,
                failure=None if decided else judged.failure, detail=judged.failure.message.splitlines()[0] if judged.failure.message else "",
                proof=facts["proof"], timing={**progress.timing, "failed": seconds},
            )  # fmt: skip
            seconds, progress.timing = 0.0, {}

    def _raise(self, job: _Job, progress: _Progress, judged: failures.Judged) -> NoReturn:
        cell = job.cells[progress.waiting[0]]
        kind = EnvironmentFault if judged.origin is Origin.ENVIRONMENT else HarnessFault
        first = judged.failure.message.splitlines()[0] if judged.failure.message else ""
        raise kind(
            f"{judged.failure.type}: {first}" if first else judged.failure.type,
            where=f"{cell.path.name}/{cell.case.id} in {job.checkout.name}; log {self.log_root / progress.log}",
            remedy=judged.remedy or OUR_FAULT,
        )

    def _ended(
        self, job: _Job, progress: _Progress, ended: Ended, *, last_try: bool
    ) -> Iterator[tuple[int, Measurement]]:
        """The process is gone without a last word."""
        cell = job.cells[progress.waiting[0]]
        where = f"{cell.path.name}/{cell.case.id} in {job.checkout.name}; log {self.log_root / progress.log}"
        text = progress.child.log.since(progress.mark)
        doing = f"running {cell.path.name}/{cell.case.id}" if progress.opened else "importing"
        killed = ended.status is not None and os.WIFSIGNALED(ended.status) and os.WTERMSIG(ended.status) == 9
        if ended.cause == "stopped":
            raise HarnessFault("a measurement was stopped", where=where, remedy="Run again with --resume")
        if ended.cause == "zygote":
            if not last_try:  # it may have been anybody: once more, in a new one
                return
            outcome, failure = Outcome.CRASHED, _limit_failure("ParentKilled", "it killed the process that started it")
        elif ended.cause == "timed_out":
            limit = self.limits.cell_seconds if progress.opened else self.limits.start_seconds
            outcome, failure = (
                Outcome.TIMED_OUT,
                _limit_failure("TimedOut", f"no end after {limit:g} s of {doing.split()[0]}"),
            )
            failure = Failure(**{**to_json(failure), "traceback": failures.short_stack(ended.stack, job.checkout)})
        elif ended.cause == "out_of_memory":
            over = f"more than {self.limits.memory_bytes >> 20} MiB while {doing.split()[0]}"
            outcome, failure = Outcome.OUT_OF_MEMORY, _limit_failure("OutOfMemory", over)
        elif killed and ended.oom_kills:
            if ended.peak_bytes < self.limits.memory_bytes // 2:
                raise EnvironmentFault(
                    "the machine ran out of memory, and not by the candidate",
                    where=where,
                    remedy="Free memory, then --resume",
                )
            outcome, failure = (
                Outcome.OUT_OF_MEMORY,
                _limit_failure("OutOfMemory", "the kernel ended it for want of memory"),
            )
        else:
            outcome, failure = Outcome.CRASHED, failures.crash(ended.status or 0, text, job.checkout, ended.stack)
        seconds = time.monotonic() - progress.began
        for index in list(progress.waiting) if not progress.opened else progress.waiting[:1]:
            cell = job.cells[index]
            yield index, Measurement(
                path=cell.path.name, case=cell.case.id, outcome=outcome, failure=failure, detail=f"{failure.message} (while {doing})",
                timing={**progress.timing, "failed": seconds}, log=progress.log,
            )  # fmt: skip
            seconds, progress.timing = 0.0, {}

    # ---- processes ---------------------------------------------------------------------------------------

    def _fork(self, zygote: Zygote, request: Mapping[str, Any], log: Path, *, seconds: float) -> Child:
        try:
            return zygote.fork(
                request, log=log, log_bytes=self.limits.log_bytes, memory_bytes=self.limits.memory_bytes,
                seconds=seconds, renewal=self.limits.cell_seconds,
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentFault(
                f"the process that forks is gone: {error}", remedy="Run again with --resume"
            ) from error

    @contextlib.contextmanager
    def _zygote(self, env: Mapping[str, str]) -> Iterator[Zygote]:
        """An idle zygote whose early variables (read when torch is loaded) are those of ``env``, or a new one."""
        early = {k: v for k, v in env.items() if k.startswith(EARLY) and k not in CACHES}
        wanted = {**self._base_env(), **early}
        with self._lock:
            idle = self._idle.setdefault(digest(wanted), [])
            zygote = next((z for z in idle if z.alive()), None)
            idle[:] = [z for z in idle if z is not zygote and z.alive()]
        if zygote is None:
            zygote = Zygote(interpreter=self.interpreter, env=wanted, mark=self._mark, work=self.work, torch=True)
        with self._lock:
            self._busy.add(zygote)
        try:
            yield zygote
        finally:
            with self._lock:
                self._busy.discard(zygote)
                idle.append(zygote)

    def _base_env(self) -> dict[str, str]:
        """What passes from our own environment, nothing else: a candidate must not depend on who runs it."""
        passed = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
        own = os.path.dirname(os.path.abspath(shutil.which(self.interpreter) or self.interpreter))
        places = passed.get("PATH", os.defpath).split(os.pathsep)
        passed["PATH"] = os.pathsep.join(
            places if own in places else [own, *places]
        )  # ninja lives beside the interpreter
        passed["PYTHONPATH"] = os.pathsep.join(
            p for p in passed.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(p)
        )
        if not passed["PYTHONPATH"]:
            del passed["PYTHONPATH"]
        home = self.work / "zygote"
        return {
            "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", **FIXED, **passed, **self.build_env,
            "HOME": str(home), "TMPDIR": str(home),
        }  # fmt: skip

    def _env(self, target: Mapping[str, str], path: Mapping[str, str], scratch: Path, caches: Path) -> dict[str, str]:
        private = {name: str(caches / folder) for name, folder in CACHES.items()}
        for folder in private.values():
            os.makedirs(folder, exist_ok=True)
        places = {
            "HOME": "home",
            "TMPDIR": "tmp",
            "XDG_CACHE_HOME": "cache",
            "XDG_CONFIG_HOME": "config",
            "XDG_DATA_HOME": "data",
        }
        return {
            **self._base_env(), **target, **path, **private,
            **{name: str(scratch / place) for name, place in places.items()}, MARK: self._mark,
        }  # fmt: skip

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A private folder for one child: home, tmp, cache, working folder."""
        folder = self.work / "scratch" / secrets.token_hex(6)
        for place in ("home", "tmp", "cache", "config", "data", "cwd"):
            (folder / place).mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _new_log(self, stem: str) -> tuple[Path, str]:
        """A log file that does not exist yet, and its name relative to ``log_root``."""
        for number in range(1, 1_000_000):
            name = f"{stem}-{number:03d}.log"
            file = self.log_root / name
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(exist_ok=False)
            except FileExistsError:
                continue
            except OSError:
                pass  # said better, with its remedy, where it is opened
            return file, name
        raise AssertionError("a million logs")


_OUTCOMES = {
    Origin.CANDIDATE: Outcome.RAISED,
    Origin.CANDIDATE_CRASH: Outcome.CRASHED,
    Origin.CANDIDATE_MEMORY: Outcome.OUT_OF_MEMORY,
    Origin.ABSENT: Outcome.ABSENT,
    Origin.NOT_EXERCISED: Outcome.NOT_EXERCISED,
}


def _groups(cells: Sequence[Cell]) -> list[list[int]]:
    """Indices of cells whose paths share environment and settings, in the order of their first cell."""
    groups: dict[str, list[int]] = {}
    for index, cell in enumerate(cells):
        groups.setdefault(digest([to_json(cell.path.env), to_json(cell.path.settings)]), []).append(index)
    return list(groups.values())


def _cell_request(cell: Cell) -> dict[str, Any]:
    return {"path": to_json(cell.path), "case": to_json(cell.case), "inputs": list(cell.inputs), "out": cell.out}


def _safe(key: str) -> str:
    """A file name for a build key."""
    return re.sub(r"[^\w.-]", "_", key)[:100]


def _count_files(folder: Path) -> int:
    """Sources and compiled modules below ``folder``; other files a candidate may well tidy up."""
    return sum(name.endswith(SOURCES) for _, _, files in os.walk(folder) for name in files)


def _limit_failure(kind: str, message: str) -> Failure:
    return Failure(type=kind, message=message, signature=failures.signature(kind, message))


def _how_it_ended(event: Any) -> str:
    if event.status is not None and os.WIFSIGNALED(event.status):
        return f"ended by signal {os.WTERMSIG(event.status)}"
    return "timed out" if event.cause == "timed_out" else "ended without an answer"
