"""The series of who is let in; the names are in `observability.names`. Does not know keys or certificates."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from observability import names
from observability.series import counter, gauge


class DoorMetrics:
    """Counts in the `registry` that it is given; asks `expires_at` at each scrape."""

    def __init__(self, registry: CollectorRegistry, expires_at: Callable[[], float]) -> None:
        self._refusals = counter(registry, names.KEY_REFUSALS)
        gauge(registry, names.CERTIFICATE_EXPIRES).set_function(expires_at)

    def refused(self, door: str) -> None:
        """Somebody had no key that is known."""
        self._refusals.labels(door).inc()
