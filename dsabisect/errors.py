"""Errors that a person can act on: what happened, where, and the command or step that mends it.

Exit codes: 128 a DsabisectError · 129 usage · 130 interrupted, resumable · 131 internal error.
Codes under 126 are verdicts (`run`: 0 1 2 3, `check`: 0 1 125), so that `git bisect run` aborts when the tool
itself fails instead of blaming a commit.
"""

from __future__ import annotations

EXIT_ERROR = 128
EXIT_USAGE = 129
EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 131


class DsabisectError(Exception):
    """Base of everything that stops a run without being a verdict."""

    exit_code = EXIT_ERROR

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.remedy = what, where, remedy

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.what}{where}{remedy}"


class UsageError(DsabisectError):
    """The command's words are off: unknown target, path, suite, device."""

    exit_code = EXIT_USAGE


class RepositoryError(DsabisectError):
    """The repository or a revision in it cannot be used."""


class GoldenError(DsabisectError):
    """A golden is missing, damaged, or too few."""


class BadOracle(GoldenError):
    """A negative control was accepted: the goldens would not notice the faults that matter."""


class EnvironmentFault(DsabisectError):
    """No GPU, no compiler, a wheel that misreads tensors, no torch: the machine's, never the candidate's."""


class HarnessFault(DsabisectError):
    """Our own harness failed inside the candidate's process."""


class StoreError(DsabisectError):
    """The run folder, journal or cache cannot be written or read."""


class Interrupted(DsabisectError):
    """Ctrl-C: what was measured is in the journal."""

    exit_code = EXIT_INTERRUPTED
