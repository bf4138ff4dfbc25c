"""The journal survives kills, torn lines and full disks; one process at a time; whole files or none."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from datetime import datetime, timezone
from pathlib import Path

import pytest

from dsabisect.errors import StoreError
from dsabisect.outside import store
from dsabisect.outside.store import Journal, read_events

ROOT = Path(store.__file__).resolve().parents[2]
NOBODY = 65534


def python(code: str, *args: str, wait: bool = True) -> subprocess.Popen[str]:
    """A second process that runs ``code`` with the package importable."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if wait:
        process.wait(timeout=60)
    return process


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    with Journal.create(run) as journal:
        journal.append("run", {"target": "demo", "list": [1, 2.5, None], "title": "naïve \udcff"})
        journal.append("note", {"text": "two\nlines"})
        seen = journal.events()
    assert seen == read_events(run)
    assert seen[0] == {"event": "run", "target": "demo", "list": [1, 2.5, None], "title": "naïve \udcff"}
    assert [e["event"] for e in seen] == ["run", "note"]
    assert len((run / store.JOURNAL).read_bytes().splitlines()) == 2


def test_a_value_may_not_name_its_own_event(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run") as journal, pytest.raises(ValueError, match="event"):
        journal.append("note", {"event": "end"})
    assert read_events(tmp_path / "run") == []


@pytest.mark.parametrize(
    "torn", [b'{"event":"obs', b'{"event":"note"}', b"\0\0\0\0", b"\n", b"{]\n", b"[]\n", b'"x"\n', b"\xff\xfe\n"]
)
def test_a_torn_last_line_is_dropped_and_resume_goes_on_after_it(tmp_path: Path, torn: bytes) -> None:
    run = tmp_path / "run"
    with Journal.create(run) as journal:
        journal.append("note", {"n": 0})
        journal.append("note", {"n": 1})
    with open(run / store.JOURNAL, "ab") as file:
        file.write(torn)
    assert [e["n"] for e in read_events(run)] == [0, 1]
    with Journal.resume(run) as journal:
        journal.append("note", {"n": 2})
        assert [e["n"] for e in journal.events()] == [0, 1, 2]
    assert [json.loads(x)["n"] for x in (run / store.JOURNAL).read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize("cut", range(1, 40))
def test_cutting_anywhere_loses_only_unacknowledged_lines(tmp_path: Path, cut: int) -> None:
    run = tmp_path / "run"
    with Journal.create(run) as journal:
        for n in range(3):
            journal.append("note", {"n": n})
    raw = (run / store.JOURNAL).read_bytes()
    (run / store.JOURNAL).write_bytes(raw[:-cut])
    whole = raw[:-cut].count(b"\n")
    assert [e["n"] for e in read_events(run)] == list(range(whole))


@pytest.mark.parametrize("damage", [b"garbage\n", b'{"n":1}\n', b"\n", b'{"event":"note","n":1'])
def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path: Path, damage: bytes) -> None:
    run = tmp_path / "run"
    with Journal.create(run) as journal:
        for n in range(3):
            journal.append("note", {"n": n})
    lines = (run / store.JOURNAL).read_bytes().splitlines(keepends=True)
    (run / store.JOURNAL).write_bytes(lines[0] + damage + lines[2] + lines[2])
    for reading in (read_events, Journal.resume):
        with pytest.raises(StoreError, match=r"line 2 of journal\.jsonl is damaged"):
            reading(run)
    assert (run / store.JOURNAL).read_bytes() == lines[0] + damage + lines[2] * 2, "nothing was cut off"


def test_kill_9_between_and_during_writes_keeps_every_acknowledged_event(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from dsabisect.outside.store import Journal
        run = Path(sys.argv[1])
        journal = Journal.resume(run) if run.exists() else Journal.create(run)
        n = len(journal.events())
        while True:
            journal.append("note", {"n": n, "filler": "x" * 5000})
            print(n, flush=True)
            n += 1
    """
    run = tmp_path / "run"
    told = -1
    for kills in range(3):
        writer = python(code, str(run), wait=False)
        assert writer.stdout is not None
        for _ in range(5 + 7 * kills):
            told = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate(timeout=60)[0].split()
        told = int(rest[-1]) if rest else told
        numbers = [e["n"] for e in read_events(run)]
        assert numbers == list(range(len(numbers))) and len(numbers) > told
    with Journal.resume(run) as journal:  # the lock went with the process
        journal.append("end", {})


def test_two_processes_cannot_hold_one_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    hold = """
        import sys
        from pathlib import Path
        from dsabisect.outside.store import Journal
        journal = Journal.create(Path(sys.argv[1]))
        print("held", flush=True)
        sys.stdin.read()
    """
    holder = python(hold, str(run), wait=False)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    for opening in (Journal.create, Journal.resume):
        with pytest.raises(StoreError, match="another dsabisect process"):
            opening(run)
    assert read_events(run) == []  # reading needs no lock
    holder.communicate("", timeout=60)
    with Journal.resume(run) as journal:
        journal.append("note", {})


def test_disk_full_loses_nothing_and_the_run_can_go_on(tmp_path: Path) -> None:
    """The limit on the file's size gives a short write first and an error next, as a full disk does."""
    code = """
        import resource, sys
        from pathlib import Path
        from dsabisect.errors import StoreError
        from dsabisect.outside.store import Journal, read_events
        run = Path(sys.argv[1])
        journal = Journal.create(run)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        done = 0
        try:
            while True:
                journal.append("note", {"n": done, "filler": "x" * 150})
                done += 1
        except StoreError as error:
            print(done, error.exit_code, error)
        try:
            journal.append("end", {"filler": "y" * 2000})
        except StoreError:
            print("still full")
        assert (run / "journal.jsonl").read_bytes().endswith(b"\\n"), "the torn part was cut off at once"
        journal.append("s", {})  # small enough to fit
    """
    process = python(code, str(tmp_path / "run"))
    out, err = process.communicate()
    assert process.returncode == 0, err
    first, second = out.splitlines()
    done = int(first.split()[0])
    assert done == 5 and first.split()[1] == "128" and "--resume" in first and second == "still full"
    assert [e.get("n") for e in read_events(tmp_path / "run")] == [0, 1, 2, 3, 4, None]


def test_create_refuses_an_earlier_run_and_foreign_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Journal.create(run) as journal:
        journal.append("run", {})
    before = (run / store.JOURNAL).read_bytes()
    with pytest.raises(StoreError, match=r"earlier run.*--resume"):
        Journal.create(run)
    assert (run / store.JOURNAL).read_bytes() == before
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match=r"not empty.*thesis.txt.*--out"):
        Journal.create(foreign)
    assert os.listdir(foreign) == ["thesis.txt"]


def test_create_accepts_the_tools_own_empty_beginning(tmp_path: Path) -> None:
    (tmp_path / "work" / "inputs").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    Journal.create(tmp_path).close()
    Journal.create(tmp_path).close()  # begun, but nothing was written: not a run yet


def test_out_folder_that_is_a_file_or_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/none/run")):
        with pytest.raises(StoreError, match="--out"):
            Journal.create(run)


def test_unwritable_out_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)  # root may write everywhere
    try:
        with pytest.raises(StoreError, match=r"Permission denied.*--out"):
            Journal.create(tmp_path / "run")
    finally:
        os.seteuid(mine)


