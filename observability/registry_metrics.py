"""Metrics of a router's registry; the names are in `observability.names`.

Does not know Redis: callers pass what to ask at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from observability import names
from observability.series import counter_family, gauge_family


class RegistryMetrics(Collector):
    """Whether the registry is there, and what of it could not be used; asked at each scrape."""

    def __init__(self, registry: CollectorRegistry, there: Callable[[], bool], refused: Callable[[], int]) -> None:
        self._there = there
        self._refused = refused
        registry.register(self)

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """See prometheus_client."""
        up = gauge_family(names.REGISTRY_UP)
        up.add_metric((), float(self._there()))
        yield up
        refused = counter_family(names.REGISTRY_REFUSED_WORDS)
        refused.add_metric((), self._refused())
        yield refused
