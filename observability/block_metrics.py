"""How long a worker's blocks of KV live and lie idle, under vLLM's names, of every block; the names are in `observability.names`.

Used from the engine's thread. Does not know blocks: callers pass durations in seconds.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from observability import names
from observability.series import OneEngine

LIFE_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600
)  # fmt: skip


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
