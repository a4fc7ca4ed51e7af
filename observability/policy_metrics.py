"""Metrics of how a router chooses workers, and of what it knows of their prefix caches. Names are in `observability.names`.

Does not know policies or the index: callers pass numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from observability import names
from observability.labels import POOLS
from observability.series import counter, gauge


@dataclass(frozen=True, slots=True)
class _Lookups:
    lookups: Counter
    looked_up: Counter
    hits: Counter
    found: Counter


class PolicyMetrics:
    """Series in `registry`, with the label `pool`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._faults = counter(registry, names.POLICY_FAULTS)
        self._lookups = counter(registry, names.INDEX_LOOKUPS)
        self._hits = counter(registry, names.INDEX_HITS)
        self._looked_up = counter(registry, names.INDEX_LOOKUP_TOKENS)
        self._found = counter(registry, names.INDEX_HIT_TOKENS)
        self._blocks = gauge(registry, names.INDEX_BLOCKS)
        self._followed = gauge(registry, names.INDEX_WORKERS)
        # By pool: each is counted for every request.
        self._counts = {
            pool: _Lookups(
                *(series.labels(pool) for series in (self._lookups, self._looked_up, self._hits, self._found))
            )
            for pool in POOLS
        }

    def watch(self, num_blocks: Callable[[str], int], num_followed: Callable[[str], int]) -> None:
        """Ask, for each pool, at each scrape."""
        for pool in POOLS:
            self._blocks.labels(pool).set_function(partial(num_blocks, pool))
            self._followed.labels(pool).set_function(partial(num_followed, pool))

    def chosen_by(self, pool: str, policy: str) -> None:
        """This policy chooses for this pool; it has not failed yet."""
        self._faults.labels(pool, policy)

    def fault(self, pool: str, policy: str) -> None:
        """A policy failed for one request."""
        self._faults.labels(pool, policy).inc()

    def sent(self, pool: str, num_tokens: int, num_cached_tokens: int) -> None:
        """A request went to a worker of `pool`, which is known to have so many tokens of its prompt."""
        counts = self._counts[pool]
        counts.lookups.inc()
        counts.looked_up.inc(num_tokens)
        if num_cached_tokens:
            counts.hits.inc()
            counts.found.inc(num_cached_tokens)
