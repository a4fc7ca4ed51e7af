"""The series of who is let in. Does not know keys or certificates.

diptych_api_key_refusals_total{door}        requests without a key that is known, over http and grpc
diptych_tls_certificate_expires_seconds     when the certificate that users are shown expires, Unix time; 0 without TLS
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

DOORS = ("http", "grpc")


class DoorMetrics:
    """Counts in the `registry` that it is given; asks `expires_at` at each scrape."""

    def __init__(self, registry: CollectorRegistry, expires_at: Callable[[], float]) -> None:
        self._refusals = Counter(
            "diptych_api_key_refusals", "Requests without an API key that is known", ("door",), registry=registry
        )
        for door in DOORS:
            self._refusals.labels(door)
        expires = Gauge(
            "diptych_tls_certificate_expires_seconds",
            "When the certificate that users are shown expires, Unix time; 0 without TLS",
            registry=registry,
        )
        expires.set_function(expires_at)

    def refused(self, door: str) -> None:
        """Somebody had no key that is known."""
        self._refusals.labels(door).inc()
