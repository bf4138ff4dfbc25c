"""Results that outlive a run: one SQLite file of JSON objects by key, shared by all runs of a person on a machine.

The key is a hash of everything that decides a result, so that an entry never goes stale. The cache only saves time:
whatever is wrong with it (a damaged file, a full disk, a lock that is never given back) is said once through ``note``,
and the run goes on without it. It is safe with SIGKILL at any instant and with several writers: every change is one
SQLite transaction in write-ahead mode, and what is read is checked against a hash.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dsabisect.outside import store

VERSION = 1  # of the table below, in the file's user_version
LIMIT_BYTES = 256 << 20
BUSY_SECONDS = 10.0  # how long one call waits for other writers
CHECK_EVERY = 64  # entries written between two looks at the size
KEEP = 0.8  # share of the limit that is left by a cut, so that the next put does not cut again
CHUNK = 500  # keys in one statement; SQLite takes 999 everywhere
ROW_BYTES = 120  # hash, times, size, b-tree: what a row takes beside key and value
SIDES = ("-wal", "-shm")  # files that belong to a database in write-ahead mode
TABLE = """
CREATE TABLE results (
    key TEXT PRIMARY KEY, value TEXT NOT NULL, hash TEXT NOT NULL, size INTEGER NOT NULL,
    created REAL NOT NULL, last_used REAL NOT NULL
)"""
INDEX = "CREATE INDEX by_use ON results (last_used, size)"  # all that a cut reads
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Info:
    """What the cache holds. Times are when an entry was last used, UTC, ISO 8601; empty when there is none."""

    path: str
    entries: int
    bytes: int  # pages in use
    oldest: str
    newest: str
    limit: int


def default_path() -> Path:
    """The one cache of this person.

    Raises:
        StoreError: there is no folder for it.
    """
    return store.work_root() / "cache" / "results.sqlite3"


class Results:
    """An open cache, or one that could not be opened: then it holds nothing and takes nothing."""

    def __init__(self, path: Path, *, limit_bytes: int, note: Callable[[str], None], busy_seconds: float) -> None:
        self.path, self.limit_bytes = path, limit_bytes
        self._note, self._busy_seconds = note, busy_seconds
        self._db: sqlite3.Connection | None = None
        self._file = (0, 0)  # device and inode of the open file
        self._lock = threading.RLock()  # one connection for all threads of this process
        self._used: dict[str, float] = {}  # uses that are not on the disk yet
        self._unchecked = CHECK_EVERY  # so that the first put looks at the size
        self._said: set[str] = set()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        note: Callable[[str], None] = lambda text: None,
        busy_seconds: float = BUSY_SECONDS,
    ) -> Results:
        """Open or begin the cache at ``path``. Never raises for what is found there: see :attr:`usable`.

        A damaged file, or one of another version, is renamed to ``<name>.aside`` (one is kept) and begun anew.
        """
        results = cls(Path(path), limit_bytes=limit_bytes, note=note, busy_seconds=busy_seconds)
        try:
            with results._opening():
                results._db = results._opened()
                results._file = _identity(results.path)
        except (sqlite3.Error, OSError) as error:
            results._give_up(error)
        return results

    @property
    def usable(self) -> bool:
        return self._db is not None

    def get(self, key: str) -> dict[str, Any] | None:
        """The value of ``key``; None when there is none, or it was damaged."""
        return self.get_many([key]).get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The values that are there, by key."""
        return self._try(lambda db: self._read(db, list(dict.fromkeys(keys))), {})

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        self.put_many({key: value})

    def put_many(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Write all of ``values`` in one transaction; an earlier value of a key is replaced."""
        now = time.time()
        rows = [_row(key, value, now) for key, value in values.items()]
        self._try(lambda db: self._write(db, rows), None)

    def info(self) -> Info:
        nothing = Info(path=str(self.path), entries=0, bytes=0, oldest="", newest="", limit=self.limit_bytes)
        return self._try(self._info, nothing)

    def prune(
        self, *, limit_bytes: int | None = None, older_than_days: float | None = None, everything: bool = False
    ) -> int:
        """Remove entries, the least recently used first, and give their room back. Returns how many went."""
        return self._try(lambda db: self._prune(db, limit_bytes, older_than_days, everything), 0)

    def close(self) -> None:
        self._try(self._flush, None)
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._db is not None:
                self._db.close()
        self._db = None

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- statements --------------------------------------------------------------------------------------

    def _read(self, db: sqlite3.Connection, keys: list[str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        damaged: list[tuple[str, Any]] = []
        for at in range(0, len(keys), CHUNK):
            part = keys[at : at + CHUNK]
            marks = ",".join("?" * len(part))
            for key, text, hashed in db.execute(f"SELECT key, value, hash FROM results WHERE key IN ({marks})", part):
                value = _checked(key, text, hashed)
                if value is None:
                    damaged.append((key, hashed))
                else:
                    found[key] = value
        self._used.update(dict.fromkeys(found, time.time()))
        if damaged:
            self._say("a damaged entry of the result cache was dropped; it is measured again")
            with _transaction(db):
                db.executemany("DELETE FROM results WHERE key = ? AND hash = ?", damaged)
        if len(self._used) >= CHUNK:
            self._flush(db)
        return found

    def _write(self, db: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        with _transaction(db):
            db.executemany("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._touch(db)
        self._used.clear()
        self._unchecked += len(rows)
        if self._unchecked > CHECK_EVERY:
            self._unchecked = 0
            if _bytes(db) > self.limit_bytes:
                self._prune(db, int(self.limit_bytes * KEEP), None, False)

    def _flush(self, db: sqlite3.Connection) -> None:
        """Write down what was used: now and then, not at each get."""
        if self._used:
            with _transaction(db):
                self._touch(db)
            self._used.clear()

    def _touch(self, db: sqlite3.Connection) -> None:
        uses = [(at, key, at) for key, at in self._used.items()]
        db.executemany("UPDATE results SET last_used = ? WHERE key = ? AND last_used < ?", uses)

    def _info(self, db: sqlite3.Connection) -> Info:
        self._flush(db)
        entries, oldest, newest = db.execute("SELECT COUNT(*), MIN(last_used), MAX(last_used) FROM results").fetchone()
        return Info(
            path=str(self.path), entries=entries, bytes=_bytes(db), oldest=_day(oldest), newest=_day(newest),
            limit=self.limit_bytes,
        )  # fmt: skip

    def _prune(self, db: sqlite3.Connection, limit: int | None, days: float | None, everything: bool) -> int:
        self._flush(db)
        gone = 0
        if everything:
            gone += _delete(db, "DELETE FROM results", ())
            for side in ("", *SIDES):
                _aside(self.path, side).unlink(missing_ok=True)
        if days is not None:
            gone += _delete(db, "DELETE FROM results WHERE last_used < ?", (time.time() - days * 86400,))
        while limit is not None and (excess := _bytes(db) - limit) > 0:
            cut = _cut(db, excess)
            gone += cut
            if not cut:
                break
        db.executescript("PRAGMA incremental_vacuum")  # execute() would stop after one page
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return gone

    # ---- what goes wrong ---------------------------------------------------------------------------------

    def _try(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """What ``work`` gives; ``otherwise`` when there is no cache, or none any more."""
        with self._lock:
            if self._db is None:
                return otherwise
            try:
                return work(self._db)
            except (sqlite3.Error, OSError) as error:
                if _is_damage(error):
                    self._begin_anew()
                else:
                    self._give_up(error)
                return otherwise

    def _begin_anew(self) -> None:
        """The file turned out to be damaged while it was open: put it aside, unless another process has done so."""
        try:
            with self._opening():
                with contextlib.suppress(sqlite3.Error):
                    assert self._db is not None
                    self._db.close()
                self._used.clear()
                if _identity(self.path) == self._file:
                    self._put_aside("is damaged")
                self._db = self._opened()
                self._file = _identity(self.path)
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._db is not None:
                self._db.close()
        self._db = None
        self._used.clear()
        self._say(f"the run goes on without the result cache {self.path}: {error}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._note(text)

    # ---- opening -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """One process at a time begins or replaces the file; the lock ends with the process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + self._busy_seconds
            while not _locked(fd):
                if time.monotonic() > deadline:
                    raise TimeoutError("another process has been opening it for too long")
                time.sleep(0.02)
            yield
        finally:
            os.close(fd)

    def _opened(self) -> sqlite3.Connection:
        if self.path.exists():
            try:
                return self._connected()
            except (sqlite3.Error, _OtherVersionError) as error:
                if isinstance(error, sqlite3.Error) and not _is_damage(error):
                    raise
                self._put_aside(str(error) if isinstance(error, _OtherVersionError) else "is damaged")
        return self._connected()

    def _connected(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False)
        db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # damaged text fails its hash, not the reading
        try:
            if db.execute("PRAGMA page_count").fetchone() == (0,):
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has effect before the first page only
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            db.execute("PRAGMA synchronous = NORMAL")  # no sync at each put: a power cut may lose the last of them
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
            tables = int(db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0])
            if version == 0 and tables == 0:
                with _transaction(db):
                    db.execute(TABLE)
                    db.execute(INDEX)
                    db.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise _OtherVersionError(f"is of version {version}, not {VERSION}")
            db.execute("SELECT key, value, hash, size, created, last_used FROM results LIMIT 1").fetchall()
        except BaseException:
            db.close()
            raise
        return db

    def _put_aside(self, why: str) -> None:
        """The side files first: a new database must never meet the write-ahead log of an old one."""
        for side in (*SIDES, ""):
            source, target = self.path.with_name(self.path.name + side), _aside(self.path, side)
            target.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.replace(source, target)
        self._say(f"the result cache {why}; it was renamed to {_aside(self.path, '')} and is begun anew")


