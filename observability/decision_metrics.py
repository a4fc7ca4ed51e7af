"""The series of the router's choice between one pool and two; the names are in `observability.names`.

Does not know how it chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from observability import names
from observability.series import counter, histogram

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
        self._decisions = counter(registry, names.DECISIONS)
        self._regret = histogram(registry, names.REGRET, REGRET_BUCKETS)
        self._error = histogram(registry, names.PREDICTION_ERROR, REGRET_BUCKETS)
        self._predicted = counter(registry, names.PREDICTED)
        self._measured = counter(registry, names.MEASURED)
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
