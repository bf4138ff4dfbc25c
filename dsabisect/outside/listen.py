"""What a child said and how it ended, turned into measurements: outcomes, never verdicts.

Raises EnvironmentFault and HarnessFault for what is the machine's or ours.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from dsabisect.errors import EnvironmentFault, HarnessFault
from dsabisect.model import Cell, Device, Failure, Limits, Measurement, Outcome
from dsabisect.outside import failures
from dsabisect.outside.failures import Origin
from dsabisect.outside.processes import Child, Ended

OUR_FAULT = "This is a fault of dsabisect or of its probe, not of the commit: please report it with the log"
OUTCOMES = {
    Origin.CANDIDATE: Outcome.RAISED,
    Origin.CANDIDATE_CRASH: Outcome.CRASHED,
    Origin.CANDIDATE_MEMORY: Outcome.OUT_OF_MEMORY,
    Origin.ABSENT: Outcome.ABSENT,
    Origin.NOT_EXERCISED: Outcome.NOT_EXERCISED,
}
Indexed = Iterator[tuple[int, Measurement]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of :meth:`Runner.measure`."""

    key: str
    checkout: Path
    probe: str
    device: Device
    env: Mapping[str, str]
    cells: Sequence[Cell]
    caches: Path
    shared: Sequence[str]  # cache variables of installed dependencies
    files: int  # sources in the checkout, before anything ran
    limits: Limits
    log_root: Path


@dataclass(kw_only=True)
class Progress:
    """Of one child: what was heard so far."""

    child: Child
    log: str  # relative to log_root
    waiting: list[int]  # indices of cells not measured yet; the child works on the first
    began: float  # of the current cell, on this host's monotonic clock
    opened: bool = False
    timing: dict[str, float] = field(default_factory=dict)  # fork and import: counted once, on the first cell
    mark: int = 0  # in the log, where the current cell began


def measurements(job: Job, progress: Progress, *, last_try: bool) -> Indexed:
    """(index of the cell, measurement) as they come, until the child ends; what is missing then is to be retried."""
    finished = False
    for event in progress.child.events():
        if isinstance(event, Ended):
            if not finished:
                yield from _ended(job, progress, event, last_try=last_try)
            return
        kind = event["event"]
        if kind == "started":
            progress.timing["fork"] = event["received"] - progress.began
        elif kind == "opened":
            progress.opened, progress.timing["import"] = True, event["import"]
            progress.mark = event["log_mark"]
        elif kind == "cell":
            yield progress.waiting[0], _decided(job, progress, event)
            progress.waiting.pop(0)
            progress.mark = event["log_mark"]
        elif kind == "failed":
            finished = True
            yield from _failed(job, progress, event)
        elif kind == "fault":
            raise EnvironmentFault(
                f"no process could be forked: {event['error']}", remedy="Free memory or processes, then --resume"
            )
        elif kind == "finished":
            finished = True


def _decided(job: Job, progress: Progress, event: Mapping[str, Any]) -> Measurement:
    """A cell that was run to its end, or that the probe declared absent or not exercised."""
    cell = job.cells[progress.waiting[0]]
    timing = {**progress.timing, **event["timing"]}
    spent = sum(seconds for part, seconds in timing.items() if part != "first_run")  # that one is part of run
    timing["host"] = max(event["received"] - progress.began - spent, 0.0)
    progress.began, progress.timing = event["received"], {}
    return Measurement(
        path=cell.path.name,
        case=cell.case.id,
        outcome=Outcome(event["outcome"]),
        outputs=tuple(str(Path(cell.out) / f"run{n}.safetensors") for n in range(event.get("runs", 0))),
        detail=event.get("detail", ""),
        proof=event.get("proof", {}),
        stood_in=tuple(event.get("stood_in", ())),
        notes=tuple(event.get("notes", ())),
        timing=timing,
        speed=event.get("speed", {}),
        log=progress.log,
    )


def _failed(job: Job, progress: Progress, event: Mapping[str, Any]) -> Indexed:
    """An exception. While opening it is every cell's; once there is a cell, it is that one's."""
    facts, phase = event["facts"], event["phase"]
    text = progress.child.log.since(progress.mark)
    judged = failures.judge(facts, phase=phase, checkout=job.checkout, log=text)
    outcome = OUTCOMES.get(judged.origin)
    first = failures.first_line(judged.failure.message)
    if outcome is None:
        _raise(job, progress, judged, first)
    failure = None if outcome in (Outcome.ABSENT, Outcome.NOT_EXERCISED) else judged.failure
    seconds, everyone = event["received"] - progress.began, phase in ("probe", "open")
    for index, measurement in _same(job, progress, outcome, failure, first, seconds, everyone=everyone):
        yield index, replace(measurement, proof=facts["proof"])