class _OtherVersionError(Exception):
    """The file was written by another version of this tool."""


# ---- inside ------------------------------------------------------------------------------------------------


def _is_damage(error: Exception) -> bool:
    """SQLITE_CORRUPT and SQLITE_NOTADB are the plain DatabaseError; locks and full disks are subclasses of it.

    A table or a column that is not there, in a file of our version, is damage too.
    """
    return type(error) is sqlite3.DatabaseError or str(error).startswith(("no such table", "no such column"))


def _aside(path: Path, side: str) -> Path:
    return path.with_name(f"{path.name}.aside{side}")


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (found.st_dev, found.st_ino)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in store.NO_LOCKS
    return True


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")  # waits for other writers here, where waiting is allowed
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back by itself
            db.execute("ROLLBACK")
        raise


def _row(key: str, value: Mapping[str, Any], now: float) -> tuple[Any, ...]:
    text = json.dumps(dict(value), sort_keys=True, separators=(",", ":"))
    return key, text, _hash(key, text), len(key) + len(text) + ROW_BYTES, now, now


def _hash(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()


def _checked(key: Any, text: Any, hashed: Any) -> dict[str, Any] | None:
    if not isinstance(text, str) or _hash(str(key), text) != hashed:
        return None
    value = json.loads(text)
    return value if isinstance(value, dict) else None


def _bytes(db: sqlite3.Connection) -> int:
    """Bytes of the pages in use; the file itself may be larger until it is vacuumed."""
    count, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
    )
    return (count - free) * size


def _delete(db: sqlite3.Connection, statement: str, values: Iterable[Any]) -> int:
    with _transaction(db):
        return db.execute(statement, tuple(values)).rowcount


def _cut(db: sqlite3.Connection, excess: int) -> int:
    """Remove the least recently used entries that together take ``excess`` bytes; how many."""
    rows: list[tuple[int]] = []
    with _transaction(db):
        for row, size in db.execute("SELECT rowid, size FROM results ORDER BY last_used"):
            rows.append((row,))
            excess -= size
            if excess <= 0:
                break
        db.executemany("DELETE FROM results WHERE rowid = ?", rows)
    return len(rows)


def _day(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds")
