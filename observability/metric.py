"""What a metric is: its name as a query says it, its kind, which processes have it, its labels. Does not know which there are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from observability.labels import Label


class Kind(StrEnum):
    """As Prometheus says it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class At(StrEnum):
    """Which processes have a metric."""

    ROUTER = "router"
    WORKERS = "workers"  # of both pools
    PREFILL = "prefill"
    DECODE = "decode"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Metric:
    """One of them. A counter's name ends with _total, a histogram's has no ending."""

    name: str
    kind: Kind
    at: At
    what: str
    bounds: tuple[Label, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(label.name for label in self.bounds)
