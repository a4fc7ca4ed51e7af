"""Metric names of a router's registry, once. Does not know Redis: callers pass what to ask at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class RegistryMetrics(Collector):
    """Whether the registry is there, and what of it could not be used; asked at each scrape."""

    def __init__(self, registry: CollectorRegistry, there: Callable[[], bool], refused: Callable[[], int]) -> None:
        self._there = there
        self._refused = refused
        registry.register(self)

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """See prometheus_client."""
        yield GaugeMetricFamily(
            "diptych_registry_up",
            "1 while workers can be heard; 0 while the registry is away and the last known workers are used",
            value=float(self._there()),
        )
        yield CounterMetricFamily(
            "diptych_registry_refused_words",
            "Words of workers in a shared registry that are damaged or do not fit",
            value=self._refused(),
        )