def test_reading_what_is_no_run(tmp_path: Path) -> None:
    for reading in (read_events, Journal.resume):
        with pytest.raises(StoreError, match="no such run"):
            reading(tmp_path / "none")
        with pytest.raises(StoreError, match="not a run folder"):
            reading(tmp_path)


def test_write_text_replaces_as_a_whole_and_leaves_no_litter(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    store.write_text(file, "one\n")
    store.write_text(file, "zwei – 2\r\n")
    assert file.read_bytes() == "zwei – 2\r\n".encode()
    assert os.listdir(tmp_path) == ["report.json"]
    with pytest.raises(StoreError, match="cannot write the file"):
        store.write_text(tmp_path / "none" / "x", "")


def test_write_text_on_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    store.write_text(file, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(StoreError, match="Free some space"):
            store.write_text(file, "n" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["report.json"]


def test_default_run_dirs_are_new_and_sort_by_age(tmp_path: Path) -> None:
    at = datetime(2026, 12, 1, 10, 15, 0, tzinfo=timezone.utc)
    name = "sglang-abc123456..def123456"
    first = store.default_run_dir(tmp_path / "runs", name, at)
    second = store.default_run_dir(tmp_path / "runs", name, at)
    third = store.default_run_dir(tmp_path / "runs", "a/b c", at.replace(second=1))
    assert first.name == f"20261201-101500-{name}" and second.name == f"{first.name}-2"
    assert third.name == "20261201-101501-a_b_c"
    assert sorted([third.name, second.name, first.name]) == [first.name, second.name, third.name]
    assert all(folder.is_dir() and not os.listdir(folder) for folder in (first, second, third))
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--out"):
        store.default_run_dir(tmp_path / "file", name, at)


def test_a_folder_of_runs_that_was_there_is_left_as_it_is(tmp_path: Path) -> None:
    store.default_run_dir(tmp_path, "x")
    assert not (tmp_path / ".gitignore").exists()
    store.default_run_dir(tmp_path / "new", "x")
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"


def test_work_root_follows_the_environment_and_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hermetic: Path
) -> None:
    monkeypatch.setenv("DSABISECT_CACHE", str(tmp_path / "own" / "cache"))
    assert store.work_root() == tmp_path / "own" / "cache"
    assert stat.S_IMODE((tmp_path / "own" / "cache").stat().st_mode) == 0o700
    monkeypatch.delenv("DSABISECT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.work_root() == tmp_path / "xdg" / "dsabisect"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert store.work_root() == hermetic / ".cache" / "dsabisect"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSABISECT_CACHE", str(tmp_path / "file" / "x"))
    with pytest.raises(StoreError, match="Set DSABISECT_CACHE"):
        store.work_root()
