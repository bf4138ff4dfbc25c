"""Settings that a repository brings along: `dsabisect.toml`, or `[dsabisect]` in `setup.cfg`, at its top.

They are the weakest: environment variables (DSABISECT_DEVICE for --device) and options come after them. A repository
is what is being judged, so it may say how it is measured but neither with which goldens nor by which interpreter.
"""

from __future__ import annotations

import configparser
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsabisect.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOML, CFG, SECTION = "dsabisect.toml", "setup.cfg", "dsabisect"
LISTS = ("path", "case", "skip", "build-env", "submodule")
SINGLE = ("target", "suite", "device", "jobs", "max-evals", "max-minutes", "cell-seconds", "memory")
KNOWN = (*SINGLE, *LISTS)
REFUSED = {
    "golden": "a repository must not choose what it is judged by",
    "python": "a repository must not choose what it is run by",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``values``: option name without dashes → words as one would give them; lists for options that may repeat."""

    file: Path | None = None
    values: Mapping[str, str | list[str]] = field(default_factory=dict)


def load(repo: Path) -> Settings:
    """The settings of the work tree that ``repo`` lies in; none in a bare repository.

    Raises:
        UsageError: the file cannot be read or parsed, or holds what is unknown or not allowed.
    """
    top = next((folder for folder in (repo.absolute(), *repo.absolute().parents) if (folder / ".git").exists()), None)
    if top is None:
        return Settings()
    for name, parse in ((TOML, _toml), (CFG, _cfg)):
        file = top / name
        if file.is_file():
            found = parse(file)
            if found is not None:
                return Settings(file=file, values={key: _words(key, value, file) for key, value in found.items()})
    return Settings()


def _toml(file: Path) -> Mapping[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(_read(file))
    except tomllib.TOMLDecodeError as error:
        raise _fault(f"not TOML: {error}", file) from error
    return found


def _cfg(file: Path) -> Mapping[str, Any] | None:
    """None where there is no such section: the file is mostly about other things."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(_read(file))
    except configparser.Error as error:
        raise _fault(f"cannot be parsed: {' '.join(str(error).split())}", file) from error
    if not parser.has_section(SECTION):
        return None
    defaults = parser.defaults()
    return {
        key.replace("_", "-"): value.split("\n") if key.replace("_", "-") in LISTS else value
        for key, value in parser.items(SECTION)
        if key not in defaults
    }


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _fault(f"cannot be read: {getattr(error, 'strerror', None) or error}", file) from error


def _words(key: str, value: Any, file: Path) -> str | list[str]:
    if key in REFUSED:
        raise _fault(f"{key!r} is not allowed here: {REFUSED[key]}", file, f"Give --{key} on the command line")
    if key not in KNOWN:
        raise _fault(f"unknown setting {key!r}", file, f"Known: {', '.join(KNOWN)}")
    if key in LISTS:
        if isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values()):
            return [f"{name}={v}" for name, v in value.items()]
        found = [value] if isinstance(value, str) else value
        if isinstance(found, list) and all(isinstance(v, str) for v in found):
            return [v.strip() for v in found if v.strip()]
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise _fault(f"{key!r} has a value of the wrong kind: {value!r}", file)


def _fault(what: str, file: Path, remedy: str = "") -> UsageError:
    return UsageError(what, where=str(file), remedy=remedy or "Mend or remove it")
