"""Histograms that are counted into at the price of an addition, each shown under one name or several.

    Counts.observe(value) ──▶ one count per bucket, one sum ──scrape──▶ every name that the histogram has

A router counts every token that it passes on, and two dozen numbers of each request. prometheus_client's own Histogram takes a
lock and walks its buckets each time, and some are there under two names: together a fifth of what a token cost. Used from one
thread, as an event loop is; shown in any. Does not know what is counted.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry


@dataclass(frozen=True, slots=True)
class HistogramName:
    """One name under which the counts are shown, with the labels that all its series have."""

    name: str
    documentation: str
    labels: Mapping[str, str]


class Counts:
    """Of one series. `bounds` are the buckets' upper bounds, ascending; above the last there is +Inf."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, among: int = 1) -> None:
        """So many came to `value` together: each counts with its share of that."""
        self._counts[bisect_left(self._bounds, value / among)] += among
        self._sum += value

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """As prometheus_client wants them: by upper bound, how many were not above it."""
        bounds = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        return list(zip(bounds, itertools.accumulate(self._counts), strict=True))

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum


class CountedHistogram(Collector):
    """Owns its series: one for each value of `label`, or, without a label, one."""

    def __init__(
        self, registry: CollectorRegistry, bounds: Sequence[float], names: Sequence[HistogramName], label: str = ""
    ) -> None:
        self._bounds = tuple(bounds)
        self._names = tuple(names)
        self._label = label
        self._series: dict[str, Counts] = {}
        registry.register(self)

    def series(self, value: str = "") -> Counts:
        """Those of one value of the label; shown from when they were first asked for."""
        counts = self._series.get(value)
        if counts is None:
            counts = self._series[value] = Counts(self._bounds)
        return counts

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """prometheus_client's: the counts of now under every name."""
        for shown in self._names:
            own = (self._label,) if self._label else ()
            family = HistogramMetricFamily(shown.name, shown.documentation, labels=(*shown.labels, *own))
            for value, counts in list(
                self._series.items()
            ):  # a series may come while a worker's other thread is scraped
                labels = (*shown.labels.values(), value) if own else tuple(shown.labels.values())
                family.add_metric(labels, counts.buckets, counts.sum)
            yield family
