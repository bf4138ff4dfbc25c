"""A line of the doctor, and foreign programs run where they cannot hurt: in processes of their own, in bounded time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OK, WARNING, FAULT = "ok", "warning", "fault"
IMPORT_SECONDS, COMPILE_SECONDS, KERNEL_SECONDS = 120.0, 60.0, 420.0
MARK = "DSABISECT-DOCTOR "  # before the one line of a child's output that is ours


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing looked at. ``remedy`` is "" when nothing is to be done."""

    name: str
    status: str  # ok | warning | fault
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a child ended. ``code`` is negative for a signal, None when ``trouble`` says why there is none."""

    code: int | None
    output: str = ""  # stdout and stderr together
    trouble: str = ""  # it could not be started, or did not end in time

    @property
    def told(self) -> dict[str, Any] | None:
        """What the child reported, when it got that far."""
        lines = [line for line in self.output.splitlines() if line.startswith(MARK)]
        return json.loads(lines[-1][len(MARK) :]) if lines else None

    @property
    def ending(self) -> str:
        """One line for a person: the signal or exit code, and the last line printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip() and not line.startswith(MARK)]
        last = f": {lines[-1][:200]}" if lines else ""
        if self.code is None:
            return f"{self.trouble}{last}"
        if self.code < 0:
            return f"died of {_signal_name(-self.code)}{last}"
        return f"exit code {self.code}{last}"


def own_environment() -> dict[str, str]:
    """Ours, without what would make a child's git look elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def child(argv: Sequence[str], env: Mapping[str, str], seconds: float, cwd: str = "/") -> Ran:
    """Run to its end in a process group of its own; on a timeout the whole group is killed.

    Not in the folder that we stand in: its files would come before installed modules.
    """
    try:
        child = subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Ran(code=None, trouble=f"cannot be started ({error.strerror or error})")
    code: int | None
    trouble = ""
    try:
        output, _ = child.communicate(timeout=seconds)
        code = child.returncode
    except subprocess.TimeoutExpired:
        _kill(child)
        output, code, trouble = child.communicate()[0], None, f"did not end within {seconds:g} s"
    except BaseException:
        _kill(child)
        child.wait()
        raise
    return Ran(code=code, output=output.decode(errors="replace"), trouble=trouble)


def _kill(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
