"""The result cache: what was put is found, damage is never believed, and nothing that goes wrong stops a run."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dsabisect.outside import cache
from dsabisect.outside.cache import Results

FORK = multiprocessing.get_context("fork")
VALUE = {"verdict": "good", "metrics": {"max": 0.25, "worst": [1, 2]}, "text": "ж → \ud800"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "results.sqlite3"


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def results(path: Path, notes: list[str]) -> Iterator[Results]:
    with Results.open(path, note=notes.append) as opened:
        yield opened
    assert not notes


def stored(path: Path, statement: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        return db.execute(statement, values).fetchall()


def test_what_was_put_is_found_by_the_next_process(path: Path, results: Results) -> None:
    results.put("a", VALUE)
    assert results.get("a") == VALUE
    assert results.get("b") is None
    with Results.open(path) as again:
        assert again.get("a") == VALUE


def test_values_stay_bit_for_bit(results: Results) -> None:
    numbers = {"tiny": 5e-324, "third": 1 / 3, "big": 2**63 + 1, "inf": float("inf")}
    results.put("n", numbers)
    assert results.get("n") == numbers
    results.put("n", {"nan": float("nan")})
    assert str(results.get("n")) == "{'nan': nan}"


def test_many_at_once(results: Results) -> None:
    results.put_many({str(n): {"n": n} for n in range(1500)})
    found = results.get_many([str(n) for n in range(-5, 1500)] * 2)
    assert found == {str(n): {"n": n} for n in range(1500)}


def test_a_second_value_replaces_the_first(results: Results) -> None:
    results.put("a", {"n": 1})
    results.put("a", {"n": 2})
    assert results.get("a") == {"n": 2}
    assert results.info().entries == 1


def test_what_is_no_json_is_our_own_fault(results: Results) -> None:
    with pytest.raises(TypeError):
        results.put("a", {"when": object()})


# ---- size --------------------------------------------------------------------------------------------------


def test_info(path: Path, results: Results) -> None:
    empty = results.info()
    assert (empty.entries, empty.oldest, empty.path, empty.limit) == (0, "", str(path), cache.LIMIT_BYTES)
    results.put("a", {"x": "y" * 20000})
    info = results.info()
    assert info.entries == 1
    assert info.bytes > 20000 and 12000 < info.bytes - empty.bytes < 30000
    assert info.oldest == info.newest and info.oldest.startswith("20")


def test_the_least_recently_used_go_first(results: Results) -> None:
    results.put_many({f"k{n}": {"x": "y" * 4000} for n in range(100)})
    assert results.get("k0") and results.get("k1")
    gone = results.prune(limit_bytes=200_000)
    assert 40 <= gone <= 70
    assert results.info().bytes <= 200_000
    left = set(results.get_many([f"k{n}" for n in range(100)]))
    assert {"k0", "k1", "k99"} <= left
    assert left - {"k0", "k1"} == {f"k{n}" for n in range(2 + gone, 100)}


def test_use_is_remembered_after_closing(path: Path) -> None:
    with Results.open(path) as first:
        first.put_many({f"k{n}": {"x": "y" * 4000} for n in range(50)})
    with Results.open(path) as second:
        assert second.get("k0")
    with Results.open(path) as third:
        third.prune(limit_bytes=60_000)
        assert third.get("k0")
        assert third.get("k1") is None


def test_prune_by_age(path: Path, results: Results) -> None:
    results.put_many({"old": {}, "new": {}})
    stored(path, "UPDATE results SET last_used = ? WHERE key = 'old'", time.time() - 3 * 86400)
    assert results.prune(older_than_days=4) == 0
    assert results.prune(older_than_days=2) == 1
    assert (results.get("old"), results.get("new")) == (None, {})


def test_prune_everything_gives_the_room_back(path: Path, results: Results) -> None:
    results.put_many({str(n): {"x": "y" * 4000} for n in range(200)})
    assert results.prune(everything=True) == 200
    assert sum(f.stat().st_size for f in path.parent.iterdir() if not f.name.endswith("-shm")) < 60_000
    results.put("a", {})
    assert results.get("a") == {}


def test_the_limit_holds_without_being_asked(path: Path) -> None:
    with Results.open(path, limit_bytes=300_000) as results:
        for n in range(400):
            results.put(str(n), {"x": "y" * 3000})
        assert results.info().bytes < 300_000 + cache.CHECK_EVERY * 5000
        assert results.get("399") and not results.get("0")


def test_the_limit_holds_over_many_short_processes(path: Path) -> None:
    for n in range(100):
        with Results.open(path, limit_bytes=200_000) as results:
            results.put(str(n), {"x": "y" * 6000})
    with Results.open(path, limit_bytes=200_000) as results:
        assert results.info().bytes < 220_000
        assert results.get("99") and not results.get("0")


# ---- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["value = replace(value, 'good', 'bad')", "hash = ''", "value = x'ff00ff'",
                                    "value = '[1]'", "key = 'other'"])  # fmt: skip
def test_a_damaged_entry_is_absent_and_goes(path: Path, notes: list[str], change: str) -> None:
    with Results.open(path, note=notes.append) as results:
        results.put_many({"a": VALUE, "b": VALUE})
        stored(path, f"UPDATE results SET {change} WHERE key = 'a'")
        assert results.get_many(["a", "other", "b"]) == {"b": VALUE}
        assert stored(path, "SELECT key FROM results") == [("b",)]
        results.put("a", VALUE)
        assert results.get("a") == VALUE
    assert len(notes) == 1 and "dropped" in notes[0]


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 8000])
def test_a_damaged_file_is_put_aside(path: Path, notes: list[str], content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    path.with_name(path.name + "-wal").write_bytes(b"rest of an old one")
    with Results.open(path, note=notes.append) as results:
        results.put("a", VALUE)
        assert results.get("a") == VALUE
    assert path.with_name(path.name + ".aside").read_bytes() == content
    assert len(notes) == 1 and "aside" in notes[0] and "damaged" in notes[0]


def test_another_version_is_put_aside(path: Path, notes: list[str]) -> None:
    with Results.open(path) as results:
        results.put("a", VALUE)
    stored(path, "PRAGMA user_version = 7")
    with Results.open(path, note=notes.append) as results:
        assert results.get("a") is None
        results.put("a", {})
    assert stored(path.with_name(path.name + ".aside"), "PRAGMA user_version") == [(7,)]
    assert len(notes) == 1 and "version 7" in notes[0]
    with Results.open(path, note=notes.append) as results:
        assert results.get("a") == {}
        results.prune(everything=True)
    assert len(notes) == 1
    assert not path.with_name(path.name + ".aside").exists()


def test_a_table_of_another_shape_is_put_aside(path: Path, notes: list[str]) -> None:
    path.parent.mkdir()
    stored(path, "CREATE TABLE results (key TEXT)")
    stored(path, f"PRAGMA user_version = {cache.VERSION}")
    with Results.open(path, note=notes.append) as results:
        results.put("a", VALUE)
        assert results.get("a") == VALUE
    assert len(notes) == 1


def test_damage_found_later_begins_anew_and_spares_what_others_began(path: Path, notes: list[str]) -> None:
    first, second = (Results.open(path, note=notes.append) for _ in range(2))
    first.put_many({str(n): {"x": "y" * 500} for n in range(3000)})
    first.prune(older_than_days=1)  # moves the write-ahead log into the file
    damaged = bytearray(path.read_bytes())
    damaged[4096:] = b"\xa5" * (len(damaged) - 4096)
    path.write_bytes(damaged)
    assert first.get_many([str(n) for n in range(3000)]) == {}
    first.put("new", VALUE)
    assert second.get_many([str(n) for n in range(0, 3000, 7)]) == {}
    assert second.get("new") == VALUE
    first.close()
    second.close()
    with Results.open(path, note=notes.append) as third:
        assert third.get("new") == VALUE
    assert sum("aside" in note for note in notes) == 1


# ---- a run goes on without it ------------------------------------------------------------------------------


def goes_on_without(results: Results, notes: list[str]) -> None:
    results.put("a", VALUE)
    results.put("b", VALUE)
    assert results.get("a") is None
    assert results.get_many(["a", "b"]) == {}
    assert results.prune(everything=True) == 0
    assert results.info().entries == 0
    assert not results.usable
    results.close()
    results.close()
    assert len(notes) == 1 and "without the result cache" in notes[0], notes


def test_no_folder_for_it(tmp_path: Path, notes: list[str]) -> None:
    (tmp_path / "file").write_text("")
    goes_on_without(Results.open(tmp_path / "file" / "results.sqlite3", note=notes.append), notes)


def test_a_folder_in_its_place(path: Path, notes: list[str]) -> None:
    path.mkdir(parents=True)
    goes_on_without(Results.open(path, note=notes.append), notes)


def as_nobody(path: Path) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    notes: list[str] = []
    goes_on_without(Results.open(path, note=notes.append), notes)


def test_a_folder_that_cannot_be_written() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        with Results.open(folder / "results.sqlite3") as results:
            results.put("a", VALUE)
        folder.chmod(0o555)
        child = FORK.Process(target=as_nobody, args=(folder / "results.sqlite3",))
        child.start()
        child.join(30)
        assert child.exitcode == 0
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def on_a_full_disk(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    notes: list[str] = []
    with Results.open(path, note=notes.append) as results:
        results.put("first", VALUE)
        assert results.get("first") == VALUE
        for n in range(200):
            results.put(str(n), {"x": "y" * 5000})
        goes_on_without(results, notes)


def test_a_full_disk(path: Path) -> None:
    child = FORK.Process(target=on_a_full_disk, args=(path,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    with Results.open(path) as results:
        assert results.get("first") == VALUE  # what was acknowledged before stays


def test_a_lock_that_is_never_given_back(path: Path, notes: list[str]) -> None:
    with Results.open(path) as earlier:
        earlier.put("a", VALUE)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        results = Results.open(path, note=notes.append, busy_seconds=0.2)
        assert results.get("a") == VALUE  # readers need no lock
        began = time.monotonic()
        results.put("b", VALUE)
        assert 0.1 < time.monotonic() - began < 5
        goes_on_without(results, notes)


# ---- several processes -------------------------------------------------------------------------------------


def write_and_read(path: Path, me: int, turns: int) -> None:
    notes: list[str] = []
    with Results.open(path, note=notes.append) as results:
        for n in range(turns):
            results.put_many({f"{me}-{n}": {"me": me, "n": n}, f"shared-{n}": {"n": n, "pad": "x" * 500}})
            assert results.get(f"{me}-{n}") == {"me": me, "n": n}
            assert results.get(f"shared-{n}") == {"n": n, "pad": "x" * 500}
    assert not notes, notes


def test_several_processes_begin_it_and_write_at_once(path: Path) -> None:
    children = [FORK.Process(target=write_and_read, args=(path, me, 100)) for me in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 6
    with Results.open(path) as results:
        assert results.info().entries == 700
        assert len(results.get_many([f"{me}-{n}" for me in range(6) for n in range(100)])) == 600


WRITER = """
import sys
from pathlib import Path
from dsabisect.outside.cache import Results
def note(text): sys.exit(f"NOTE {text}")
n = 0
while True:
    with Results.open(Path(sys.argv[1]), note=note) as results:
        for _ in range(20):
            results.put(f"{sys.argv[2]}-{n}", {"n": n, "pad": "x" * (n * 37 % 9000)})
            print(n, flush=True)
            n += 1
