"""Probes: how to call one repository's indexer. They run inside the candidate's process.

A probe is a module with::

    def open(setup: Setup) -> object          # imports the candidate's code; called once per process
    # the object has:
    def run(self, path: dict, case: dict, inputs: dict[str, torch.Tensor]) -> Ran

``path`` and ``case`` are the JSON forms of PathSpec and Case. All tensors of ``inputs`` are on the CPU as they
stand in the file (fp8 and cache bytes as uint8); the probe moves them. Outputs come back on the CPU.

Probes adapt to old and new interfaces by asking the code (``hasattr``, ``inspect.signature``), never by date.
They raise :class:`Absent` when the path does not exist at this commit, :class:`NotExercised` when another path was
taken than the one asked for, :class:`HarnessFault` when our own stand-ins are at fault. Everything else that comes
out of the candidate's own code is the candidate's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Absent(Exception):
    """The path does not exist at this commit."""


class NotExercised(Exception):
    """The path exists, but something else ran: a flag was not taken, a gate sent the call elsewhere."""

    def __init__(self, message: str, proof: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.proof = dict(proof or {})


class HarnessFault(Exception):
    """Our own surroundings failed; never the candidate's fault. ``remedy`` says what mends it."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class BlockedImport(ImportError):
    """A probe blocked this module on purpose (facet deep_gemm = missing): the candidate's, when it lets it escape."""


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call straight into the candidate's compiled code.

    An exception is the candidate's when its traceback passes through a file of the checkout. A C++ function that the
    probe calls itself leaves no such frame: called through here, what it raises counts as the candidate's too.
    """
    return function(*args, **kwargs)


WARM_CALLS = 3


def repeated(path: Mapping[str, Any], device: str, once: Callable[[], Any]) -> tuple[float, ...]:
    """Seconds of each of ``path["settings"]["timed_calls"]`` calls, the device waited for; () when none are asked for.

    Called after the run that is judged, so that what is compared is never what was timed.
    """
    times = int(path.get("settings", {}).get("timed_calls", 0))
    if not times:
        return ()
    import torch

    wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    seconds = []
    for _ in range(WARM_CALLS + times):
        wait()
        began = time.perf_counter()
        once()
        wait()
        seconds.append(time.perf_counter() - began)
    return tuple(seconds[WARM_CALLS:])


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a probe is opened with."""

    checkout: str  # absolute folder of the candidate's files
    device: str  # "cpu" or "cuda:N"
    arch: str  # "cpu", "sm90", ...
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the path
    scratch: str = ""  # private folder that may be written to


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of one path over one input file."""

    outputs: Mapping[str, Any]  # name → torch.Tensor on the CPU
    proof: Mapping[str, str]  # which path was really taken; empty = not_exercised
    notes: tuple[str, ...] = ()
    stood_in: tuple[str, ...] = ()
    seconds: tuple[float, ...] = ()  # of repeated calls, when the path's settings ask for them: see :func:`repeated`
