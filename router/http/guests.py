"""How many HTTP connections there may be at once, and who goes when there are too many.

    connected ──▶ owing its first request ──▶ being served ⇄ owing another (idle, or one that is arriving)
                        │ 1st: for longest                        │ 2nd: for longest
                        └───────── cut when the limit is reached, to make room ──────────┘
    a newcomer while all are being served ──▶ 503

So whoever opens connections and holds them without asking (slowloris) displaces others of his kind, a client that asks at
once is served, and one that was served before keeps its connection as long as there are strangers. Does not know sockets or
HTTP.
"""

from __future__ import annotations

from typing import Protocol

from observability.log import get_logger

log = get_logger(__name__)


class Guest(Protocol):
    """A connection."""

    def make_room(self) -> None:
        """Go at once: it will be said to have left later, or not at all."""
        ...


class Guests:
    """Counts the connections of one door."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._strangers: dict[Guest, None] = {}  # in the order in which they began to owe their first request
        self._idle: dict[Guest, None] = {}  # … another one
        self._served: set[Guest] = set()
        self._crowded = False
        self.num_cut = 0
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self._strangers) + len(self._idle) + len(self._served)

    def come(self, guest: Guest) -> bool:
        """A newcomer, which owes a request; whether there is room for it."""
        if len(self) >= self._limit:
            if not self._crowded:
                self._crowded = True
                log.warning("as many HTTP connections as may be; those that ask nothing are cut", limit=self._limit)
            owing = self._strangers or self._idle
            if not owing:
                self.num_refused += 1
                return False
            oldest = next(iter(owing))
            del owing[oldest]
            self.num_cut += 1
            oldest.make_room()
        self._strangers[guest] = None
        return True

    def serve(self, guest: Guest) -> None:
        """Its request has arrived whole."""
        for owing in (self._strangers, self._idle):
            if owing.pop(guest, self) is None:
                self._served.add(guest)

    def answered(self, guest: Guest) -> None:
        """It owes the next request."""
        if guest in self._served:
            self._served.remove(guest)
            self._idle[guest] = None

    def leave(self, guest: Guest) -> None:
        """It has gone. Idempotent, also for those that never were let in."""
        self._strangers.pop(guest, None)
        self._idle.pop(guest, None)
        self._served.discard(guest)
        if len(self) < self._limit / 2:
            self._crowded = False
