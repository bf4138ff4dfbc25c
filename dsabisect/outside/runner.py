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
from pathlib import Path
from typing import Any

from dsabisect.errors import EnvironmentFault, HarnessFault, UsageError
from dsabisect.model import Cell, Device, Failure, Limits, Measurement, digest, to_json
from dsabisect.outside import failures, listen, surroundings
from dsabisect.outside.listen import Indexed, Job, Progress
from dsabisect.outside.processes import MARK, Child, Zygote, kill_marked
from dsabisect.targets import BuildStep

SOURCES = (".py", ".so", ".cu", ".cuh", ".h", ".hpp", ".cpp")


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
        self.uuids: dict[str, str] = {}  # of the cards that :meth:`environment` was asked about, by device
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
            env = self._env({}, scratch, self.work / "jit" / "environment")
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
        self.uuids[device] = str(message.get("uuid", ""))
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
            env = self._env({"PYTHONSAFEPATH": "", **step.env}, scratch, self.work / "jit" / key)
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
            return failures.plain("TimedOut", f"{step.title} took longer than {step.seconds:g} s")
        if ended.cause == "out_of_memory":
            return failures.plain("OutOfMemory", f"{step.title} used more than {self.limits.memory_bytes >> 20} MiB")
        if os.WIFSIGNALED(ended.status):
            return failures.crash(ended.status, text, checkout)
        line = failures.first_error(text) or f"{step.title} exited {os.WEXITSTATUS(ended.status)}"
        return Failure(
            type="BuildFailed",
            message=line,
            signature=failures.signature("", line),
            traceback=text.replace(f"{checkout}/", "")[-2000:],
        )

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
        jit_key: str = "",
        shared: Sequence[str] = (),
    ) -> Iterator[Measurement]:
        """One Measurement a cell, in the order of ``cells``, as they come.

        Cells whose paths share environment and settings share a forked child, until one of them fails; the next then
        begins in a fresh one. ``jit_key`` (default: the build's) names the JIT caches: builds with equal kernel
        sources may share them. ``shared``: cache variables of an installed dependency, which no commit decides: one
        folder for all.

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
        kernels = _safe(jit_key or build_key)
        caches = self.work / "jit" / kernels
        job = Job(
            key=key, checkout=checkout, probe=probe, device=device, env=env, cells=cells, caches=caches, shared=shared,
            files=_count_files(checkout), limits=self.limits, log_root=self.log_root,
        )  # fmt: skip
        ready: dict[int, Measurement] = {}
        position = 0
        for group in _groups(cells):
            for index, measurement in self._group(job, group):
                ready[index] = measurement
                while position in ready:
                    yield ready.pop(position)
                    position += 1

    def _group(self, job: Job, indices: Sequence[int]) -> Indexed:
        """Measure cells that may share a process, in as many processes as it takes."""
        waiting, lost, began = list(indices), 0, False
        while waiting:
            if began and (gone := job.files - _count_files(job.checkout)) > 0:
                yield from listen.robbed(job, waiting, gone)
                return
            before, began = len(waiting), True
            for index, measurement in self._child(job, waiting, last_try=lost > 0):
                waiting.remove(index)
                yield index, measurement
            lost = lost + 1 if len(waiting) == before else 0

    def _child(self, job: Job, waiting: Sequence[int], *, last_try: bool) -> Indexed:
        """One child: measurements until it has done all, or one failed."""
        path = job.cells[waiting[0]].path
        with self._scratch() as scratch:
            env = self._env({**job.env, **path.env}, scratch, job.caches)
            env |= surroundings.caches_of(job.shared, self.work / "jit" / "shared")
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
                progress = Progress(child=child, log=name, waiting=list(waiting), began=began)
                try:
                    yield from listen.measurements(job, progress, last_try=last_try)
                finally:
                    child.stop()

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
        wanted = {**self._base_env(), **surroundings.early(env)}
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
        home = str(self.work / "zygote")
        return {**surroundings.base(self.interpreter, self.build_env), "HOME": home, "TMPDIR": home}

    def _env(self, more: Mapping[str, str], scratch: Path, caches: Path) -> dict[str, str]:
        return {**self._base_env(), **more, **surroundings.private(scratch, caches), MARK: self._mark}

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A private folder for one child: home, tmp, cache, working folder."""
        folder = self.work / "scratch" / secrets.token_hex(6)
        (folder / "cwd").mkdir(parents=True)
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


def _how_it_ended(event: Any) -> str:
    if event.status is not None and os.WIFSIGNALED(event.status):
        return f"ended by signal {os.WTERMSIG(event.status)}"
    return "timed out" if event.cause == "timed_out" else "ended without an answer"
