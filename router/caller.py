"""Who asks: what the router knows of the owner of an API key, whichever door it came through.

Does not know keys, or how a caller was recognised.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One owner of an API key. `name` is for logs and queues and is not secret; None in a limit is no limit.

    `weight` is its share of the router beside others that wait; its requests never run before those of a better (lower)
    priority than `best_priority`.
    """

    name: str
    weight: float = 1.0
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    best_priority: int | None = None

    def allowed(self, priority: int) -> int:
        """A priority that was asked for, or the best that this caller may have."""
        return priority if self.best_priority is None else max(priority, self.best_priority)


ANYBODY = Caller(name="")
