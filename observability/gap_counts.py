"""The gaps between tokens, counted for two histograms at the price of an addition.

    observe(gap, tokens) ──▶ one count per bucket, one sum ──scrape──▶ every histogram that is named after them

A router counts every token that it passes on. prometheus_client's own Histogram takes a lock and walks its buckets each time,
and there are two of them under two names: together a fifth of what a token cost. Used from one thread, as an event loop is.
Does not know what a token is.
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
    """One name under which the counts are shown."""

    name: str
    documentation: str
    labels: Mapping[str, str]


class GapCounts(Collector):
    """Owns the counts. `bounds` are the buckets' upper bounds in seconds, ascending; above the last there is +Inf."""

    def __init__(self, registry: CollectorRegistry, bounds: Sequence[float], names: Sequence[HistogramName]) -> None:
        self._bounds = tuple(bounds)
        self._names = tuple(names)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, gap_s: float, num_tokens: int) -> None:
        """So many tokens came together, so long after the last: each counts with its share of that."""
        share_s = gap_s / num_tokens
        self._counts[bisect_left(self._bounds, share_s)] += num_tokens
        self._sum_s += gap_s

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """prometheus_client's: the counts of now under every name."""
        bounds = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        for shown in self._names:
            family = HistogramMetricFamily(shown.name, shown.documentation, labels=tuple(shown.labels))
            family.add_metric(tuple(shown.labels.values()), buckets, self._sum_s)
            yield family
