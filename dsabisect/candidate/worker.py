"""The zygote: a process that has torch imported and forks one child for each group of cells. No threads, no CUDA.

Started by the host (:mod:`dsabisect.outside.processes`) as ``worker.main(host_pid, control_fd, "torch" | "bare")`` in
its own session. Orders come over a SEQPACKET socket as JSON: ``{"order": "fork"}`` with four descriptors (request to
read; results, log and stack dumps to write), and ``{"order": "sweep"}``. It answers ``ready`` or ``fault`` once, then
``forked``, ``exited`` (wait status) and ``swept``.

The zygote is a *subreaper*: whatever a candidate leaves behind, also through setsid and double forks, becomes the
zygote's child when its parent dies, so that killing all children until none is left kills everything.
When the host dies, by whatever signal, the socket ends and the zygote sweeps and exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SWEEP_SECONDS = 10.0
EXIT_NO_CHANNEL = 70  # the candidate closed the pipe that results go through

Send = Callable[[Mapping[str, Any]], None]


def main(host: int, control_fd: int, kind: str) -> None:
    """Serve until the host goes away. ``kind`` is "torch", or "bare" for build steps, which need no torch."""
    control = socket.socket(fileno=control_fd)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        if sys.version_info < (3, 10):  # noqa: UP036  (another interpreter than the host's)
            raise RuntimeError(f"Python {sys.version.split()[0]} is too old, 3.10 or later is needed")
        if kind == "torch":
            import safetensors.torch  # noqa: F401  (loads torch and, where there is one, numpy)
    except BaseException as error:
        answer(
            control,
            {"event": "fault", "error": f"{type(error).__name__}: {error}", "text": traceback.format_exc()[-4000:]},
        )
        return
    gc.collect()
    gc.freeze()  # a child's first collection would otherwise copy every page of the heap
    answer(
        control, {"event": "ready", "threads": len(os.listdir("/proc/self/task")), "triton": "triton" in sys.modules}
    )
    serve(control, host)
    sweep()


def serve(control: socket.socket, host: int) -> None:
    """Answer orders until the socket ends or the host is no longer our parent."""
    wake, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    child = 0
    while os.getppid() == host:
        readable, _, _ = select.select([control.fileno(), wake], [], [], 1.0)
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        for pid, status in ended():
            if pid == child:
                answer(control, {"event": "exited", "status": status})
        if control.fileno() not in readable:
            continue
        data, fds, _, _ = socket.recv_fds(control, 4096, 8, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        if json.loads(data)["order"] == "fork":
            child = fork(control, fds)
        else:
            statuses = sweep()
            if child in statuses:
                answer(control, {"event": "exited", "status": statuses[child]})
            answer(control, {"event": "swept", "left": len(children())})


def answer(control: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a dead host is noticed by the loop
        control.send(json.dumps(message).encode())


# ---- children of this process ------------------------------------------------------------------------------


def children() -> list[int]:
    """Direct children, zombies included."""
    me = os.getpid()
    try:
        with open(f"/proc/self/task/{me}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:  # kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == me]


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def ended() -> Iterator[tuple[int, int]]:
    """Reap what has ended, orphans included: (pid, wait status)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def sweep() -> dict[int, int]:
    """Kill all children, and the orphans that become ours by that, until none is left. Wait statuses by pid."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline:
        alive = children()
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        statuses.update(ended())
        if not alive:
            break
        time.sleep(0.001)
    return statuses


def fork(control: socket.socket, fds: list[int]) -> int:
    """Fork a child that owns ``fds``; gives its pid, 0 when the fork failed."""
    zygote = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        answer(control, {"event": "fault", "error": f"fork: {error}", "text": ""})
        pid = 0
    else:
        if pid == 0:
            _child(zygote, *fds)
        answer(control, {"event": "forked", "pid": pid})
    for fd in fds:
        os.close(fd)
    return pid


# ---- inside the child --------------------------------------------------------------------------------------


def _child(zygote: int, request_fd: int, results_fd: int, log_fd: int, stack_fd: int) -> NoReturn:
    code = 1
    try:
        results_fd = _settle(zygote, request_fd, results_fd, log_fd, stack_fd)
        with open(request_fd, encoding="utf-8") as file:
            request = json.load(file)
        send = _sender(results_fd, request.pop("token"))
        os.environ.clear()
        os.environ.update(request.pop("env"))
        os.chdir(request["cwd"])
        random.seed(0)
        _DO[request["do"]](request, send)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(code)  # no atexit hooks, no waiting for a candidate's threads


def _settle(zygote: int, request_fd: int, results_fd: int, log_fd: int, stack_fd: int) -> int:
    """Leave the zygote: own session, no inherited descriptors, first to go when memory runs out."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(source, target)
    # a number that nothing else gets by accident: a candidate that closes "its" descriptor 5 hits nothing of ours
    results = fcntl.fcntl(results_fd, fcntl.F_DUPFD_CLOEXEC, random.SystemRandom().randrange(100, 250))
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (results, request_fd, stack_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
    _line_buffered()
    faulthandler.enable(file=stack_fd)  # a file of its own: the log may be full of the candidate's output
    faulthandler.register(
        signal.SIGUSR1, file=stack_fd, all_threads=True
    )  # the host asks where we stand before it ends us
    return results


def _line_buffered() -> None:
    """What Python and C code print reaches the log at once, also when the process dies the next moment."""
    for name, fd in (("stdout", 1), ("stderr", 2)):  # the zygote's own stand on another file
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)  # 1 = _IOLBF


def flush() -> None:
    """Empty Python's and C's output buffers (a JIT compiler's message may sit in the latter)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


BEFORE_A_CELL = ("opened", "cell")  # what is printed after such a message is the next cell's: the log says where


def _sender(fd: int, token: str) -> Send:
    """One JSON line a message, each with the token that only host and worker know: printed text is no result."""

    count = 0

    def send(message: Mapping[str, Any]) -> None:
        nonlocal count
        count += 1
        flush()
        mark = f"[dsabisect: {count} {message['event']}]\n" if message["event"] in BEFORE_A_CELL else ""
        with contextlib.suppress(OSError):
            os.write(1, mark.encode())
        data = json.dumps({**message, "mark": mark, "token": token, "sent": time.monotonic()}).encode() + b"\n"
        try:
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            os._exit(EXIT_NO_CHANNEL)

    return send


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _measure(request: Mapping[str, Any], send: Send) -> None:
    from dsabisect.candidate import cells

    cells.measure(request, send)


def _environment(request: Mapping[str, Any], send: Send) -> None:
    from dsabisect.candidate import installed

    send({"event": "environment", **installed.environment(request["device"])})


def _execute(request: Mapping[str, Any], send: Send) -> None:
    argv = request["argv"]
    try:
        os.execvpe(argv[0], argv, dict(os.environ))
    except OSError as error:
        send({"event": "exec_failed", "error": error.strerror, "program": argv[0]})


_DO: Mapping[str, Callable[[Mapping[str, Any], Send], None]] = {
    "measure": _measure,
    "environment": _environment,
    "execute": _execute,
}
