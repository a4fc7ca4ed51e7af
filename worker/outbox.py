"""What goes to one router: a bounded queue that a worker fills and the router's reading empties.

    open ──put, put, …──▶ open ──end()──▶ ended (what is in it still goes out)
      └──the router leaves a limit's worth unread──▶ failed (nothing more goes out; its reader is told why)

Back-pressure stops here: a worker never waits for a router, and a router that does not read costs bounded memory.
Does not know gRPC or what it carries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from contracts.errors import DiptychError, Overloaded

Item = TypeVar("Item")
UNBOUNDED = 1 << 62  # bytes, for items whose size is bounded elsewhere


class Outbox(Generic[Item]):
    """Owned by the call that serves it; used from one event loop. Read once, by `items` or by `batches`."""

    def __init__(self, name: str, limit: int, limit_bytes: int = UNBOUNDED) -> None:
        self.name = name
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._unread: deque[tuple[Item, int]] = deque()
        self._num_bytes = 0
        self._news = asyncio.Event()
        self._ended = False
        self._error: DiptychError | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing can be put into it any more."""
        return self._ended or self._error is not None

    def put(self, item: Item, size: int = 0) -> bool:
        """Send it, of `size` bytes, after all others; False when closed, or closed by this because nobody reads."""
        if self._ended or self._error is not None:
            return False
        if len(self._unread) >= self._limit or self._num_bytes >= self._limit_bytes:
            self.fail(Overloaded(f"{self.name}: {len(self._unread)} messages, {self._num_bytes} bytes were not read"))
            return False
        self._unread.append((item, size))
        self._num_bytes += size
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
        self._unread.clear()
        self._num_bytes = 0
        self._news.set()

    async def items(self) -> AsyncIterator[Item]:
        """Each by itself, in order, until the end. Raises what `fail` was told."""
        while await self._filled():
            while self._unread:
                yield self._take()

    async def batches(self, max_bytes: int) -> AsyncIterator[list[Item]]:
        """All that came since the last, in order, at most `max_bytes` of it unless one is larger. Raises what `fail` was told."""
        while await self._filled():
            while self._unread:
                most = self._num_bytes - max_bytes  # what may stay unread, at least
                batch = [self._take()]
                while self._unread and self._num_bytes - self._unread[0][1] >= most:
                    batch.append(self._take())
                yield batch

    def _take(self) -> Item:
        item, size = self._unread.popleft()
        self._num_bytes -= size
        return item

    async def _filled(self) -> bool:
        """Wait for something to read; False at the end. Raises what `fail` was told."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                return False
            self._news.clear()
            await self._news.wait()
        return True
