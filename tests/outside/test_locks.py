"""One run at a time on each accelerator, whatever becomes of the one that has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsabisect.outside import locks

UUID = "1e4ae1ac-d6a4-4a4d-9f3d-3a3f0a3c8d0f"
HOLDER = """
import sys, time
from pathlib import Path
from dsabisect.outside import locks
with locks.held(sys.argv[1], Path(sys.argv[2]), lambda text: print(text, flush=True), shown="cuda:0"):
    print("has it", flush=True)
    sys.stdin.readline()
"""


def holder(name: str, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, name, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_name_is_the_cards_own_whatever_the_mask() -> None:
    one = locks.card("cuda:0", uuid=UUID, model="NVIDIA H200", mask="3")
    assert one == locks.card("cuda:3", uuid=f"GPU-{UUID.upper()}") == f"gpu-{UUID}"
    assert locks.card("cpu", uuid="", mask="3") == ""


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (("cuda:0", "3"), ("cuda:3", None), True),
        (("cuda:1", "5, 3"), ("cuda:0", "3,5"), True),
        (("cuda:0", None), ("cuda:0", "1"), False),
        (("cuda:0", "GPU-ab"), ("cuda:1", "0,GPU-ab"), True),
        (("cuda:0", "../../etc/x"), ("cuda:0", None), False),
    ],
)
def test_without_a_uuid_the_mask_is_followed(
    first: tuple[str, str | None], second: tuple[str, str | None], same: bool
) -> None:
    names = [locks.card(device, model="NVIDIA H200", mask=mask) for device, mask in (first, second)]
    assert (names[0] == names[1]) is same
    assert all("/" not in name and name.startswith("NVIDIA_H200-") for name in names)


def test_the_second_waits_and_says_so_once(tmp_path: Path) -> None:
    first = holder("gpu-a", tmp_path)
    assert line_of(first) == "has it"
    second = holder("gpu-a", tmp_path)
    assert line_of(second) == f"waiting for cuda:0: another dsabisect run (pid {first.pid}) measures there"
    other = holder("gpu-b", tmp_path)
    assert line_of(other) == "has it"  # another card is not waited for
    first.communicate("\n", timeout=20)
    assert line_of(second) == "has it"
    third = holder("gpu-a", tmp_path)
    assert f"(pid {second.pid})" in line_of(third)
    for process in (second, third, other):
        process.communicate("\n", timeout=20)
        assert process.returncode == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_dies_gives_it_back(tmp_path: Path, how: signal.Signals) -> None:
    first = holder("gpu-a", tmp_path)
    assert line_of(first) == "has it"
    first.send_signal(how)
    first.communicate(timeout=20)
    said: list[str] = []
    with locks.held("gpu-a", tmp_path, said.append):
        assert said == []
        assert (tmp_path / "locks" / "gpu-a.lock").read_text() == f"{os.getpid()}\n"


def test_it_is_given_back_after_an_error_and_can_be_taken_again(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locks.held("gpu-a", tmp_path, said.append):
            raise ZeroDivisionError
    assert said == []


def test_ctrl_c_ends_the_waiting(tmp_path: Path) -> None:
    with locks.held("gpu-a", tmp_path, print):
        waiting = holder("gpu-a", tmp_path)
        assert line_of(waiting).startswith("waiting")
        waiting.send_signal(signal.SIGINT)
        waiting.communicate(timeout=20)
        assert waiting.returncode not in (0, None)
        assert (tmp_path / "locks" / "gpu-a.lock").read_text() == f"{os.getpid()}\n"  # the holder's, still


def test_two_threads_exclude_each_other(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(me: int) -> None:
        for _ in range(20):
            with locks.held("gpu-a", tmp_path, lambda text: None):
                inside.append(me)
                most.append(len(inside))
                time.sleep(0.001)
                inside.remove(me)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(most) == 80 and max(most) == 1


def test_the_cpu_has_no_lock(tmp_path: Path) -> None:
    with locks.held(locks.card("cpu"), tmp_path, print), locks.held("", tmp_path, print):
        assert not (tmp_path / "locks").exists()


def test_where_there_can_be_no_lock_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("")
    said: list[str] = []
    with locks.held("gpu-a", tmp_path, said.append, shown="cuda:0"):
        pass
    assert len(said) == 1 and "cuda:0" in said[0]