"""


def test_killed_at_any_instant(path: Path, notes: list[str]) -> None:
    """What a killed process was told to be written is there, whole; the next one needs no repair."""
    for turn in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(turn)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "0\n"
        time.sleep(0.013 * turn)
        child.kill()
        rest = child.stdout.read().splitlines()
        assert child.wait() == -signal.SIGKILL, rest
        acknowledged = int(rest[-1]) + 1 if rest and rest[-1].isdigit() else 1
        with Results.open(path, note=notes.append) as results:
            found = results.get_many([f"{turn}-{n}" for n in range(acknowledged)])
            assert {f"{turn}-{n}": {"n": n, "pad": "x" * (n * 37 % 9000)} for n in range(acknowledged - 1)}.items() <= (
                found.items()
            )
            assert stored(path, "PRAGMA integrity_check") == [("ok",)]
    assert not notes


# ---- the command line --------------------------------------------------------------------------------------


def cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dsabisect", "cache", *args], capture_output=True, text=True)


def test_command_line(hermetic: Path) -> None:
    with Results.open(cache.default_path()) as results:
        results.put_many({str(n): {"x": "y" * 4000} for n in range(100)})
        results.put("old", {})
    stored(cache.default_path(), "UPDATE results SET last_used = ? WHERE key = 'old'", time.time() - 9 * 86400)
    shown = json.loads(cli("info", "--json").stdout)
    assert (shown["entries"], shown["path"]) == (101, str(hermetic / "cache" / "cache" / "results.sqlite3"))
    assert "101 results" in cli("info").stdout
    assert "1 result removed" in cli("prune", "--older-than", "7").stdout
    assert cli("prune", "--limit", "100K").returncode == 0
    assert 5 < json.loads(cli("info", "--json").stdout)["entries"] < 40
    assert cli("prune", "--all").returncode == 0
    assert json.loads(cli("info", "--json").stdout)["entries"] == 0


@pytest.mark.parametrize("args", [(), ("--limit", "much"), ("--limit", "-1"), ("--older-than", "-1"), ("--all", "x")])
def test_command_line_refuses(args: tuple[str, ...]) -> None:
    done = cli("prune", *args)
    assert (done.returncode, done.stdout) == (129, "")
    assert "Traceback" not in done.stderr


def test_command_line_without_a_cache(hermetic: Path) -> None:
    (hermetic / "cache").mkdir()
    (hermetic / "cache" / "cache").write_text("")
    done = cli("info")
    assert done.returncode == 128
    assert "DSABISECT_CACHE" in done.stderr
