"""Files that outlive a process: the journal of a run, small whole files, and where both are kept.

The journal is the run. It is only ever appended to, one JSON object a line, each line written with one call and
synced before the caller goes on, so that after a crash, a kill or a full disk everything that was acknowledged is
there and at most the last line is torn. Reading drops a torn last line; a damaged line anywhere else is an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from dsabisect.errors import StoreError

JOURNAL = "journal.jsonl"
OURS = frozenset({JOURNAL, "work", "logs"})  # what may stand in a run folder before its journal begins
OTHER_OUT = "Give another folder with --out"
FREE_AND_RESUME = "Nothing already written is lost: free some space, then go on with --resume"
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})  # file systems without locks


class Journal:
    """The open journal of one run folder, held by one process at a time."""

    def __init__(self, run_dir: Path, fd: int) -> None:
        self.run_dir = run_dir
        self._fd = fd
        self._lock = threading.Lock()  # several devices write into one journal

    @classmethod
    def create(cls, run_dir: Path) -> Journal:
        """Begin a run in ``run_dir``, which is made if needed.

        Raises:
            StoreError: it cannot be written, holds an earlier run or foreign files, or a live process holds it.
        """
        foreign = nothing_foreign(run_dir)
        fd = _open_locked(run_dir, os.O_CREAT)
        if os.fstat(fd).st_size or foreign:
            os.close(fd)
            raise StoreError(
                "the folder holds an earlier run", where=str(run_dir), remedy=f"Go on with it by --resume. {OTHER_OUT}"
            )
        _sync_folder(run_dir)
        return cls(run_dir, fd)

    @classmethod
    def resume(cls, run_dir: Path) -> Journal:
        """Go on with the run in ``run_dir``; a torn last line is cut off.

        Raises:
            StoreError: there is no run, its journal is damaged, or a live process holds it.
        """
        _must_be_run(run_dir)
        fd = _open_locked(run_dir, 0)
        try:
            with _telling("cannot resume the journal", run_dir, "Check the folder's permissions and free space"):
                _, whole = _parse((run_dir / JOURNAL).read_bytes(), run_dir)
                if whole != os.fstat(fd).st_size:
                    os.ftruncate(fd, whole)
                    os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(run_dir, fd)

    def append(self, event: str, value: Mapping[str, Any]) -> None:
        """Write one event; it is on the disk when this returns.

        Raises:
            StoreError: disk full, file-size limit, device error. The journal then ends as it did before the call.
        """
        self.append_all(event, [value])

    def append_all(self, event: str, values: Sequence[Mapping[str, Any]]) -> None:
        """Write several events of one kind with one sync. See :meth:`append`."""
        if any("event" in value for value in values):
            raise ValueError("a journal value must not have a field called 'event'")
        lines = [json.dumps({"event": event, **value}, separators=(",", ":")) + "\n" for value in values]
        line = "".join(lines).encode("ascii")
        with self._lock, _telling("cannot write the journal", self.run_dir, FREE_AND_RESUME):
            before = os.fstat(self._fd).st_size
            try:
                written = os.write(self._fd, line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._fd)
            except OSError:
                with contextlib.suppress(OSError):  # cutting needs no space; if even that fails, reading drops the line
                    os.ftruncate(self._fd, before)
                raise

    def events(self) -> list[dict[str, Any]]:
        """All events so far, as they stand on the disk."""
        return read_events(self.run_dir)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # also gives the lock back
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a run, for report and replay; a run in flight may be read too.

    Raises:
        StoreError: no such folder, not a run folder, unreadable, or a damaged line that is not the last one.
    """
    _must_be_run(run_dir)
    with _telling("cannot read the journal", run_dir, "Check the folder's permissions"):
        raw = (run_dir / JOURNAL).read_bytes()
    return _parse(raw, run_dir)[0]


