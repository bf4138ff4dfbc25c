"""What a person says of commits: marks, and taking them back. Events of the journal, like everything else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dsabisect.errors import UsageError
from dsabisect.outside import store
from dsabisect.outside.gitrepo import GitRepo
from dsabisect.report import build


def mark(run_dir: Path, rev: str, verdict: str, column: str) -> str:
    """Note that ``rev`` (a commit of the run, as git names it) is good, bad or not testable. Returns a line to show.

    Raises:
        StoreError: no such run, or a live process holds it.
        RepositoryError: the repository knows no such commit either, or is gone.
        UsageError: the run knows no such commit or column.
    """
    with store.Journal.resume(run_dir) as journal:
        report = build.build(journal.events())
        change = _commit(report, rev, run_dir)
        if change["id"] in (report["run"]["good"], report["run"]["bad"]):
            raise UsageError(
                f"{change['id'][:9]} is an end of the range and cannot be marked", where=str(run_dir),
                remedy="Begin a run with another --good or --bad",
            )  # fmt: skip
        known = {build.column_of(o) for o in report["observations"]}
        if column and column not in known:
            raise UsageError(
                f"the run has no column {column!r}", where=str(run_dir),
                remedy=f"One of: {', '.join(sorted(known)[:8])} …",
            )  # fmt: skip
        journal.append("mark", {"sha": change["id"], "verdict": verdict, "column": column})
    of = f" in {column}" if column else ""
    return f"marked {change['id'][:9]} {verdict}{of}: {change['title']}"


def undo(run_dir: Path) -> str:
    """Take the last mark back. Returns a line for a person.

    Raises:
        StoreError: no such run, or a live process holds it.
        UsageError: there is no mark to take back.
    """
    with store.Journal.resume(run_dir) as journal:
        said = build.marks(journal.events())
        if not said:
            raise UsageError("there is no mark to take back", where=str(run_dir), remedy="`dsabisect log` shows all")
        journal.append("undo", {})
    return f"taken back: {said[-1]['sha'][:9]} {said[-1]['verdict']}"


def _commit(report: Any, rev: str, run_dir: Path) -> Any:
    """The commit of the range whose sha begins with ``rev``, or which the repository calls that (HEAD~5, a branch)."""
    commits = report["range"]["commits"]
    found = [c for c in commits if len(rev) >= 4 and c["id"].startswith(rev.lower())]
    if not found and not re.fullmatch(r"[0-9a-fA-F]+", rev):
        sha = GitRepo(Path(report["run"]["repo"]), store.work_root()).resolve(rev)
        found = [c for c in commits if c["id"] == sha]
    if len(found) != 1:
        what = "is ambiguous" if found else "names no commit of this run"
        raise UsageError(
            f"{rev!r} {what}", where=str(run_dir), remedy="Give the beginning of its sha, as `dsabisect log` prints it"
        )
    return found[0]
