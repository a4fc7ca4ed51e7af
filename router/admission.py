"""The outermost layer: how many requests run at once, how many wait, and when a client is told to come back.

    permit() ──▶ running                       while there is room within max_running
             ──▶ waiting ──▶ running           by priority, then by arrival
             ──▶ Overloaded(retry_after_s)     when max_waiting wait already
             ──▶ Unavailable                   after close(); those who wait already: after halt()

A request of n answers takes n places with one permit, all at once: taken one by one, requests that each hold some and wait
for the rest would wait for each other for ever. One of more answers than there are places takes all of them. Nobody overtakes
the first in the queue, so a large request gets its turn. A permit is given back once, when its `async with` block ends.
Knows nothing of a request but its priority, deadline and number of answers.
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
        self._queue: list[tuple[int, int, int, asyncio.Future[None]]] = []  # priority, order, places, turn
        self._num_running = 0
        self._num_waiting = 0
        self._hold_s = 1.0  # smoothed time a permit is held
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Answers that are being made: each permit counts as many as it is for."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a permit."""
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
        for *_, turn in self._queue:
            if not turn.done():
                turn.set_exception(reason)

    async def wait_idle(self) -> None:
        """Return when nothing runs and nothing waits."""
        await self._idle.wait()

    @asynccontextmanager
    async def permit(self, priority: int, deadline: float, num_answers: int = 1) -> AsyncIterator[None]:
        """Hold a permit for the block. Raises Overloaded at once, or DeadlineExceeded when `deadline` passes in the queue."""
        if self._closed:
            raise Unavailable("this router is stopping")
        places = min(num_answers, self._config.max_running)
        if self._num_waiting == 0 and self._num_running + places <= self._config.max_running:
            self._take(places)
        else:
            await self._wait(priority, deadline, places)
        since = self._clock.now()
        try:
            yield
        finally:
            self._hold_s += _SMOOTHING * (self._clock.now() - since - self._hold_s)
            self._give_back(places)

    async def _wait(self, priority: int, deadline: float, places: int) -> None:
        if self._num_waiting >= self._config.max_waiting:
            raise Overloaded(
                f"{self._num_running} answers are being made and {self._num_waiting} requests wait, which is the limit",
                self._retry_after_s(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._order), places, turn))
        self._num_waiting += 1
        self._let_in()  # a small one of better priority may have room where the first so far had none
        timer = asyncio.ensure_future(self._expire(turn, deadline))
        try:
            await turn
        except (asyncio.CancelledError, DiptychError):
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(places)  # the permit came in the same turn of the loop in which the client left
            else:
                turn.cancel()
                self._num_waiting -= 1
                self._let_in()  # it may have been the first, and too large for the room that those behind it fit
            raise
        finally:
            timer.cancel()

    async def _expire(self, turn: asyncio.Future[None], deadline: float) -> None:
        await self._clock.sleep(deadline - self._clock.now())
        if not turn.done():
            turn.set_exception(DeadlineExceeded("the request's time ran out while it waited to be let in"))

    def _take(self, places: int) -> None:
        self._num_running += places
        self._idle.clear()

    def _give_back(self, places: int) -> None:
        self._num_running -= places
        self._let_in()
        if self._num_running == 0:
            self._idle.set()

    def _let_in(self) -> None:
        """Permits to those who wait, in their order, as far as there is room for the first."""
        while self._queue:
            *_, places, turn = self._queue[0]
            if not turn.done():
                if self._num_running + places > self._config.max_running:
                    return
                self._num_waiting -= 1
                self._take(places)
                turn.set_result(None)
            heapq.heappop(self._queue)

    def _retry_after_s(self) -> float:
        """When the queue will have moved by its own length, as far as past requests tell."""
        rounds = math.ceil((self._num_waiting + 1) / self._config.max_running)
        return min(max(1.0, rounds * self._hold_s), _MAX_RETRY_AFTER_S)
