"""How many requests kept what is promised to users, in numbers; what that means is in `observability.slo`.

The share is that of the last requests, so that a dashboard without rates sees it too; all else are counters: the rate of the good
is goodput, that of the missed over that of the judged is what alerts go by.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from prometheus_client import CollectorRegistry

from observability import names
from observability.samples import RequestSample
from observability.series import counter, gauge
from observability.slo import ERRORS, LIMITS, Limits

LAST = 1000  # requests
_ALL = "all"


class SloMetrics:
    """Counts in the `registry` that it is given. A limit that is not set has no limit's series and is never missed."""

    def __init__(self, registry: CollectorRegistry, limits: Limits) -> None:
        self._limits = limits
        limit = gauge(registry, names.SLO_LIMIT)
        for name, limit_s in limits.there().items():
            limit.labels(name).set(limit_s)
        self._good = counter(registry, names.GOODPUT)
        self._judged = counter(registry, names.SLO_JUDGED)
        missed = counter(registry, names.SLO_MISSED)
        self._missed = {name: missed.labels(name) for name in (*limits.there(), ERRORS)}
        self._last = {name: _Share() for name in (*LIMITS, ERRORS, _ALL)}
        attainment = gauge(registry, names.SLO_ATTAINMENT)
        for name, share in self._last.items():
            attainment.labels(name).set_function(partial(share.now))

    def observe(self, sample: RequestSample) -> None:
        """One request is over."""
        if sample.excused:
            return
        missed = self._limits.missed(sample)
        self._judged.inc()
        for name in missed:
            self._missed[name].inc()
        for name, share in self._last.items():
            share.add(name not in missed if name != _ALL else not missed)
        if not missed:
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
