"""Metrics of a router's breakers, retry budget and connections. A worker that has gone leaves no series behind.

The names are in `observability.names`. Does not know workers or requests: callers pass numbers and short label values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from observability import names
from observability.series import counter, counter_family, gauge_family

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
        self._openings = counter(registry, names.BREAKER_OPENINGS)
        self._restarts = counter(registry, names.TASK_RESTARTS)
        self._refused = counter(registry, names.REFUSED_CALLS)
        registry.register(_Live(breakers, retries_refused))

    def breaker_opened(self, pool: str, cause: str) -> None:
        """A breaker of this pool is not closed any more: `failures` here, or `warned` by another router."""
        self._openings.labels(pool, cause).inc()

    def watch_tasks(self, tasks: Iterable[str]) -> None:
        """These run; none has died yet: what has a series before its first time is seen by increase()."""
        for name in tasks:
            self._restarts.labels(name)

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
        family = gauge_family(names.BREAKER_STATE)
        for worker_id, pool, state in self._breakers():
            family.add_metric((worker_id, pool), state)
        yield family
        refused = counter_family(names.RETRIES_REFUSED)
        refused.add_metric((), self._retries_refused())
        yield refused
