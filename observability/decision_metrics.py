"""The series of the router's choice between one pool and two. Does not know how it chooses.

diptych_disagg_decisions_total{path,reason}            which way, and why
diptych_disagg_regret_seconds                          by how much the way not taken would have been better, as predicted
diptych_disagg_prediction_error_seconds{path}          |measured - predicted| of the way that was taken
diptych_disagg_predicted_seconds_total{path}           what those ways were predicted to cost, and did cost, summed up: where
diptych_disagg_measured_seconds_total{path}            the two grow apart, predictions are off to one side
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

REGRET_BUCKETS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class _Way:
    """The series of one way."""

    error: Histogram
    predicted: Counter
    measured: Counter


class DecisionMetrics:
    """Counts in the `registry` that it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "diptych_disagg_decisions", "Attempts by their way and why", ("path", "reason"), registry=registry
        )
        self._regret = Histogram(
            "diptych_disagg_regret_seconds",
            "Measured cost of the way taken, what streams were seen to lose to it with it, above the predicted cost of the "
            "other, at least 0",
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
        self._predicted = Counter(
            "diptych_disagg_predicted_seconds",
            "Predicted costs of the ways taken, of those that were measured",
            ("path",),
            registry=registry,
        )
        self._measured = Counter(
            "diptych_disagg_measured_seconds",
            "Measured costs of the ways taken, of those that were predicted",
            ("path",),
            registry=registry,
        )
        self._ways: dict[str, _Way] = {}
        self._choices: dict[tuple[str, str], Counter] = {}

    def decided(self, path: str, reason: str) -> None:
        """One attempt goes this way."""
        choice = self._choices.get((path, reason))
        if choice is None:
            choice = self._choices[path, reason] = self._decisions.labels(path, reason)
        choice.inc()

    def measured(self, path: str, measured_s: float, predicted_s: float | None, regret_s: float | None) -> None:
        """What a way did cost is known; None for what was not predicted."""
        if predicted_s is not None:
            way = self._ways.get(path)
            if way is None:
                series = self._error.labels(path), self._predicted.labels(path), self._measured.labels(path)
                way = self._ways[path] = _Way(*series)
            way.error.observe(abs(measured_s - predicted_s))
            way.predicted.inc(predicted_s)
            way.measured.inc(measured_s)
        if regret_s is not None:
            self._regret.observe(regret_s)
