"""Events to those who watch: each frame is encoded once, and who does not keep up is let go.

    publish(bytes) ──▶ each Watcher's few unread events ──▶ its connection
                          ├─ more than UNREAD of them: it gets no more, and its stream ends; who comes again gets a snapshot
                          └─ MOST_EVENTS have come: it ends as well, so that whether it may watch is asked again

Bounded in watchers and in what waits for each. Does not know what the events say.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from contracts.errors import Overloaded

MOST_WATCHERS = 32
UNREAD = 5
MOST_EVENTS = 300  # five minutes
_AGAIN_S = 10.0


class Watcher:
    """One of them. Iterate it once; it ends when it is let go."""

    def __init__(self, first: bytes) -> None:
        self._unread: deque[bytes] = deque((first,))
        self._news = asyncio.Event()
        self._news.set()
        self._over = False
        self._num_events = 0

    @property
    def done(self) -> bool:
        """Whether as much waits for it as may, or it has had all that it gets."""
        return len(self._unread) >= UNREAD or self._num_events >= MOST_EVENTS

    def put(self, event: bytes) -> None:
        """It shall read this after what waits already."""
        self._unread.append(event)
        self._num_events += 1
        self._news.set()

    def end(self) -> None:
        """Let it read what waits, and no more. Idempotent."""
        self._over = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Events, as they come."""
        while True:
            while self._unread:
                yield self._unread.popleft()
            if self._over:
                return
            self._news.clear()
            await self._news.wait()


class Feed:
    """All of them. Used on one event loop."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether anybody is there: else no frame needs to be encoded."""
        return bool(self._watchers)

    def watch(self, first: Callable[[], bytes]) -> Watcher:
        """One more, who reads `first` before all that is published from now on. Raises Overloaded when there are as many as
        may be, or the feed is closed; nothing is made then for who is turned away.
        """
        if self._closed:
            raise Overloaded("this router is stopping", _AGAIN_S)
        if len(self._watchers) >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} dashboards are open at this router, and no more than that", _AGAIN_S)
        watcher = Watcher(first())
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """It reads no more. Idempotent."""
        self._watchers.discard(watcher)

    def publish(self, event: bytes) -> None:
        """Give this to everybody; nobody is waited for."""
        for watcher in [w for w in self._watchers if w.done]:
            watcher.end()
            self._watchers.discard(watcher)
        for watcher in self._watchers:
            watcher.put(event)

    def close(self) -> None:
        """Let all go, and nobody in. Idempotent."""
        self._closed = True
        for watcher in self._watchers:
            watcher.end()
        self._watchers.clear()
