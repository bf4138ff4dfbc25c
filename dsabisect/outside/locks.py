"""One lock for each accelerator: two runs of a person never measure on one card at the same time.

The lock is held by the open file, so that it ends with the process, however that ends. The cpu has none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from dsabisect.outside.store import NO_LOCKS

MASK = "CUDA_VISIBLE_DEVICES"


def card(device: str, *, uuid: str = "", model: str = "", mask: str | None = None) -> str:
    """A name for the accelerator behind ``device`` that no mask changes; empty for the cpu.

    Args:
        device: ``cpu`` or ``cuda:N``.
        uuid: the card's own, as ``Runner.uuids`` has it. Without it the name is made of
        model: the card's name, such as ``NVIDIA H200``, and
        mask: what ``CUDA_VISIBLE_DEVICES`` says; None: not set. Its N-th word is the card.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return ""
    if uuid:
        return _safe(f"gpu-{uuid.lower().removeprefix('gpu-')}")
    seen = [word.strip() for word in mask.split(",")] if mask is not None else []
    word = seen[int(index)] if int(index) < len(seen) else index
    return _safe(f"{model or kind}-{word}")


@contextlib.contextmanager
def held(device_name: str, root: Path, say: Callable[[str], None], *, shown: str = "") -> Iterator[None]:
    """Hold the lock of one accelerator below ``root/locks`` while the block runs; wait for it, and say so once.

    Not to be taken twice by one process. Who needs several takes them in the order of their names.

    Args:
        device_name: from :func:`card`; empty: nothing to lock.
        root: the folder that all runs share, ``store.work_root()``.
        say: gets one line when another run has the lock, or when there can be no locks here.
        shown: what a person calls the device, ``cuda:0``.
    """
    if not device_name:
        yield
        return
    try:
        fd = _open(root / "locks" / f"{_safe(device_name)}.lock")
    except OSError as error:
        say(f"nothing keeps other runs off {shown or device_name}: {error}")
        yield
        return
    try:
        _wait(fd, shown or device_name, say)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)  # gives the lock back; the file stays: who waits has it open


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _wait(fd: int, shown: str, say: Callable[[str], None]) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        say(f"waiting for {shown}: another dsabisect run{f' (pid {pid})' if pid else ''} measures there")
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        say(f"nothing keeps other runs off {shown}: {error}")
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)[:100]
