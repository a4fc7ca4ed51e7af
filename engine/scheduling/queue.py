"""Requests that wait for blocks, in the order in which they will start. Does not know why a request waits."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.request import Request


class WaitingQueue:
    """Sorted by Request.order; a preempted request comes back to its old place. Removing costs nothing until its turn comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._waiting: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no order."""
        return iter(self._waiting)

    @property
    def head(self) -> Request | None:
        """The next to start."""
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def add(self, request: Request) -> None:
        """Let it wait at the place that its order gives it."""
        self._waiting.add(request)
        heapq.heappush(self._heap, (request.order, request))

    def remove(self, request: Request) -> None:
        """It does not wait any more. KeyError if it did not."""
        self._waiting.remove(request)
