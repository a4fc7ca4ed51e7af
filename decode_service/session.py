"""One router's stream of answers: a bounded outbox that the engine's steps fill and the router's reading empties.

    open ──push, push, …──▶ open ──end()──▶ ended (what is in the outbox still goes out)
      └──the router has not read for `limit` batches──▶ failed (nothing more goes out; batches() raises)

Back-pressure stops here: an engine never waits for a router, and a router that does not read costs bounded memory.
Does not know gRPC, hand-offs or who is in the outbox.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from contracts.errors import DiptychError, Overloaded
from contracts.request import TokenDelta


class RouterSession:
    """Owned by the call that serves it; used from one event loop."""

    def __init__(self, session_id: str, limit: int = 4096) -> None:
        self.session_id = session_id
        self._limit = limit
        self._outbox: deque[tuple[TokenDelta, ...]] = deque()
        self._news = asyncio.Event()
        self._ended = False
        self._error: DiptychError | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing can be pushed any more."""
        return self._ended or self._error is not None

    def push(self, deltas: tuple[TokenDelta, ...]) -> bool:
        """Send one step's news; False when the session is closed, or is closed by this because nobody reads."""
        if self.closed:
            return False
        if len(self._outbox) >= self._limit:
            self.fail(Overloaded(f"session {self.session_id}: {self._limit} batches were not read"))
            return False
        self._outbox.append(deltas)
        self._news.set()
        return True

    def end(self) -> None:
        """No more will come; the reader gets what is left. Idempotent."""
        self._ended = True
        self._news.set()

    def fail(self, error: DiptychError) -> None:
        """Drop what is left; the reader gets `error`. The first error counts."""
        if self._error is None:
            self._error = error
        self._outbox.clear()
        self._news.set()

    async def batches(self) -> AsyncIterator[tuple[TokenDelta, ...]]:
        """Each step's news in order, until the end. Raises what `fail` was told."""
        while True:
            while self._outbox:
                yield self._outbox.popleft()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._news.clear()
            await self._news.wait()
