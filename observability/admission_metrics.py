"""What a router lets in and what it sends away; the names are in `observability.names`.

Does not know queues or limits: callers pass numbers and short label values, never names of callers.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from observability import names
from observability.series import counter, gauge


class AdmissionSeries:
    """The series of admission and of rate limits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._shed = counter(registry, names.SHED_REQUESTS)
        self._limited = counter(registry, names.RATE_LIMITED)
        self._local = counter(registry, names.LOCAL_LIMITS)

    def watch_queue(self, tokens: Callable[[], float], wait_s: Callable[[], float]) -> None:
        """Ask at each scrape for how many tokens wait, and how long the queue needs to empty."""
        gauge(self._registry, names.QUEUE_TOKENS).set_function(tokens)
        gauge(self._registry, names.QUEUE_WAIT).set_function(wait_s)

    def watch_places(self, places: Callable[[], float]) -> None:
        """Ask at each scrape how many answers may be made at once."""
        gauge(self._registry, names.ADMISSION_PLACES).set_function(places)

    def shed(self, reason: str) -> None:
        """A request was refused because of the queue."""
        self._shed.labels(reason).inc()

    def limited(self, kind: str) -> None:
        """A request was refused by its caller's limit."""
        self._limited.labels(kind).inc()

    def local_limits(self) -> None:
        """A limit that is shared was applied by this router alone."""
        self._local.inc()
