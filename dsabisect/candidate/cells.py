"""Measuring cells inside a forked child: open the probe, load inputs, run, write outputs, or say what went wrong.

Only facts leave this process; what they mean (the candidate's fault, the probe's, the machine's) is decided by the
host in :mod:`dsabisect.outside.failures`.

Messages, one JSON object each: ``started`` · ``opened`` · ``ran`` (only the first call of the process: it may compile)
· ``cell`` with ``outcome`` completed / not_exercised / absent · ``failed`` with ``phase`` and ``facts``, always the
last · ``finished``. After a failure the process is not used again: a broken CUDA context, an open graph capture or a
half-written global would make the next cell fail for a reason that is not its own.
"""

from __future__ import annotations

import importlib
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dsabisect.candidate import probes

Send = Callable[[Mapping[str, Any]], None]
MESSAGE_CHARACTERS = 8000
FRAMES = 24


class _Failed(Exception):
    """Carries the phase out to :func:`measure`; the cause is the exception itself."""

    def __init__(self, phase: str) -> None:
        super().__init__(phase)
        self.phase = phase


@contextmanager
def _phase(name: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a candidate are facts like any other
        raise _Failed(name) from error


def measure(request: Mapping[str, Any], send: Send) -> None:
    """All cells of ``request`` in order, until one fails."""
    send({"event": "started", "fork": time.monotonic() - request["asked"]})
    index = -1
    try:
        opened = _open(request, send)
        for index, cell in enumerate(request["cells"]):
            send(
                {
                    "event": "cell",
                    "cell": index,
                    "renew": True,
                    **_measured(opened, cell, request, send, first=index == 0),
                }
            )
    except _Failed as failed:
        cause = failed.__cause__
        assert cause is not None
        phase = failed.phase
        send({"event": "failed", "cell": max(index, 0), "phase": phase, "facts": facts(cause, request)})
        return
    send({"event": "finished"})


def _open(request: Mapping[str, Any], send: Send) -> Any:
    began = time.monotonic()
    _seed()
    with _phase("probe"):
        module = importlib.import_module(request["probe"])
    with _phase("open"):
        opened = module.open(probes.Setup(**request["setup"]))
    send({"event": "opened", "import": time.monotonic() - began})
    return opened


def _seed() -> None:
    """The same streams in every child, should a candidate draw random numbers."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _measured(
    opened: Any, cell: Mapping[str, Any], request: Mapping[str, Any], send: Send, *, first: bool
) -> dict[str, Any]:
    """Run one cell over its input files in order; outcome, proof, notes and seconds by part."""
    timing = {"load": 0.0, "run": 0.0, "write": 0.0}
    with _phase("load"), _timed(timing, "load"):
        loaded = _load(cell["inputs"])
    proof: dict[str, str] = {}
    notes: dict[str, None] = {}
    stood_in: dict[str, None] = {}
    speed: dict[str, float] = {}
    for number, name in enumerate(cell["inputs"]):
        inputs = {key: value.clone() for key, value in loaded[name].items()}
        began = time.monotonic()
        try:
            with _phase("run"):
                ran = opened.run(_untimed(cell["path"]) if number else cell["path"], cell["case"], inputs)
        except _Failed as failed:
            ending = _decided(failed.__cause__)
            if ending is None:
                raise
            return {**ending, "timing": timing}
        seconds = time.monotonic() - began
        timing["run"] += seconds
        timing.setdefault("first_run", seconds)
        if first and number == 0:
            send({"event": "ran", "renew": True})
        with _phase("outputs"):
            tensors = _plain(ran)
            proof.update({str(k): str(v) for k, v in ran.proof.items()})
            notes.update(dict.fromkeys(map(str, ran.notes)))
            stood_in.update(dict.fromkeys(map(str, ran.stood_in)))
            speed = speed or _speed(ran.seconds)
        if not proof:
            return {"outcome": "not_exercised", "detail": "the probe could not prove which path ran", "timing": timing}
        with _phase("write"), _timed(timing, "write"):
            _write(tensors, cell["out"], number)
    return {
        "outcome": "completed", "runs": len(cell["inputs"]), "proof": proof, "notes": list(notes),
        "stood_in": list(stood_in), "timing": timing,
        "speed": speed,
    }  # fmt: skip


def _untimed(path: Mapping[str, Any]) -> Mapping[str, Any]:
    """``path`` without the wish for timed calls: the first run is enough for them."""
    return {**path, "settings": {k: v for k, v in path.get("settings", {}).items() if k != "timed_calls"}}


def _speed(seconds: tuple[float, ...]) -> dict[str, float]:
    """Median and quartiles of timed calls, in seconds; {} when there are none."""
    if len(seconds) < 2:
        return {}
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"calls": len(seconds), "median": median, "low": low, "high": high}


def _decided(error: BaseException | None) -> dict[str, Any] | None:
    """What the probe itself decided about a cell: no failure, the process goes on."""
    if isinstance(error, probes.Absent):
        return {"outcome": "absent", "detail": str(error)}
    if isinstance(error, probes.NotExercised):
        return {
            "outcome": "not_exercised",
            "detail": str(error),
            "proof": {str(k): str(v) for k, v in error.proof.items()},
        }
    return None


@contextmanager
def _timed(timing: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    timing[name] += time.monotonic() - began


def _load(names: list[str]) -> dict[str, dict[str, Any]]:
    """Each distinct file once, as CPU tensors by name."""
    from safetensors.torch import load_file

    return {name: load_file(name) for name in dict.fromkeys(names)}


def _plain(ran: Any) -> dict[str, Any]:
    """Outputs as contiguous CPU tensors that share no memory."""
    import torch

    tensors = {}
    for name, value in ran.outputs.items():
        if not isinstance(value, torch.Tensor) or value.is_sparse:
            raise probes.HarnessFault(
                f"output {name!r} is a {type(value).__name__}, not a dense tensor", "Mend the probe"
            )
        tensors[str(name)] = value.detach().to("cpu").clone(memory_format=torch.contiguous_format)
    return tensors


def _write(tensors: dict[str, Any], folder: str, number: int) -> None:
    """``run{number}.safetensors``, under a temporary name and renamed."""
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    final = os.path.join(folder, f"run{number}.safetensors")
    save_file(tensors, final + ".tmp")
    os.replace(final + ".tmp", final)


# ---- facts about an exception ------------------------------------------------------------------------------


def facts(error: BaseException, request: Mapping[str, Any]) -> dict[str, Any]:
    """What can be said of ``error`` without judging it. Paths are absolute; the host makes them relative."""
    roots = [_real(request["setup"]["checkout"]), *map(_real, request["roots"])]
    frames = _frames(error)
    return {
        "type": _type_name(error),
        "message": _text(error),
        "frames": frames if len(frames) <= FRAMES else frames[: FRAMES // 3] + frames[-2 * FRAMES // 3 :],
        "inside": any(_below(f[0], roots) for f in frames) or _calls_candidate(error),
        "kind": _kind(error),
        "remedy": str(getattr(error, "remedy", "")) if isinstance(error, probes.HarnessFault) else "",
        "proof": {str(k): str(v) for k, v in error.proof.items()} if isinstance(error, probes.NotExercised) else {},
        "errno": error.errno if isinstance(error, OSError) else None,
        "foreign_import": _foreign_import(error, roots),
        "device_memory": _device_memory(error),
    }


def _type_name(error: BaseException) -> str:
    module = type(error).__module__
    return type(error).__qualname__ if module in ("builtins", "__main__") else f"{module}.{type(error).__qualname__}"


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as worse:
        text = f"<{type(worse).__name__} while printing the message>"
    return text if len(text) <= MESSAGE_CHARACTERS else text[:MESSAGE_CHARACTERS] + " …"


def _kind(error: BaseException) -> str:
    """absent, not_exercised, harness, blocked (an import that the probe forbade, escaped) or ""."""
    if isinstance(error, probes.Absent):
        return "absent"
    if isinstance(error, probes.NotExercised):
        return "not_exercised"
    if isinstance(error, probes.HarnessFault):
        return "harness"
    return "blocked" if any(isinstance(e, probes.BlockedImport) for e in _chain(error)) else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what led to it, newest first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _frames(error: BaseException) -> list[list[Any]]:
    """[file, line, function], outermost first, of the error and its explicit causes; a SyntaxError's file is last."""
    frames: list[list[Any]] = []
    current: BaseException | None = error
    while current is not None and len(frames) < 5000:
        step = current.__traceback__
        while step is not None:
            code = step.tb_frame.f_code
            frames.append([code.co_filename, step.tb_lineno, code.co_name])
            step = step.tb_next
        if isinstance(current, SyntaxError) and current.filename:
            frames.append([current.filename, current.lineno or 0, "<module>"])
        current = current.__cause__
    return frames


def _calls_candidate(error: BaseException) -> bool:
    """Did it come out of :func:`probes.call`?"""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code is probes.call.__code__:
            return True
        step = step.tb_next
    return False


def _real(path: str) -> str:
    return os.path.realpath(path) + os.sep


def _below(file: str, roots: list[str]) -> bool:
    return os.path.isabs(file) and os.path.realpath(file).startswith(tuple(roots))


def _foreign_import(error: BaseException, roots: list[str]) -> str:
    """Name of the module that could not be imported and is not the candidate's own, or "".

    An ImportError that the candidate caught and survived is no reason for what failed later, so that the implicit
    context is followed only from one ImportError to the next.
    """
    link: BaseException | None = error
    for _ in range(20):
        if isinstance(link, ImportError) and link.name:
            return "" if _own_module(link.name, link.path, roots) else link.name
        if link is None:
            break
        link = link.__cause__ or (link.__context__ if isinstance(link, ImportError) else None)
    return ""


def _own_module(name: str, path: str | None, roots: list[str]) -> bool:
    """Is it below the checkout: by the file named, or by the nearest package of it that is loaded?"""
    if path and _below(path, roots):
        return True
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        if module is not None:
            places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
            return any(isinstance(p, str) and _below(p, roots) for p in places)
    return False


def _device_memory(error: BaseException) -> dict[str, int] | None:
    """Bytes of the device when torch ran out of it: total, free, and reserved by this process."""
    import torch

    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        free, total = torch.cuda.mem_get_info()
        return {"free": free, "total": total, "reserved": torch.cuda.memory_reserved()}
    except RuntimeError:
        return None
