"""Host side of the candidate's processes: start a zygote, have it fork, watch the child, leave nothing running.

One :class:`Zygote` is one process (:mod:`dsabisect.candidate.worker`) with at most one living child. A thread of the
host watches that child: it reads results and log, keeps the deadline, and adds up the memory of everything below the
zygote every 50 ms, whatever session or group it moved to.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dsabisect
from dsabisect.errors import EnvironmentFault, StoreError

TICK_SECONDS = 0.05
READY_SECONDS = 300.0  # import torch from a cold disk
SWEEP_SECONDS = 15.0
TAIL_BYTES = 1 << 16
LONGEST_MESSAGE = 16 << 20
MARK = "DSABISECT_RUN"  # in the environment of every process below a zygote

BOOT = """
import sys
sys.path[:] = [p for p in sys.path if p]
import importlib.util as u
spec = u.spec_from_file_location("dsabisect", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
sys.modules["dsabisect"] = module = u.module_from_spec(spec)
spec.loader.exec_module(module)
from dsabisect.candidate import worker
worker.main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""  # by file, not by PYTHONPATH: the folder that holds our package may hold a whole site-packages besides


# ---- /proc -------------------------------------------------------------------------------------------------


def descendants(root: int) -> list[int]:
    """All processes below ``root``, without it. A process that ends meanwhile is left out."""
    found: list[int] = []
    waiting = [root]
    by_parent: dict[int, list[int]] | None = None
    while waiting:
        pid = waiting.pop()
        try:
            below = _children(pid)
        except FileNotFoundError:
            continue
        except OSError:  # kernel without CONFIG_PROC_CHILDREN: one pass over /proc instead
            by_parent = by_parent or _by_parent()
            below = by_parent.get(pid, [])
        found += below
        waiting += below
    return found


def _children(pid: int) -> list[int]:
    below: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                below += map(int, file.read().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}/stat"):
                raise PermissionError("no children file") from None
    return below


def _by_parent() -> dict[int, list[int]]:
    table: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            table.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(pid)
    return table


def memory(pids: Sequence[int], limit: int) -> int:
    """Bytes of anonymous and shared memory of ``pids`` together.

    Pages that forked processes share are counted once each in the cheap sum, so that a sum over ``limit`` is checked
    with the proportional share (Pss) before it is believed, and that once more: a process that ends while the others
    are being read leaves them its share, which is then counted twice.
    """
    cheap = sum(_sum_fields(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:")) for pid in pids)
    if cheap <= limit:
        return cheap
    shares = _shares(pids)
    return (min(shares, _shares(pids)) if shares > limit else shares) or cheap


def _shares(pids: Sequence[int]) -> int:
    return sum(_sum_fields(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in pids)


def _sum_fields(file: str, names: tuple[str, ...]) -> int:
    try:
        with open(file) as lines:
            return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
    except (OSError, ValueError, IndexError):
        return 0


def oom_kills() -> int:
    """How often the kernel has killed a process for want of memory since boot."""
    try:
        with open("/proc/vmstat") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except OSError:
        return 0


def kill_marked(mark: str) -> int:
    """Kill every process whose environment carries our mark, for when the zygote itself was killed. Their number."""
    needle, killed = f"{MARK}={mark}".encode(), 0
    for _ in range(100):
        alive = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if needle in _environ(pid)]
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed += len(alive)
        if not alive:
            break
        time.sleep(0.01)
    return killed


def _environ(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


# ---- log ---------------------------------------------------------------------------------------------------


class CappedLog:
    """What a child prints: the beginning up to a limit and the last 64 KiB, however much there is in between."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit, self.total = path, max(limit - TAIL_BYTES, 4096), 0
        self._tail = b""
        self._file = open(path, "wb")  # noqa: SIM115  (closed by close)

    def write(self, data: bytes) -> None:
        room = self.limit - self.total
        if room > 0:
            self._file.write(data[:room])
            self._file.flush()
        self.total += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def since(self, mark: int) -> str:
        """Text after byte ``mark``, as far as it is still held (64 KiB)."""
        held = min(max(self.total - mark, 0), len(self._tail))
        return self._tail[len(self._tail) - held :].decode(errors="replace")

    def after(self, mark: str) -> int:
        """Byte behind the last ``mark``; the end where it is not held: the child may have printed on since it spoke."""
        at = self._tail.rfind(mark.encode()) if mark else -1
        return self.total if at < 0 else self.total - len(self._tail) + at + len(mark.encode())

    def close(self, note: str = "") -> None:
        missed = self.total - self.limit
        if missed > 0:
            cut = max(missed - len(self._tail), 0)
            self._file.write(f"\n[dsabisect: {cut} bytes cut here]\n".encode() + self._tail[-missed:])
        if note:
            self._file.write(f"\n[dsabisect: {note}]\n".encode())
        self._file.close()


# ---- a child and its watch ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The last thing that is heard of a child."""

    cause: str  # exited | timed_out | out_of_memory | zygote (it was killed) | stopped (by us)
    status: int | None = None  # wait status where it ended by itself
    peak_bytes: int = 0
    oom_kills: int = 0  # by the kernel, anywhere on the machine, meanwhile
    stack: str = ""  # Python frames of all threads at a crash or time-out (faulthandler)


@dataclass(kw_only=True)
class Child:
    """One forked child. ``events`` yields its messages in order and then one :class:`Ended`."""

    log: CappedLog
    token: str
    memory_limit: int
    renewal: float  # seconds granted anew by each message that asks for it
    deadline: float
    results_fd: int
    log_fd: int
    stack_fd: int  # a file without a name
    zygote: Zygote
    queue: queue.SimpleQueue[dict[str, Any] | Ended] = field(default_factory=queue.SimpleQueue)
    cause: str = ""
    peak: int = 0
    stopping: bool = False
    pid: int = 0
    _buffer: bytes = b""

    def events(self) -> Iterator[dict[str, Any] | Ended]:
        """Blocks; after :class:`Ended` nothing of the child is left."""
        while True:
            event = self.queue.get()
            yield event
            if isinstance(event, Ended):
                return

    def stop(self) -> None:
        """End the child and wait until everything it started is gone."""
        self.stopping = True
        self.thread.join()

    def start(self) -> None:
        self.thread = threading.Thread(target=self._watch, name="dsabisect-watch", daemon=True)
        self.thread.start()

    # ---- in the watching thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        kills = oom_kills()
        ended = Ended(cause="zygote")
        try:
            status = self._until_end()
            self._drain()
            self.zygote.sweep(self)
            status = self.zygote.exit_status if status is None else status
            self._drain()
            ended = Ended(
                cause=self.cause or "exited", status=status, peak_bytes=self.peak, oom_kills=oom_kills() - kills,
                stack=os.pread(self.stack_fd, TAIL_BYTES, 0).decode(errors="replace"),
            )  # fmt: skip
        finally:
            with contextlib.suppress(OSError):
                self.log.close("\n".join(filter(None, (ended.stack, "" if ended.cause == "exited" else ended.cause))))
            for fd in (self.results_fd, self.log_fd, self.stack_fd):
                os.close(fd)
            self.queue.put(ended)

    def _until_end(self) -> int | None:
        """Until the child exits or has to be ended; its wait status in the first case."""
        control = self.zygote.control.fileno()
        poll = select.poll()
        for fd in (control, self.results_fd, self.log_fd):
            poll.register(fd, select.POLLIN)
        check = time.monotonic() + TICK_SECONDS
        while not self.cause:
            for fd, _ in poll.poll(max(0.0, check - time.monotonic()) * 1000):
                if fd != control:
                    if (self._read_results() if fd == self.results_fd else self._read_log()) == b"":
                        poll.unregister(fd)  # every writer is gone
                    continue
                message = self.zygote.receive()
                if message is None:
                    self.cause = "zygote"
                elif message["event"] == "forked":
                    self.pid = message["pid"]
                elif message["event"] == "exited":
                    return int(message["status"])
                elif message["event"] == "fault":
                    self.queue.put(message)
                    self.cause = "stopped"
            if time.monotonic() >= check:
                check = time.monotonic() + TICK_SECONDS
                self._check()
        return None

    def _check(self) -> None:
        used = memory(descendants(self.zygote.pid), self.memory_limit)
        self.peak = max(self.peak, used)
        if self.stopping:
            self.cause = "stopped"
        elif used > self.memory_limit:
            self.cause = "out_of_memory"
        elif time.monotonic() > self.deadline:
            self._ask_where()
            self.cause = "timed_out"

    def _ask_where(self) -> None:
        """Have the child write its Python stacks to the log (faulthandler) before it is ended."""
        if self.pid in descendants(self.zygote.pid):
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.1)

    def _drain(self) -> None:
        for read in (self._read_log, self._read_results):
            for _ in range(100):  # a leftover process may go on printing until it is swept
                if not read():
                    break

    def _read_log(self) -> bytes | None:
        """What was read; b"" at the end, None when there is nothing now."""
        data = _read(self.log_fd)
        if data:
            with contextlib.suppress(OSError):  # a full disk must not end the watch
                self.log.write(data)
        return data

    def _read_results(self) -> bytes | None:
        data = _read(self.results_fd)
        *lines, self._buffer = (self._buffer + (data or b"")).split(b"\n")
        if len(self._buffer) > LONGEST_MESSAGE:
            self._buffer = b""
        for line in lines:
            self._accept(line)
        return data

    def _accept(self, line: bytes) -> None:
        """Take a line for a message only with this child's token in it."""
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict) or not secrets.compare_digest(str(message.pop("token", "")), self.token):
            return
        for _ in range(2):  # the child has flushed before it spoke: what the pipe holds now belongs to this message
            self._read_log()
        message["received"], message["log_mark"] = time.monotonic(), self.log.after(str(message.get("mark", "")))
        if message.get("renew"):
            self.deadline = time.monotonic() + self.renewal
        self.queue.put(message)


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None


# ---- the zygote --------------------------------------------------------------------------------------------


class Zygote:
    """A started worker process, with one living child at most; not to be shared between threads."""

    def __init__(self, *, interpreter: str, env: Mapping[str, str], mark: str, work: Path, torch: bool) -> None:
        self.mark, self.exit_status = mark, None
        self.interpreter = interpreter
        folder = work / "zygote"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{secrets.token_hex(4)}.log"
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(dsabisect.__file__).resolve().parent)
        argv = [
            interpreter,
            "-s",
            "-c",
            BOOT,
            package,
            str(os.getpid()),
            str(theirs.fileno()),
            "torch" if torch else "bare",
        ]
        try:
            with open(self.log, "wb") as log:
                self.process = subprocess.Popen(
                    argv, env={**env, MARK: mark}, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=[theirs.fileno()], start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self.control.close()
            raise EnvironmentFault(
                f"cannot start the interpreter: {error.strerror}",
                where=interpreter,
                remedy="Give another with --python",
            ) from error
        finally:
            theirs.close()
        self.pid = self.process.pid
        try:
            self._expect_ready()
        except BaseException:
            self.close()
            raise

    exit_status: int | None

    def _expect_ready(self) -> None:
        message = self.receive(READY_SECONDS)
        if message is not None and message["event"] == "ready":
            self.log.unlink(missing_ok=True)
            return
        if message is not None:
            raise EnvironmentFault(
                f"the candidate's interpreter cannot load torch: {message['error']}", where=self.interpreter,
                remedy="Install torch, numpy and safetensors into it, or give another with --python",
            )  # fmt: skip
        text = self.log.read_text(errors="replace").strip().splitlines()
        raise EnvironmentFault(
            f"the candidate's interpreter does not start: {text[-1] if text else 'no answer'}", where=self.interpreter,
            remedy=f"Try `{self.interpreter} -c 'import torch, safetensors'`; log: {self.log}",
        )  # fmt: skip

    def alive(self) -> bool:
        return self.process.poll() is None

    def receive(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """The next message; None when the zygote is gone, or silent for ``seconds``."""
        try:
            if not select.select([self.control], [], [], seconds)[0]:
                return None
            data = self.control.recv(1 << 16)
        except (OSError, ValueError):  # ValueError: closed by another thread
            return None
        return json.loads(data) if data else None

    def fork(
        self,
        request: Mapping[str, Any],
        *,
        log: Path,
        log_bytes: int,
        memory_bytes: int,
        seconds: float,
        renewal: float,
    ) -> Child:
        """Fork a child that does ``request`` (JSON, with ``do``, ``env`` and ``cwd``) and watch it.

        Raises:
            OSError: the zygote is gone.
        """
        token = secrets.token_hex(16)
        self.exit_status = None
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = CappedLog(log, log_bytes)
        except OSError as error:
            raise StoreError(
                f"cannot write a log: {error.strerror}", where=str(log), remedy="Give another folder with --out"
            ) from error
        request_r, request_w = os.pipe()
        results_r, results_w = os.pipe()
        log_r, log_w = os.pipe()
        stack = os.memfd_create("stack")
        os.set_blocking(results_r, False)
        os.set_blocking(log_r, False)
        child = Child(
            log=sink, token=token, memory_limit=memory_bytes, renewal=renewal, deadline=time.monotonic() + seconds,
            results_fd=results_r, log_fd=log_r, stack_fd=stack, zygote=self,
        )  # fmt: skip
        try:
            socket.send_fds(self.control, [b'{"order": "fork"}'], [request_r, results_w, log_w, stack])
        except OSError:
            for fd in (results_r, log_r, request_w, stack):
                os.close(fd)
            raise
        finally:
            for fd in (request_r, results_w, log_w):
                os.close(fd)
        child.start()
        data = json.dumps({**request, "token": token, "asked": time.monotonic()}).encode()
        with contextlib.suppress(BrokenPipeError), open(request_w, "wb") as file:
            file.write(data)
        return child

    def sweep(self, child: Child) -> None:
        """Kill everything below the zygote; with the zygote itself when it does not answer."""
        below = descendants(self.pid) if self.alive() else []
        if child.cause != "zygote":
            with contextlib.suppress(OSError):
                self.control.send(b'{"order": "sweep"}')
            deadline = time.monotonic() + SWEEP_SECONDS
            while (message := self.receive(max(0.0, deadline - time.monotonic()))) is not None:
                if message["event"] == "exited":
                    self.exit_status = message["status"]
                if message["event"] == "swept" and not message["left"]:
                    return
                if message["event"] == "swept":
                    break
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.close()
        kill_marked(self.mark)

    def close(self) -> None:
        """End the zygote; it sweeps when its socket ends, and we look for what is left."""
        self.control.close()
        try:
            self.process.wait(SWEEP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
