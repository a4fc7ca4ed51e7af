"""One HTTP request as its connection sees it: whether all of it is here, and whether its client has left.

    connection ──▶ whole                    the body has come to its end: reading it waits for nobody
               ──▶ gone ──▶ whoever watches, at once and once

ASGI says both only to those who wait for a message, which for an answer that is being made is a task of its own. Does not know
what is asked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

SCOPE_KEY = "diptych.visit"


class Visit:
    """One per request. Its connection says `leave`, and sets `whole`; `gone` and `whole` are never unsaid."""

    __slots__ = ("_began", "_on_left", "gone", "whole")

    def __init__(self, waited_s: float = 0.0) -> None:
        """Its first byte is read just now, and has waited for that so long."""
        self._began = time.monotonic() - waited_s
        self.whole = False
        self.gone = False
        self._on_left: Callable[[], object] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since its first byte came."""
        return time.monotonic() - self._began

    def leave(self) -> None:
        """The client has gone. Idempotent."""
        self.gone = True
        on_left, self._on_left = self._on_left, None
        if on_left is not None:
            on_left()

    def watch(self, on_left: Callable[[], object]) -> None:
        """Call this when the client leaves, which it has not done yet, instead of what was to be called before."""
        assert not self.gone
        self._on_left = on_left

    def unwatch(self) -> None:
        """Call nothing any more."""
        self._on_left = None


class Visits:
    """All requests of one connection that are not answered to their end, in their order."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: deque[tuple[RequestResponseCycle, Visit]] = deque()

    def begin(self, cycle: RequestResponseCycle, visit: Visit) -> None:
        """One more has come."""
        self._open.append((cycle, visit))

    def answered(self) -> None:
        """The first is over."""
        self._open.popleft()

    def leave(self) -> None:
        """The client has gone, from those as well that wait behind others: uvicorn tells only the last. Idempotent."""
        while self._open:
            cycle, visit = self._open.popleft()
            cycle.disconnected = True
            cycle.message_event.set()
            visit.leave()


def visit_of(scope: Scope) -> Visit:
    """That of a request on a connection of `router.http.server`."""
    visit = scope[SCOPE_KEY]
    assert isinstance(visit, Visit)
    return visit
