"""How long blocks live and lie idle: when a block is used again, and when a cached one makes room for other content.

    taken ──▶ used again (a prefix hit): the gap since it was used last ──▶ … ──▶ evicted: its life, and since when nobody used it

The three measures are those of vLLM's `--kv-cache-metrics`, of every block instead of some: to be used is to be taken or found
by a request, so a block that one long answer holds counts as idle. Only the pool's cached blocks are evicted; one that is free
when it is let go ends no life. Durations are seconds of the clock. Does not know names, leases or what listeners make of it. Used
in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class LifeListener(Protocol):
    """Who hears of it."""

    def reused(self, gap_s: float) -> object:
        """A request found a block in the prefix cache that was used last so long ago."""
        ...

    def evicted(self, life_s: float, idle_s: float) -> object:
        """A cached block was given out for other content: taken, and used last, so long ago."""
        ...


class BlockLives:
    """Of the `num_blocks` blocks of one pool, which tells it."""

    def __init__(self, num_blocks: int, now: Callable[[], float], listener: LifeListener) -> None:
        self._taken_s = [now()] * num_blocks
        self._used_s = self._taken_s.copy()
        self._now = now
        self._listener = listener

    def taken(self, block_ids: Sequence[int]) -> None:
        """These hold something new from now on."""
        now_s = self._now()
        for block_id in block_ids:
            self._taken_s[block_id] = self._used_s[block_id] = now_s

    def used(self, block_ids: Sequence[int]) -> None:
        """A request found what these hold."""
        now_s = self._now()
        for block_id in block_ids:
            self._listener.reused(now_s - self._used_s[block_id])
            self._used_s[block_id] = now_s

    def evicted(self, block_id: int) -> None:
        """What it held is gone."""
        now_s = self._now()
        self._listener.evicted(now_s - self._taken_s[block_id], now_s - self._used_s[block_id])
