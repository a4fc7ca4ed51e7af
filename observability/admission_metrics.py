"""What a router lets in and what it sends away, by name; the other names of a router are in `observability.metrics`.

Does not know queues or limits: callers pass numbers and short label values, never names of callers.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

SHED_REASONS = ("full", "full_tokens", "pushed_out", "wait", "deadline")


class AdmissionSeries:
    """The series of admission and of rate limits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._shed = Counter(
            "diptych_shed_requests", "Requests refused because of the queue, by why", ("reason",), registry=registry
        )
        self._limited = Counter(
            "diptych_rate_limited_requests",
            "Requests over their caller's limit, by what was short",
            ("kind",),
            registry=registry,
        )
        self._local = Counter(
            "diptych_local_rate_limits",
            "Times that a limit was this router's own because Redis was away",
            registry=registry,
        )
        for reason in SHED_REASONS:
            self._shed.labels(reason)

    def watch_queue(self, tokens: Callable[[], float], wait_s: Callable[[], float]) -> None:
        """Ask at each scrape for how many tokens wait, and how long the queue needs to empty."""
        Gauge(
            "diptych_queue_tokens", "About how many tokens the waiting requests take", registry=self._registry
        ).set_function(tokens)
        Gauge(
            "diptych_queue_wait_seconds", "About how long the queue needs to empty", registry=self._registry
        ).set_function(wait_s)

    def watch_places(self, places: Callable[[], float]) -> None:
        """Ask at each scrape how many answers may be made at once."""
        Gauge(
            "diptych_admission_places", "Answers that may be made at once; more wait", registry=self._registry
        ).set_function(places)

    def shed(self, reason: str) -> None:
        """A request was refused because of the queue."""
        self._shed.labels(reason).inc()

    def limited(self, kind: str) -> None:
        """A request was refused by its caller's limit."""
        self._limited.labels(kind).inc()

    def local_limits(self) -> None:
        """A limit that is shared was applied by this router alone."""
        self._local.inc()