def write_text(path: Path, text: str) -> None:
    """Write a whole file, or nothing: temporary name beside it, sync, rename. UTF-8.

    Raises:
        StoreError: it cannot be written; an earlier file of that name is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with _telling("cannot write the file", path, "Free some space, or check the folder's permissions"):
        try:
            with open(temporary, "x", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


def nothing_foreign(run_dir: Path) -> list[str]:
    """Make ``run_dir`` if needed; what lies in it beside a run. StoreError when that is no earlier run either.

    To be asked before anything is written: the folder may be somebody's checkout.
    """
    with _telling("cannot create the run folder", run_dir, OTHER_OUT):
        run_dir.mkdir(parents=True, exist_ok=True)
        foreign = sorted(set(os.listdir(run_dir)) - OURS)
    if foreign and not (run_dir / JOURNAL).exists():
        raise StoreError(f"the folder is not empty (it has {foreign[0]!r})", where=str(run_dir), remedy=OTHER_OUT)
    return foreign


def writable(folder: Path) -> None:
    """Raises StoreError when nothing can be written below ``folder``."""
    with _telling("cannot write", folder, OTHER_OUT):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()


def default_run_dir(base: Path, name: str, now: datetime | None = None) -> Path:
    """A new folder ``base/YYYYMMDD-HHMMSS-name`` (UTC, so that names sort by age), made here so that it is unique.

    A ``base`` that is made here says in its own .gitignore that git is to ignore it.

    Raises:
        StoreError: nothing can be made below ``base``.
    """
    stamp = (now or datetime.now(timezone.utc)).strftime("%Y%m%d-%H%M%S")
    stem = f"{stamp}-{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}"
    with _telling("cannot create the run folder", base, OTHER_OUT):
        if not base.exists():  # most often inside a checkout, in which `git status` must not see it
            base.mkdir(parents=True, exist_ok=True)
            (base / ".gitignore").write_text("*\n")
        for turn in range(1, 1000):
            folder = base / (stem if turn == 1 else f"{stem}-{turn}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    raise StoreError(f"a thousand runs are called {stem}", where=str(base), remedy=OTHER_OUT)


def work_root() -> Path:
    """The tool's own cache folder, for this person only (0700). It may be deleted at any time between runs.

    ``$DSABISECT_CACHE``, else ``$XDG_CACHE_HOME/dsabisect`` (absolute paths only, as the XDG rules say), else
    ``~/.cache/dsabisect``.

    Raises:
        StoreError: it cannot be made or written, or belongs to somebody else.
    """
    remedy = "Set DSABISECT_CACHE to a folder of your own"
    try:
        root = _cache_folder()
    except RuntimeError as error:
        raise StoreError("there is no home folder for the cache", remedy=remedy) from error
    with _telling("cannot use the cache folder", root, remedy):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = root.stat().st_uid
    if owner != os.geteuid() and os.geteuid() != 0:
        raise StoreError("the cache folder belongs to somebody else", where=str(root), remedy=remedy)
    if not os.access(root, os.W_OK | os.X_OK):
        raise StoreError("the cache folder cannot be written", where=str(root), remedy=remedy)
    return root


# ---- inside ------------------------------------------------------------------------------------------------


def _cache_folder() -> Path:
    own, xdg = os.environ.get("DSABISECT_CACHE", ""), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        return Path(own).expanduser().absolute()
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "dsabisect"
    return Path.home() / ".cache" / "dsabisect"


def _must_be_run(run_dir: Path) -> None:
    remedy = "Give the folder that `dsabisect run` printed"
    if not run_dir.is_dir():
        raise StoreError("no such run", where=str(run_dir), remedy=remedy)
    if not (run_dir / JOURNAL).is_file():
        raise StoreError(f"not a run folder: it has no {JOURNAL}", where=str(run_dir), remedy=remedy)


def _open_locked(run_dir: Path, create: int) -> int:
    """The journal open for appending, locked until closed. The lock ends with the process, however that ends."""
    with _telling("cannot open the journal", run_dir, OTHER_OUT):
        fd = os.open(run_dir / JOURNAL, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | create, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return fd
        os.close(fd)
        raise StoreError(
            "another dsabisect process is writing this run", where=str(run_dir), remedy=f"Wait for it. {OTHER_OUT}"
        ) from error
    return fd


def _parse(raw: bytes, run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Events and the number of bytes that they take. Only what follows the last good line may be damaged."""
    lines = raw.split(b"\n")
    whole = lines[:-1]  # what follows the last newline was never acknowledged
    events: list[dict[str, Any]] = []
    size = 0
    for number, line in enumerate(whole, 1):
        event = _event(line)
        if event is None and number == len(whole) and not lines[-1]:
            break
        if event is None:
            raise StoreError(
                f"line {number} of {JOURNAL} is damaged",
                where=str(run_dir),
                remedy="The run cannot be trusted: start anew with another --out",
            )
        events.append(event)
        size += len(line) + 1
    return events, size


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


def _sync_folder(folder: Path) -> None:
    """Make a rename or a new name durable; some file systems cannot, which loses nothing but that promise."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _telling(what: str, where: Path, remedy: str) -> Any:
    """Turn an OSError into a StoreError that says what, where and what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error.strerror or error}", where=str(where), remedy=remedy) from error
