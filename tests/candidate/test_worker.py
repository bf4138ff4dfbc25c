"""The zygote's parts alone: sweeping, ending with its host, and the facts that a child tells of an exception."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsabisect.candidate import cells, probes

ROOT = Path(__file__).parents[2]

# A subreaper with a child, a child in a session of its own, and a grandchild without a parent.
SWEEP = """
import os, subprocess, sys, time
from dsabisect.candidate import worker
worker._prctl(worker.PR_SET_CHILD_SUBREAPER, 1)
sleep = ["sleep", "1000"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True, env={})
subprocess.run(["sh", "-c", "setsid sleep 1000 & echo"], stdout=subprocess.DEVNULL)
deadline = time.monotonic() + 5
while len(worker.children()) < 3 and time.monotonic() < deadline:
    time.sleep(0.01)
found = worker.children()
statuses = worker.sweep()
print(len(found), sorted(statuses) == sorted(found), set(statuses.values()), worker.children())
"""


def test_a_sweep_ends_orphans_and_daemons_too() -> None:
    done = subprocess.run([sys.executable, "-c", SWEEP], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.stdout.split(maxsplit=1) == ["3", "True {9} []\n"], done.stderr


def start(host: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"from dsabisect.candidate import worker; worker.main({host}, {theirs.fileno()}, 'bare')"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, pass_fds=[theirs.fileno()])
    theirs.close()
    ours.settimeout(20)
    return process, ours


def test_a_zygote_says_ready_and_ends_with_its_socket() -> None:
    process, ours = start(os.getpid())
    assert json.loads(ours.recv(1 << 16)) == {"event": "ready", "threads": 1, "triton": False}
    ours.close()
    assert process.wait(20) == 0


def test_a_zygote_ends_when_its_host_is_not_its_parent() -> None:
    process, ours = start(1)
    assert json.loads(ours.recv(1 << 16))["event"] == "ready"
    assert process.wait(20) == 0
    ours.close()


def test_a_child_without_the_token_cannot_be_made_up(tmp_path: Path) -> None:
    """The request carries the token, the results carry it back; nothing else of the process shows it."""
    process, ours = start(os.getpid())
    ours.recv(1 << 16)
    request_r, request_w = os.pipe()
    results_r, results_w = os.pipe()
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    socket.send_fds(ours, [b'{"order": "fork"}'], [request_r, results_w, log, log])
    request: dict[str, Any] = {
        "token": "secret", "env": {"PATH": os.environ["PATH"]}, "cwd": str(tmp_path), "do": "execute",
        "argv": ["no-such-program"],
    }  # fmt: skip
    with open(request_w, "w") as file:
        json.dump(request, file)
    for fd in (request_r, results_w, log):
        os.close(fd)
    with open(results_r) as results:
        (line,) = results.read().splitlines()
    message = json.loads(line)
    assert message["event"] == "exec_failed" and message["token"] == "secret"
    assert {json.loads(ours.recv(1 << 16))["event"] for _ in range(2)} == {"forked", "exited"}
    ours.close()
    assert process.wait(20) == 0


# ---- facts of an exception ---------------------------------------------------------------------------------


def facts_of(code: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, **names: Any) -> dict[str, Any]:
    """Facts of what ``code``, a file of the checkout, raises when it is run."""
    file = checkout / "mine.py"
    file.write_text(code)
    monkeypatch.syspath_prepend(str(checkout))
    try:
        exec(compile(code, str(file), "exec"), names)
    except BaseException as error:
        return cells.facts(error, {"setup": {"checkout": str(checkout)}, "roots": []})
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("code", "foreign"),
    [
        ("import nobody_has_this", "nobody_has_this"),
        ("import json.nothing_there", "json.nothing_there"),
        ("from json import nothing_there", "json"),
        ("import own.missing", ""),
        ("from own import missing", ""),
        ("raise ImportError('by hand')", ""),
        (
            "try:\n import nobody_has_this\nexcept ImportError as e:\n raise ImportError('needs it') from e",
            "nobody_has_this",
        ),
        ("try:\n import nobody_has_this\nexcept ImportError:\n raise ImportError('needs it')", "nobody_has_this"),
        ("try:\n import nobody_has_this\nexcept ImportError:\n {}['x']", ""),
    ],
)
def test_foreign_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, foreign: str) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "own", raising=False)
    found = facts_of(code, tmp_path, monkeypatch)
    assert (found["foreign_import"], found["inside"]) == (foreign, True)
    sys.modules.pop("own", None)


def test_inside_is_the_checkout_its_symbolic_link_or_a_call_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    assert facts_of("1 / 0", link, monkeypatch)["inside"]
    request = {"setup": {"checkout": str(tmp_path / "rea")}, "roots": []}  # a name that only begins alike

    def outside() -> None:
        raise ValueError

    for call, inside in ((outside, False), (lambda: probes.call(outside), True)):
        with pytest.raises(ValueError) as caught:
            call()
        assert cells.facts(caught.value, request)["inside"] is inside


def test_a_syntax_error_belongs_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(SyntaxError) as caught:
        compile((tmp_path / "bad.py").read_text(), str(tmp_path / "bad.py"), "exec")
    assert cells.facts(caught.value, {"setup": {"checkout": str(tmp_path)}, "roots": []})["inside"]


def test_a_cause_counts_and_a_mere_context_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep.py").write_text("def f():\n    raise ValueError('deep')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deep", raising=False)
    import deep  # type: ignore[import-not-found]

    request = {"setup": {"checkout": str(tmp_path)}, "roots": []}
    for link, inside in ((True, True), (False, False)):
        with pytest.raises(RuntimeError) as caught:
            try:
                deep.f()
            except ValueError as error:
                if link:
                    raise RuntimeError("the probe says so") from error
                raise RuntimeError("a bug of the probe")  # noqa: B904
        assert cells.facts(caught.value, request)["inside"] is inside
    sys.modules.pop("deep", None)


def test_a_million_characters_do_not_travel(tmp_path: Path) -> None:
    began = time.monotonic()
    found = cells.facts(ValueError("x" * 10_000_000), {"setup": {"checkout": str(tmp_path)}, "roots": []})
    assert len(found["message"]) < 10_000 and time.monotonic() - began < 5
