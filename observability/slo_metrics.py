"""How many requests kept what is promised to users. Does not know where the promise is written down.

A request that failed kept nothing; one that its client left says nothing, and is not counted. The share is that of the last
requests, so that a dashboard without rates sees it too; goodput is a counter, and its rate is what the word means.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from observability import names
from observability.samples import RequestSample
from observability.series import counter, gauge

LAST = 1000  # requests
_LEFT = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits in seconds, None for no limit: time to the first token, mean time between tokens, the whole request."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None


class SloMetrics:
    """Counts in the `registry` that it is given, for limits that are set."""

    def __init__(self, registry: CollectorRegistry, limits: Limits) -> None:
        self._limits = limits
        self._good = counter(registry, names.GOODPUT)
        self._last = {name: _Share() for name in ("ttft", "itl", "e2e", "all")}
        attainment = gauge(registry, names.SLO_ATTAINMENT)
        for name, share in self._last.items():
            attainment.labels(name).set_function(partial(share.now))

    def observe(self, sample: RequestSample) -> None:
        """One request is over."""
        if sample.outcome == _LEFT:
            return
        limits, kept = self._limits, sample.succeeded and sample.ttft_s is not None
        mean_gap_s = None
        if sample.ttft_s is not None and sample.num_longest_tokens > 1:
            mean_gap_s = (sample.e2e_s - sample.ttft_s) / (sample.num_longest_tokens - 1)
        ttft, itl = kept and _within(sample.ttft_s, limits.ttft_s), kept and _within(mean_gap_s, limits.itl_s)
        e2e = kept and _within(sample.e2e_s, limits.e2e_s)
        good = ttft and itl and e2e
        for name, one in (("ttft", ttft), ("itl", itl), ("e2e", e2e), ("all", good)):
            self._last[name].add(one)
        if good:
            self._good.inc()


class _Share:
    """Of the last requests, those that kept something."""

    def __init__(self) -> None:
        self._kept: deque[bool] = deque(maxlen=LAST)
        self._num_kept = 0

    def add(self, kept: bool) -> None:
        if len(self._kept) == LAST:
            self._num_kept -= self._kept[0]
        self._kept.append(kept)
        self._num_kept += kept

    def now(self) -> float:
        return self._num_kept / len(self._kept) if self._kept else 1.0


def _within(value: float | None, limit: float | None) -> bool:
    return limit is None or value is None or value <= limit
