"""Metrics of how a router chooses workers, and of what it knows of their prefix caches. Names as in `observability.metrics`.

Does not know policies or the index: callers pass numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

POOLS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class _Lookups:
    lookups: Counter
    looked_up: Counter
    hits: Counter
    found: Counter


class PolicyMetrics:
    """Series in `registry`, with the label `pool`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._faults = Counter(
            "diptych_policy_faults",
            "Requests for which a policy failed, so that the least loaded worker was taken",
            ("pool", "policy"),
            registry=registry,
        )
        self._lookups = Counter(
            "diptych_prefix_index_lookups", "Requests sent whose prompt was looked up", ("pool",), registry=registry
        )
        self._hits = Counter(
            "diptych_prefix_index_hits",
            "Of these, those sent where some of the prompt was known to be cached",
            ("pool",),
            registry=registry,
        )
        self._looked_up = Counter(
            "diptych_prefix_index_lookup_tokens", "Prompt tokens that were looked up", ("pool",), registry=registry
        )
        self._found = Counter(
            "diptych_prefix_index_hit_tokens",
            "Of these, those known to be cached at the worker that the request was sent to",
            ("pool",),
            registry=registry,
        )
        self._blocks = Gauge(
            "diptych_prefix_index_blocks", "Blocks that the workers have told of", ("pool",), registry=registry
        )
        self._followed = Gauge(
            "diptych_prefix_index_workers", "Workers whose block events are followed", ("pool",), registry=registry
        )
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
