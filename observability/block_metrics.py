"""How long a worker's blocks of KV live and lie idle, under vLLM's names, of every block; the names are in `observability.names`.

Used from the engine's thread. Does not know blocks: callers pass durations in seconds.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from observability import names
from observability.buckets import LIFE_BUCKETS
from observability.series import OneEngine


class BlockMetrics:
    """Counts into a worker's registry. Nothing is counted while there is room for all: then nothing is evicted."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        made = OneEngine(registry, labels)
        self._life = made.histogram(names.V_BLOCK_LIFE, LIFE_BUCKETS)
        self._idle = made.histogram(names.V_BLOCK_IDLE, LIFE_BUCKETS)
        self._gap = made.histogram(names.V_BLOCK_REUSE, LIFE_BUCKETS)

    def reused(self, gap_s: float) -> None:
        """A request found a block in the prefix cache that was used last so long ago."""
        self._gap.observe(gap_s)

    def evicted(self, life_s: float, idle_s: float) -> None:
        """A cached block was given out for other content: taken, and used last, so long ago."""
        self._life.observe(life_s)
        self._idle.observe(idle_s)
