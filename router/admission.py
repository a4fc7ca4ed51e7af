"""The outermost layer: how many requests run at once, how many wait, and when a client is told to come back.

    permit() ──▶ running                       while fewer than max_running run
             ──▶ waiting ──▶ running           by priority, then by arrival
             ──▶ Overloaded(retry_after_s)     when max_waiting wait already
             ──▶ Unavailable                   after close(); those who wait already: after halt()

A permit is given back once, when its `async with` block ends. Knows nothing of a request but its priority and deadline.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, DiptychError, Overloaded, Unavailable
from router.config import AdmissionConfig

_SMOOTHING = 0.1
_MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Owns the permits. All methods are called on the event loop."""

    def __init__(self, config: AdmissionConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._order = itertools.count()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._num_running = 0
        self._num_waiting = 0
        self._hold_s = 1.0  # smoothed time a permit is held
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Requests that hold a permit."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return self._num_waiting

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed

    def close(self) -> None:
        """Let nobody in from now on; those who wait still get their turn."""
        self._closed = True

    def halt(self, reason: DiptychError) -> None:
        """As `close`, and those who wait are sent away with `reason`."""
        self.close()
        for _, _, turn in self._queue:
            if not turn.done():
                turn.set_exception(reason)

    async def wait_idle(self) -> None:
        """Return when nothing runs and nothing waits."""
        await self._idle.wait()

    @asynccontextmanager
    async def permit(self, priority: int, deadline: float) -> AsyncIterator[None]:
        """Hold a permit for the block. Raises Overloaded at once, or DeadlineExceeded when `deadline` passes in the queue."""
        if self._closed:
            raise Unavailable("this router is stopping")
        if self._num_running < self._config.max_running:  # then nobody waits: a released permit goes to the queue first
            self._num_running += 1
            self._idle.clear()
        else:
            await self._wait(priority, deadline)
        since = self._clock.now()
        try:
            yield
        finally:
            self._hold_s += _SMOOTHING * (self._clock.now() - since - self._hold_s)
            self._release()

    async def _wait(self, priority: int, deadline: float) -> None:
        if self._num_waiting >= self._config.max_waiting:
            raise Overloaded(
                f"{self._num_running} requests run and {self._num_waiting} wait, which is the limit",
                self._retry_after_s(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._order), turn))
        self._num_waiting += 1
        timer = asyncio.ensure_future(self._expire(turn, deadline))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._release()  # the permit came in the same turn of the loop in which the client left
            turn.cancel()
            raise
        finally:
            self._num_waiting -= 1
            timer.cancel()

    async def _expire(self, turn: asyncio.Future[None], deadline: float) -> None:
        await self._clock.sleep(deadline - self._clock.now())
        if not turn.done():
            turn.set_exception(DeadlineExceeded("the request's time ran out while it waited to be let in"))

    def _release(self) -> None:
        """Hand the permit to the first that still waits, or put it back."""
        while self._queue:
            _, _, turn = heapq.heappop(self._queue)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_running -= 1
        if self._num_running == 0:
            self._idle.set()

    def _retry_after_s(self) -> float:
        """When the queue will have moved by its own length, as far as past requests tell."""
        rounds = math.ceil((self._num_waiting + 1) / self._config.max_running)
        return min(max(1.0, rounds * self._hold_s), _MAX_RETRY_AFTER_S)
