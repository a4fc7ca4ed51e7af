"""The series of the router's choice between one pool and two. Does not know how it chooses.

diptych_disagg_decisions_total{path,reason}            which way, and why
diptych_disagg_regret_seconds                          by how much the way not taken would have been better, as predicted
diptych_disagg_prediction_error_seconds{path}          |measured - predicted| of the way that was taken
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

REGRET_BUCKETS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class DecisionMetrics:
    """Counts in the `registry` that it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "diptych_disagg_decisions", "Attempts by their way and why", ("path", "reason"), registry=registry
        )
        self._regret = Histogram(
            "diptych_disagg_regret_seconds",
            "Measured cost of the way taken above the predicted cost of the other, at least 0",
            registry=registry,
            buckets=REGRET_BUCKETS,
        )
        self._error = Histogram(
            "diptych_disagg_prediction_error_seconds",
            "Distance between the measured and the predicted cost of the way taken",
            ("path",),
            registry=registry,
            buckets=REGRET_BUCKETS,
        )

    def decided(self, path: str, reason: str) -> None:
        """One attempt goes this way."""
        self._decisions.labels(path, reason).inc()

    def measured(self, path: str, error_s: float | None, regret_s: float | None) -> None:
        """What a way did cost is known; None for what was not predicted."""
        if error_s is not None:
            self._error.labels(path).observe(error_s)
        if regret_s is not None:
            self._regret.observe(regret_s)
