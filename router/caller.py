"""Who asks: what the router knows of the owner of an API key, whichever door it came through.

Does not know keys, or how a caller was recognised.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One owner of an API key. `name` is for logs and queues and is not secret; None in a limit is no limit. `dashboard`: it may
    see when, how long and how large everybody's requests are.

    `weight` is its share of the router beside others that wait; its requests never run before those of a better (lower)
    priority than `best_priority`. Requests have priority 0 unless they say otherwise, so that with 0 a caller can put its own
    back, and not go before others.
    """

    name: str
    weight: float = 1.0
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None
    best_priority: int = 0
    dashboard: bool = True

    def allowed(self, priority: int) -> int:
        """A priority that was asked for, or the best that this caller may have."""
        return max(priority, self.best_priority)


# Where there are no keys all are one caller: it goes before nobody but itself.
ANYBODY = Caller(name="", best_priority=-(2**31))
