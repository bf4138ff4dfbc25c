"""Whose failure it is, and one name for the same failure at two commits. Facts as a child sends them; no processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dsabisect.outside import failures
from dsabisect.outside.failures import Origin, judge, signature


def facts(message: str = "", **more: Any) -> dict[str, Any]:
    made = {
        "type": "RuntimeError", "message": message, "frames": [["/p/probe.py", 3, "run"]], "inside": False, "kind": "",
        "remedy": "", "proof": {}, "errno": None, "foreign_import": "", "device_memory": None,
    }  # fmt: skip
    assert set(more) <= set(made)
    return {**made, **more}


def origin(message: str = "", *, phase: str = "run", checkout: Path = Path("/c"), **more: Any) -> Origin:
    return judge(facts(message, **more), phase=phase, checkout=checkout).origin


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("size of tensor a (6) must match b (4)", "size of tensor a (12) must match b (8)"),
        ("/tmp/x1/csrc/a.cu(12): error: 'T'", "/work/long/way/a.cu(977): error:  'T'"),
        ("at 0x7f00aa", "at 0x1"),
        ("object <f at 0xdeadbeef>\nmore of it", "object <f at 0x1234>\nother lines"),
        ("took 1.5e-3 s", "took 22 s"),
        ("checkout 3f9a0b77c1de4455 fails", "checkout 00aa11bb22cc33dd fails"),
    ],
)
def test_one_signature(one: str, other: str) -> None:
    assert signature("E", one) == signature("E", other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("name 'a' is not defined", "name 'b' is not defined"),
        ("csrc/a.cu: error", "csrc/b.cu: error"),
        ("Invalid block size", "Invalid head size"),
    ],
)
def test_two_signatures(one: str, other: str) -> None:
    assert signature("E", one) != signature("E", other)


def test_a_signature_is_bounded_and_never_empty() -> None:
    assert len(signature("E", "x" * 10_000)) == failures.SIGNATURE_CHARACTERS
    assert signature("E", "") == "E" and signature("", "text") == "text"


def test_whose_it_is() -> None:
    assert origin("boom", inside=True) is Origin.CANDIDATE
    assert origin("boom") is Origin.HARNESS
    assert origin("boom", inside=True, phase="write") is Origin.HARNESS
    assert origin("x", kind="absent") is Origin.ABSENT
    assert origin("x", kind="not_exercised") is Origin.NOT_EXERCISED
    assert origin("x", kind="harness", inside=True) is Origin.HARNESS
    assert origin("No module named 'x'", foreign_import="x", inside=True) is Origin.HARNESS
    assert origin("No module named 'x'", foreign_import="x", inside=True, kind="blocked") is Origin.CANDIDATE
    assert origin("no module", foreign_import="x", kind="blocked") is Origin.HARNESS  # the probe's own import
    assert origin("No space left on device", errno=28, inside=True) is Origin.ENVIRONMENT


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA driver error (csrc/x.hpp:3): 700 (CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access was encountered)",
        "CUDA error: unspecified launch failure",
    ],
)
def test_a_lost_context_is_the_candidates_wherever_it_shows(text: str) -> None:
    assert origin(text, phase="outputs") is Origin.CANDIDATE_CRASH
    assert origin(text, phase="run") is Origin.CANDIDATE_CRASH


@pytest.mark.parametrize("text", ["CUDA error: invalid argument", "CUDA error: no kernel image is available"])
def test_other_cuda_errors_are_exceptions_like_any(text: str) -> None:
    assert origin(text, inside=True) is Origin.CANDIDATE and origin(text) is Origin.HARNESS


def test_memory_of_the_device() -> None:
    gib = 1 << 30
    mine = {"total": 140 * gib, "free": 1 * gib, "reserved": 138 * gib}
    theirs = {"total": 140 * gib, "free": 1 * gib, "reserved": 20 * gib}
    oom = {"type": "torch.OutOfMemoryError", "inside": True}
    assert origin("CUDA out of memory.", device_memory=mine, **oom) is Origin.CANDIDATE_MEMORY
    judged = judge(facts("CUDA out of memory.", device_memory=theirs, **oom), phase="run", checkout=Path("/c"))
    assert judged.origin is Origin.ENVIRONMENT and "Other processes hold 121856 MiB" in judged.remedy


def test_a_compiled_function_names_its_source(tmp_path: Path) -> None:
    """C++ that the probe calls leaves no Python frame, but its assertions name a file of the checkout."""
    text = "Assertion error (csrc/apis/attention.hpp:148): next_n == 1 or next_n == 2"
    assert origin(text, checkout=tmp_path) is Origin.HARNESS
    (tmp_path / "csrc" / "apis").mkdir(parents=True)
    (tmp_path / "csrc" / "apis" / "attention.hpp").touch()
    assert origin(text, checkout=tmp_path) is Origin.CANDIDATE
    assert origin(f"{tmp_path}/a.cu(3): error", checkout=tmp_path) is Origin.CANDIDATE
    assert origin("csrc/../../etc/x.h failed", checkout=tmp_path) is Origin.HARNESS


STATIC = '/r/smxx.cuh(97): error: static assertion failed with "Invalid block size"'


@pytest.mark.parametrize("where", ["log", "message"])
def test_a_failed_compilation_is_named_by_the_compiler(where: str) -> None:
    text = "Assertion error (csrc/jit/compiler.hpp:197): NVCC compilation failed"
    said = facts(f"{text}\n{STATIC}" if where == "message" else text)
    failure = judge(
        said, phase="run", checkout=Path("/c"), log=f"warnings\n{STATIC}\n" if where == "log" else ""
    ).failure
    assert failure.message.count("Invalid block size") == 1
    assert failure.signature == (
        "RuntimeError: Assertion error (compiler.hpp:N): NVCC compilation failed"
        ' | smxx.cuh(N): error: static assertion failed with "Invalid block size"'
    )


def test_a_log_of_another_matter_names_nothing() -> None:
    assert "|" not in judge(facts("plain"), phase="run", checkout=Path("/c"), log=STATIC).failure.signature


def test_frames_are_relative_short_and_not_ours() -> None:
    frames = [["/x/dsabisect/candidate/cells.py", 1, "_measured"], *[[f"/c/f{i}.py", i, "g"] for i in range(30)]]
    failure = judge(facts("x", frames=frames, inside=True), phase="run", checkout=Path("/c")).failure
    lines = failure.traceback.splitlines()
    assert len(lines) == failures.TRACEBACK_FRAMES and lines[-1] == "f29.py:29 in g"


def test_crashes() -> None:
    said = "terminate called after throwing an instance of 'c10::Error'\n"
    stack = (
        'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "/other.py", line 1 in wait\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/c/k.py", line 7 in launch\n'
        '  File "/x/dsabisect/candidate/cells.py", line 9 in _measured\n'
    )
    failure = failures.crash(signal.SIGABRT, said, Path("/c"), stack)
    assert failure.type == "SIGABRT" and failure.traceback == "k.py:7 in launch"
    assert failure.signature == "SIGABRT: terminate called after throwing an instance of 'cN::Error'"
    assert failures.crash(3 << 8, "", Path("/c")).signature == "Exited: exited 3 without a result"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "a\n/s/x.cu(3): error: one\n/s/y.cu(4): error: two\nsubprocess.CalledProcessError: ninja\n",
            "/s/x.cu(3): error: one",
        ),
        ("Traceback\n  File x\nValueError: first\nDuring\nRuntimeError: last\n", "RuntimeError: last"),
        ("0 errors so far\nno error here: fine\n", "no error here: fine"),
        ("x.o: undefined reference to `f'\n", "x.o: undefined reference to `f'"),
        ("", ""),
    ],
)
def test_the_first_error_of_a_build(log: str, line: str) -> None:
    assert failures.first_error(log) == line


@pytest.mark.parametrize(
    "log",
    [
        "OSError: CUDA_HOME environment variable is not set. Please set it",
        "/bin/sh: 1: nvcc: not found",
        "error: command 'g++' failed: No such file or directory",
        "ModuleNotFoundError: No module named 'torch'",
        "g++: fatal error: Killed signal terminated program cc1plus",
    ],
)
def test_a_build_that_no_commit_would_survive(log: str) -> None:
    assert failures.build_is_machine(f"noise\n{log}\n")
    assert not failures.build_is_machine("x.cu(3): error: no 'T'\nModuleNotFoundError: No module named 'deep_gemm'\n")
