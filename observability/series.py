"""prometheus_client's metrics made from `observability.names`, so that a name, its words and its labels are written down once.

Does not know what is counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from observability.histograms import CountedHistogram, Counts, HistogramName
from observability.metric import Metric

disable_created_metrics()  # type: ignore[no-untyped-call]  # when each series began: read by nobody, and half of what a scrape carries


def counter(registry: CollectorRegistry, metric: Metric) -> Counter:
    """Counts up. Has all its series at once where all its labels are `whole`."""
    made = Counter(metric.name, metric.what, metric.labels, registry=registry)
    if metric.bounds and all(label.whole for label in metric.bounds):
        for values in itertools.product(*(label.values for label in metric.bounds)):
            made.labels(*values)
    return made


def gauge(registry: CollectorRegistry, metric: Metric) -> Gauge:
    """Goes up and down."""
    return Gauge(metric.name, metric.what, metric.labels, registry=registry)


def histogram(registry: CollectorRegistry, metric: Metric, buckets: Sequence[float]) -> Histogram:
    """May be observed from any thread."""
    return Histogram(metric.name, metric.what, metric.labels, registry=registry, buckets=buckets)


def counted(
    registry: CollectorRegistry, bounds: Sequence[float], metrics: Sequence[Metric], own: Sequence[str]
) -> CountedHistogram:
    """Observed from one thread at the price of an addition, shown under each of these names. `own` are the values of the labels
    that a process has one value of, in their order; at most one label is left, whose series are made as asked for.
    """
    names = []
    left: set[str] = set()
    for metric in metrics:
        fixed = {
            label: value for label, value in zip(("model_name", "engine"), own, strict=False) if label in metric.labels
        }
        left |= set(metric.labels) - set(fixed)
        names.append(HistogramName(metric.name, metric.what, fixed))
    if len(left) > 1:
        raise ValueError(f"{[metric.name for metric in metrics]}: one label may vary, not {sorted(left)}")
    return CountedHistogram(registry, bounds, names, "".join(left))


@dataclass(frozen=True, slots=True)
class OneEngine:
    """Makes the vllm:* series of a process, which has one value of each of their labels: `labels` are (model_name, engine)."""

    registry: CollectorRegistry
    labels: tuple[str, str]

    def counter(self, metric: Metric) -> Counter:
        """Counts up."""
        return counter(self.registry, metric).labels(*self.labels)

    def histogram(self, metric: Metric, bounds: Sequence[float]) -> Counts:
        """As `counted`."""
        return counted(self.registry, bounds, (metric,), self.labels).series()


def gauge_family(metric: Metric) -> GaugeMetricFamily:
    """For collectors that ask at each scrape."""
    return GaugeMetricFamily(metric.name, metric.what, labels=metric.labels)


def counter_family(metric: Metric) -> CounterMetricFamily:
    """The same of what was counted elsewhere."""
    return CounterMetricFamily(metric.name, metric.what, labels=metric.labels)
