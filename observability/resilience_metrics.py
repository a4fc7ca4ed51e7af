"""Metric names of a router's breakers, retry budget and connections, once. A worker that has gone leaves no series behind.

Does not know workers or requests: callers pass numbers and short label values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

BreakerSample = tuple[str, str, int]  # worker id, pool, state: 0 closed, 1 half open, 2 open


class ResilienceMetrics:
    """What keeps a broken pool from breaking more, counted into a router's `registry`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        breakers: Callable[[], Sequence[BreakerSample]],
        retries_refused: Callable[[], int],
    ) -> None:
        """`breakers` and `retries_refused` (so far) are asked at each scrape."""
        self._openings = Counter(
            "diptych_worker_breaker_openings",
            "Breakers that opened because a worker failed requests, or that another router warned of",
            ("pool", "cause"),
            registry=registry,
        )
        self._restarts = Counter(
            "diptych_router_task_restarts",
            "Tasks of this router that died and were started again",
            ("task",),
            registry=registry,
        )
        self._refused = Counter(
            "diptych_refused_calls",
            "Calls of other processes that did not prove that they are of this cluster",
            ("method",),
            registry=registry,
        )
        registry.register(_Live(breakers, retries_refused))

    def breaker_opened(self, pool: str, cause: str) -> None:
        """A breaker of this pool is not closed any more: `failures` here, or `warned` by another router."""
        self._openings.labels(pool, cause).inc()

    def task_restarted(self, name: str) -> None:
        """A task of the router died and was started again."""
        self._restarts.labels(name).inc()

    def call_refused(self, method: str) -> None:
        """One call was refused before a service saw it."""
        self._refused.labels(method).inc()


class _Live(Collector):
    def __init__(self, breakers: Callable[[], Sequence[BreakerSample]], retries_refused: Callable[[], int]) -> None:
        self._breakers = breakers
        self._retries_refused = retries_refused

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        family = GaugeMetricFamily(
            "diptych_worker_breaker_state",
            "0 closed, 1 half open (one request at a time), 2 open (none while there is another worker)",
            labels=("worker_id", "pool"),
        )
        for worker_id, pool, state in self._breakers():
            family.add_metric((worker_id, pool), state)
        yield family
        yield CounterMetricFamily(
            "diptych_retries_refused", "Retries that were over the router's budget", value=self._retries_refused()
        )
