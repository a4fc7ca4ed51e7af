"""Requests that wait for a worker: one look at what can be chosen for all of them, and no choice tried before that has changed.

    news ──▶ waits ──a look finds another offer, somebody joined, the router halts, its time is over──▶ returns

Nobody is told of everything that makes a worker a candidate again (it is ready, speaks again, its breaker or a pair of it
recovers, the registry is back), so while anybody waits there is a look every LOOK_S; whatever waits, it is one. Does not know
requests, nor what they need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.clock import Clock
from router.halt import Halt

LOOK_S = 0.05


class Waiting:
    """Who waits. Used on the event loop; has a timer only while somebody does."""

    def __init__(self, offer: Callable[[], object], clock: Clock, halt: Halt) -> None:
        """`offer` is what can be chosen, as anything that compares."""
        self._offer = offer
        self._clock = clock
        self._seen: object = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._silence: Callable[[], object] | None = None
        halt.listen(lambda _: self._wake())

    async def news(self, at_most_s: float) -> None:
        """Return when another choice may be possible than just now, or after `at_most_s`; sometimes for nothing."""
        self.look()  # others may have begun to wait for what is gone already
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        silence = self._clock.call_later(at_most_s, lambda: _end(waiter))
        if self._silence is None:
            self._silence = self._clock.call_later(LOOK_S, self._look_again)
        try:
            await waiter
        finally:
            silence()
            self._waiters.discard(waiter)
            if not self._waiters and self._silence is not None:
                self._silence()
                self._silence = None

    def look(self) -> None:
        """Something has changed, it seems."""
        offer = self._offer()
        if offer != self._seen:
            self._seen = offer
            self._wake()

    def _look_again(self) -> None:
        self._silence = self._clock.call_later(LOOK_S, self._look_again)
        self.look()

    def _wake(self) -> None:
        for waiter in self._waiters:
            _end(waiter)


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
