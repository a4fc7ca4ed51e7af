"""What has changed in a pool's named blocks since somebody last asked: which names came, which went.

    listen ──▶ all names there are ──▶ take ──▶ changes since ──▶ take ──▶ … ──▶ ignore

Only the net change is kept: a name that came and went in between is none. So what waits is never more than the names that
were there at the last `take` and those that are there now, whoever is late; and while nobody listens nothing is kept.
Does not know blocks or who listens. Used in the engine's thread, as the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Names of blocks whose content can be found from now on, and of those whose cannot any more; no name is in both."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class BlockNews:
    """Owned by the pool, which tells it; `names` are the pool's, which it only looks at."""

    def __init__(self, names: Mapping[bytes, int]) -> None:
        self._names = names
        self._changes: dict[bytes, bool] | None = None  # name → whether it came

    def listen(self) -> tuple[bytes, ...]:
        """All names there are; from now on changes are kept. Again: all names, and no changes so far."""
        self._changes = {}
        return tuple(self._names)

    def ignore(self) -> None:
        """Keep nothing any more."""
        self._changes = None

    def take(self) -> BlockChanges | None:
        """The changes since the last `take` or `listen`; None when there are none, or nobody listens."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        stored = tuple(name for name, came in changes.items() if came)
        return BlockChanges(stored, tuple(name for name, came in changes.items() if not came))

    def on_stored(self, name: bytes) -> None:
        """The pool has a block of this name, which it had not."""
        self._note(name, came=True)

    def on_removed(self, name: bytes) -> None:
        """It has none any more."""
        self._note(name, came=False)

    def _note(self, name: bytes, *, came: bool) -> None:
        if self._changes is not None and self._changes.setdefault(name, came) != came:
            del self._changes[name]
