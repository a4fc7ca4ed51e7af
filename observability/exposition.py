"""A process's metrics as text, made on its event loop without holding it up, however many ask.

    scrape, scrape, … ──▶ one text for all that have come ──▶ family by family, the loop goes on between them

All values are of one moment, which is after each of its scrapes came. Making texts takes at most `SHARE` of the loop's time, but
for a start of `MOST_S`: who asks more often waits. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

SHARE = 0.2
MOST_S = 2.0


class Allowance:
    """How much of the time may go into texts: `SHARE`, saved up to `MOST_S`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._saved_s, self._counted_at = MOST_S, now()

    def pause_s(self) -> float:
        """How long to wait before the next."""
        now = self._now()
        self._saved_s = min(MOST_S, self._saved_s + (now - self._counted_at) * SHARE)
        self._counted_at = now
        return max(0.0, -self._saved_s / SHARE)

    def spend(self, cost_s: float) -> None:
        """One was made."""
        self._saved_s -= cost_s


class Exposition:
    """Of one registry. Used on one event loop."""

    def __init__(
        self, registry: CollectorRegistry, now: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        """`now` in seconds of the clock that `sleep` waits by."""
        self._registry = registry
        self._now, self._sleep = now, sleep
        self._allowance = Allowance(now)
        self._turn = asyncio.Lock()
        self._num_asked = self._num_served = 0
        self._text = b""

    async def text(self) -> bytes:
        """The text exposition of a moment between now and the return."""
        self._num_asked += 1
        number = self._num_asked
        async with self._turn:
            if number <= self._num_served:  # by the one that waited before it
                return self._text
            await self._sleep(self._allowance.pause_s())
            self._num_served = self._num_asked
            self._text = await self._made()
            return self._text

    async def _made(self) -> bytes:
        begun = self._now()
        families = list(self._registry.collect())
        self._allowance.spend(self._now() - begun)
        parts = []
        for family in families:
            begun = self._now()
            parts.append(generate_latest(_Just(family)))
            self._allowance.spend(self._now() - begun)
            await asyncio.sleep(0)
        return b"".join(parts)


class _Just(Collector):
    """One family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)
