"""What commits say about one another: which revert an earlier one, and which bring it back. Pure; words only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from dsabisect.model import Change

NUMBERS = re.compile(r"(?:\s*\(#\d+\))+\s*$")
REVERT_QUOTED = re.compile(r"""^(?:\[[^\]]*\]\s*)*revert(?:ed|s)?:?\s+["“'](.*)["”']$""", re.IGNORECASE | re.DOTALL)
REVERT_WORD = re.compile(r"^(?:\[[^\]]*\]\s*)*revert", re.IGNORECASE)
RELAND_WORD = re.compile(r"""[\[(]?\bre-?(?:land|appl(?:y|ied))(?:s|ed|ing)?\b[\])]?:?\s*""", re.IGNORECASE)
REVERTED_SHA = re.compile(r"\breverts commit ([0-9a-f]{7,64})\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Told:
    """A commit with what it says about itself."""

    change: Change
    parents: tuple[str, ...]
    body: str


def plain_title(title: str) -> str:
    """A title without pull-request numbers at its end, without case, with single spaces."""
    return " ".join(NUMBERS.sub("", title).casefold().split())


@lru_cache(maxsize=65536)
def title_layers(title: str) -> tuple[tuple[str, ...], str]:
    """`Revert "Reland "X" (#2)" (#3)` → (("revert", "reland"), "x")."""
    kinds: list[str] = []
    rest = NUMBERS.sub("", title).strip()
    while True:
        quoted = REVERT_QUOTED.match(rest)
        if quoted:
            kinds.append("revert")
            rest = NUMBERS.sub("", quoted[1]).strip()
        elif not REVERT_WORD.match(rest) and RELAND_WORD.search(rest):
            kinds.append("reland")
            rest = NUMBERS.sub("", RELAND_WORD.sub("", rest, count=1).strip()).strip(" \"'“”:")
        else:
            return tuple(kinds), plain_title(rest)


def same_title(found: str, title: str) -> bool:
    """Equal, or ``found`` was cut short with an ellipsis by a hosting site."""
    cut = re.sub(r"(?:…|\.\.\.)$", "", found)
    return found == title or (cut != found and len(cut) >= 20 and title.startswith(cut))


def pull_number(title: str) -> str:
    """The pull-request number at the end of a title, "" when there is none."""
    found = NUMBERS.search(title)
    return re.findall(r"\d+", found[0])[-1] if found else ""


def says_reverts(later: Told, original: Told) -> bool:
    """Does ``later`` say that it reverts ``original``?

    By sha ("This reverts commit SHA", also shortened), by quoted title (`Revert "TITLE"`, pull-request numbers
    aside), or by pull-request number ("Reverts owner/repo#N"; "Revert #N …").
    """
    if any(original.change.id.startswith(sha.lower()) for sha in REVERTED_SHA.findall(later.body)):
        return True
    kinds, core = title_layers(later.change.title)
    mine, title = title_layers(original.change.title)
    if kinds == ("revert", *mine) and same_title(core, title):
        return True
    number = pull_number(original.change.title)
    if not number or kinds[:1] == ("reland",):
        return False
    by_body = re.search(rf"^\s*reverts [\w./-]*#{number}\b", later.body, re.IGNORECASE | re.MULTILINE)
    unquoted = REVERT_WORD.match(later.change.title) and not kinds
    by_title = unquoted and re.search(rf"#{number}\b", NUMBERS.sub("", later.change.title))
    return bool(by_body or by_title)


def says_relands(later: Told, original: Told) -> bool:
    """Does ``later`` say that it brings ``original`` back: `Reland "TITLE"`, `Re-land #N`, `Revert "Revert "X""`?"""
    kinds, core = title_layers(later.change.title)
    mine, title = title_layers(original.change.title)
    again = kinds == mine and kinds[:1] == ("reland",)
    if (again or kinds in (("reland", *mine), ("revert", "revert", *mine))) and same_title(core, title):
        return True
    number = pull_number(original.change.title)
    mentioned = number and re.search(rf"#{number}\b", NUMBERS.sub("", later.change.title))
    return bool(kinds[:1] == ("reland",) and mentioned)