def _raise(job: Job, progress: Progress, judged: failures.Judged, first: str) -> NoReturn:
    kind = EnvironmentFault if judged.origin is Origin.ENVIRONMENT else HarnessFault
    said = f"{judged.failure.type}: {first}" if first else judged.failure.type
    raise kind(said, where=_where(job, progress), remedy=judged.remedy or OUR_FAULT)


def _where(job: Job, progress: Progress) -> str:
    cell = job.cells[progress.waiting[0]]
    return f"{cell.path.name}/{cell.case.id} in {job.checkout.name}; log {job.log_root / progress.log}"


def _same(
    job: Job,
    progress: Progress,
    outcome: Outcome,
    failure: Failure | None,
    detail: str,
    seconds: float,
    *,
    everyone: bool,
) -> Indexed:
    """One answer for the cell at work, or for all that wait: nobody imports a broken module twice."""
    seconds = max(seconds - sum(progress.timing.values()), 0.0)  # fork and import stand for themselves
    for index in list(progress.waiting) if everyone else progress.waiting[:1]:
        cell = job.cells[index]
        yield index, Measurement(
            path=cell.path.name, case=cell.case.id, outcome=outcome, failure=failure, detail=detail,
            timing={**progress.timing, "failed": seconds}, log=progress.log,
        )  # fmt: skip
        seconds, progress.timing = 0.0, {}


def _ended(job: Job, progress: Progress, ended: Ended, *, last_try: bool) -> Indexed:
    """The process is gone without a last word."""
    if ended.cause == "stopped":
        raise HarnessFault("a measurement was stopped", where=_where(job, progress), remedy="Run again with --resume")
    if ended.cause == "zygote" and not last_try:  # killed, perhaps by anybody: once more, in a new one
        return
    if _killed_by_kernel(ended) and ended.peak_bytes < job.limits.memory_bytes // 2:
        raise EnvironmentFault(
            "the machine ran out of memory, and not by the candidate", where=_where(job, progress),
            remedy="Free memory, then --resume",
        )  # fmt: skip
    doing = "running" if progress.opened else "importing"
    outcome, failure = _ending(job, ended, doing, progress.child.log.since(progress.mark))
    cell = job.cells[progress.waiting[0]]
    detail = f"{failure.message} ({doing} {cell.path.name}/{cell.case.id})"
    seconds = time.monotonic() - progress.began
    yield from _same(job, progress, outcome, failure, detail, seconds, everyone=not progress.opened)


def _killed_by_kernel(ended: Ended) -> bool:
    status = ended.status
    by_kill = status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return ended.cause == "exited" and by_kill and ended.oom_kills > 0


def _ending(job: Job, ended: Ended, doing: str, text: str) -> tuple[Outcome, Failure]:
    if ended.cause == "zygote":
        return Outcome.CRASHED, failures.plain("ParentKilled", "it killed the process that started it")
    if ended.cause == "timed_out":
        limit = job.limits.cell_seconds if doing == "running" else job.limits.start_seconds
        failure = failures.plain("TimedOut", f"no end after {limit:g} s of {doing}")
        return Outcome.TIMED_OUT, replace(failure, traceback=failures.short_stack(ended.stack, job.checkout))
    if ended.cause == "out_of_memory":
        over = f"more than {job.limits.memory_bytes >> 20} MiB while {doing}"
        return Outcome.OUT_OF_MEMORY, failures.plain("OutOfMemory", over)
    if _killed_by_kernel(ended):
        return Outcome.OUT_OF_MEMORY, failures.plain("OutOfMemory", "the kernel ended it for want of memory")
    return Outcome.CRASHED, failures.crash(ended.status or 0, text, job.checkout, ended.stack)


def robbed(job: Job, waiting: Sequence[int], gone: int) -> Indexed:
    """The candidate deleted its own files: a fresh process could only load something else of that name."""
    failure = failures.plain("CheckoutRemoved", f"it removed {gone} of its own source files")
    for index in waiting:
        cell = job.cells[index]
        yield (
            index,
            Measurement(
                path=cell.path.name, case=cell.case.id, outcome=Outcome.RAISED, failure=failure, detail=failure.message
            ),
        )
