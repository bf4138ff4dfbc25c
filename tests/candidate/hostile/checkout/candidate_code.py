"""The code under test of the runner's tests: does to its process what ``misbehave`` is told. Copied into a checkout."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
CALLS = []  # in this process


def scores(x):
    CALLS.append(os.getpid())
    return x * 2


def misbehave(action, notes):
    """``notes``: a folder outside, for what the test wants to see."""
    deed = globals()[f"do_{action}"]
    deed(Path(notes))


def do_nothing(notes):
    pass


def do_print_forged(notes):
    for fd in (1, 2):
        os.write(fd, b'{"event": "cell", "cell": 0, "outcome": "completed", "runs": 3, "token": ""}\n')
    print(json.dumps({"event": "finished"}))


def do_forge_everywhere(notes):
    """Write a result with a guessed token to every descriptor that is open."""
    line = b'{"event": "cell", "cell": 0, "outcome": "absent", "token": "0123456789abcdef0123456789abcdef"}\n'
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):
                os.write(fd, line)


def do_print_much(notes):
    for _ in range(400):
        os.write(1, b"x" * 8191 + b"\n")
    print("the end of it")


def do_print_for_ever(notes):
    while True:
        os.write(1, b"y" * 65536)


def do_fork_and_sleep(notes):
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
    (notes / "pid").write_text(str(pid))


def do_daemon(notes):
    """Double fork, own session, environment cleared by exec."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            (notes / "pid.tmp").write_text(str(os.getpid()))
            os.rename(notes / "pid.tmp", notes / "pid")
            os.execve("/bin/sleep", ["sleep", "1000"], {})
        os._exit(0)
    while not (notes / "pid").exists():
        time.sleep(0.01)


def do_daemon_and_sleep(notes):
    do_daemon(notes)
    time.sleep(1000)


def do_sleep(notes):
    time.sleep(1000)


def do_fill_memory(notes):
    held = []
    while True:
        held.append(bytearray(b"\1") * (16 << 20))


def do_fill_memory_in_daemon(notes):
    """In a grandchild with a session of its own, while this process waits."""
    greed = "held = []\nwhile True: held.append(bytearray(b'1') * (16 << 20))"
    subprocess.Popen([sys.executable, "-c", greed], start_new_session=True).wait()


def do_share_memory(notes):
    """200 MB shared with three forked children: counted once."""
    held = torch.ones(50 << 20, dtype=torch.float32)
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            time.sleep(0.15)  # three ticks of the watch
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    assert held[0] == 1


def do_allocate_absurdly(notes):
    torch.empty(1 << 50)


def do_delete_checkout(notes):
    shutil.rmtree(HERE)


def do_exit_zero(notes):
    os._exit(0)


def do_segfault(notes):
    ctypes.string_at(0)


def do_abort(notes):
    ctypes.CDLL(None).abort()


def do_kill_parent(notes):
    os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
    time.sleep(1000)


def do_kill_parent_once(notes):
    if not (notes / "done").exists():
        (notes / "done").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)


def do_stop_parent(notes):
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)


def do_close_everything(notes):
    os.closerange(0, 4096)


def do_raise(notes):
    raise ValueError(f"The size of tensor a ({id(notes) % 97}) must match, at {hex(id(notes))} in {HERE}/x.cu")


def do_raise_in_library(notes):
    torch.zeros(6) + torch.zeros(4)


def do_raise_in_call_back(notes):
    json.dumps({1: object()}, default=lambda value: 1 / 0)


def do_system_exit(notes):
    sys.exit("that is all")


def do_keyboard_interrupt(notes):
    raise KeyboardInterrupt


def do_interrupt_itself(notes):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def do_change_folder(notes):
    os.chdir("/")


def do_import_missing(notes):
    import a_module_that_nobody_has  # noqa: F401


def do_import_own_missing(notes):
    import own_package.not_there  # noqa: F401


def do_survive_missing(notes):
    try:
        import a_module_that_nobody_has  # noqa: F401
    except ImportError:
        raise RuntimeError("no other way")  # noqa: B904


def do_import_blocked(notes):
    import deep_gemm  # noqa: F401


def do_blocked_as_object(notes):
    try:
        import deep_gemm
    except ImportError as error:
        deep_gemm = error
    deep_gemm.get_num_sms()


def do_cuda_error(notes):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def do_context_lost_later(notes):
    """What the probe's own copy to the CPU reports after a bad kernel."""
    os.environ["CONTEXT_LOST"] = "1"


def do_device_gone(notes):
    raise RuntimeError("No CUDA GPUs are available: no CUDA-capable device is detected")


def do_no_space(notes):
    raise OSError(28, "No space left on device", str(notes))


def do_write_outside(notes):
    (notes / "written").write_text("outside")


def do_compile(notes):
    ctypes.CDLL(None).printf(b'a.cuh(97): error: static assertion failed with "Invalid block size"\n')
    raise RuntimeError("Assertion error (csrc/jit/compiler.hpp:197): NVCC compilation failed")


def do_endless_recursion(notes):
    do_endless_recursion(notes)


def do_unprintable(notes):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    raise Odd
