"""Time as a value that is handed in: `MonotonicClock` in production, `VirtualClock` where time must be told what to do.

Seconds as float, monotonic, comparable only within one process. The virtual clock is product code: the `local`
connector and the simulator run on it. Does not know wall-clock time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """What a part may ask about time."""

    def now(self) -> float:
        """Seconds since some fixed point of this process."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return after `delay_s` seconds of this clock."""
        ...

    def call_later(self, delay_s: float, ring: Callable[[], object]) -> Callable[[], object]:
        """Call `ring` once from the running event loop, `delay_s` seconds of this clock from now, never before this returns.

        The result, called, ends that, and may be called at any time. A tenth of what a task that sleeps costs.
        """
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed point."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """asyncio's sleep."""
        await asyncio.sleep(delay_s)

    def call_later(self, delay_s: float, ring: Callable[[], object]) -> Callable[[], object]:
        """asyncio's timer."""
        return asyncio.get_running_loop().call_later(delay_s, ring).cancel


class _Timer:
    """Somebody to be called, among sleepers: has of a future what wakes and ends those."""

    __slots__ = ("_ring",)

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring: Callable[[], object] | None = ring

    def done(self) -> bool:
        return self._ring is None

    def cancel(self) -> None:
        self._ring = None

    def set_result(self, result: None) -> None:
        del result
        ring, self._ring = self._ring, None
        if ring is not None:
            ring()


class VirtualClock:
    """A clock that moves only when `advance` or `skip` is called; sleepers wake in order of their deadlines."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None] | _Timer]] = []

    def now(self) -> float:
        """The virtual instant in seconds."""
        return self._now

    async def sleep(self, delay_s: float) -> None:
        """Wait until `advance` has moved the clock past now + `delay_s`."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + delay_s, next(self._order), future))
        await future

    def call_later(self, delay_s: float, ring: Callable[[], object]) -> Callable[[], object]:
        """Call `ring` when `advance` or `skip` has moved the clock past now + `delay_s`."""
        if delay_s <= 0:
            return asyncio.get_running_loop().call_soon(ring).cancel
        timer = _Timer(ring)
        heapq.heappush(self._sleepers, (self._now + delay_s, next(self._order), timer))
        return timer.cancel

    def skip(self, limit_s: float = math.inf) -> bool:
        """Move on to the next sleeper's instant, at most by `limit_s`, and wake one that is due; False when nobody sleeps.

        For an event loop that calls it whenever nothing else is left to do: then no time is real. See `advance` for the rest.
        """
        while self._sleepers and self._sleepers[0][2].done():  # cancelled meanwhile
            heapq.heappop(self._sleepers)
        if not self._sleepers:
            self._now += limit_s if math.isfinite(limit_s) else 0.0
            return False
        until = self._now + limit_s
        if self._sleepers[0][0] > until:
            self._now = until
            return True
        when, _, future = heapq.heappop(self._sleepers)
        self._now = max(self._now, when)
        future.set_result(None)
        return True

    async def advance(self, delta_s: float) -> None:
        """Move time on by `delta_s`, waking sleepers at their own instants and letting each run before the next."""
        await settle()  # tasks that are ready to sleep do so now, not at the new instant
        target = self._now + delta_s
        while self._sleepers and self._sleepers[0][0] <= target:
            when, _, future = heapq.heappop(self._sleepers)
            self._now = max(self._now, when)
            if not future.done():
                future.set_result(None)
            await settle()
        self._now = target
        await settle()


async def settle(rounds: int = 20) -> None:
    """Let every task that is ready run: as many turns of the event loop as `rounds`."""
    for _ in range(rounds):
        await asyncio.sleep(0)
