"""One thing that was looked at: what was found, whether it is a problem, and what to do about it.

    OK       as it should be
    WARNING  works, but not well or not everywhere
    BROKEN   Diptych cannot work like this

Does not know what is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` says what to do; empty when there is nothing to do."""

    subject: str
    level: Level
    fact: str
    remedy: str = ""


def ok(subject: str, fact: str) -> Finding:
    """As it should be."""
    return Finding(subject, Level.OK, fact)


def warning(subject: str, fact: str, remedy: str) -> Finding:
    """Works, with a drawback."""
    return Finding(subject, Level.WARNING, fact, remedy)


def broken(subject: str, fact: str, remedy: str) -> Finding:
    """Does not work."""
    return Finding(subject, Level.BROKEN, fact, remedy)
