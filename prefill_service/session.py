"""One router's stream of prefill events: a bounded outbox that runs fill and the router's reading empties, a batch per turn.

    open ──put, put, …──▶ open ──end()──▶ ended (what is in the outbox still goes out)
      └──the router leaves `limit` events unread──▶ failed (nothing more goes out; batches() raises)

Does not know gRPC, runs or who is in the outbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from contracts.errors import DiptychError, Overloaded
from contracts.pb.diptych.v1 import prefill_pb2

_MAX_BYTES = 8 * 1024 * 1024  # of one batch, far below what a message may have, but for a single event that is larger


class PrefillSession:
    """Owned by the call that serves it; used from one event loop."""

    def __init__(self, limit: int = 16_384, limit_bytes: int = 256 * 1024 * 1024) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._outbox: list[tuple[prefill_pb2.PrefillEvent, int]] = []
        self._num_bytes = 0
        self._news = asyncio.Event()
        self._ended = False
        self._error: DiptychError | None = None

    def put(self, event: prefill_pb2.PrefillEvent) -> None:
        """Send it after all others; the session fails when the router does not read. Nothing goes out after that."""
        if self._ended or self._error is not None:
            return
        size = event.ByteSize()
        if len(self._outbox) >= self._limit or self._num_bytes >= self._limit_bytes:
            self.fail(Overloaded(f"session: {len(self._outbox)} events, {self._num_bytes} bytes were not read"))
            return
        self._outbox.append((event, size))
        self._num_bytes += size
        self._news.set()

    def end(self) -> None:
        """No more will come; the reader gets what is left. Idempotent."""
        self._ended = True
        self._news.set()

    def fail(self, error: DiptychError) -> None:
        """Drop what is left; the reader gets `error`. The first error counts."""
        if self._error is None:
            self._error = error
        self._outbox.clear()
        self._num_bytes = 0
        self._news.set()

    async def batches(self) -> AsyncIterator[list[prefill_pb2.PrefillEvent]]:
        """All that came since the last, in order, until the end. Raises what `fail` was told."""
        while True:
            while self._outbox:
                yield self._take()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._news.clear()
            await self._news.wait()

    def _take(self) -> list[prefill_pb2.PrefillEvent]:
        taken = num_bytes = 0
        for _, size in self._outbox:
            if taken and num_bytes + size > _MAX_BYTES:
                break
            taken, num_bytes = taken + 1, num_bytes + size
        batch = [event for event, _ in self._outbox[:taken]]
        del self._outbox[:taken]
        self._num_bytes -= num_bytes
        return batch
