"""What is promised to users, and whether a request kept it. Does not know where the promise is written down."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contracts.errors import ConfigError
from observability.samples import RequestSample


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Upper limits in seconds, None for no limit: time to the first token, mean time between tokens, the whole request."""

    ttft_s: float | None = 1.0
    itl_s: float | None = 0.1
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a limit that nothing can keep or that says nothing."""
        for name, value in (("ttft", self.ttft_s), ("itl", self.itl_s), ("e2e", self.e2e_s)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"slo.{name}: got {value * 1e3:g} ms, must be above 0 and finite")

    def kept(self, sample: RequestSample) -> bool:
        """Whether this request succeeded within all limits: what goodput counts."""
        if not sample.succeeded or sample.ttft_s is None:
            return False
        gap_s = mean_gap_s(sample)
        return (
            _within(sample.ttft_s, self.ttft_s)
            and _within(sample.e2e_s, self.e2e_s)
            and (gap_s is None or _within(gap_s, self.itl_s))
        )


def mean_gap_s(sample: RequestSample) -> float | None:
    """(E2E - TTFT) / (tokens - 1) in seconds, of its longest answer; None where there is no gap."""
    if sample.ttft_s is None or sample.num_longest_tokens < 2:
        return None
    return (sample.e2e_s - sample.ttft_s) / (sample.num_longest_tokens - 1)


def _within(value: float, limit: float | None) -> bool:
    return limit is None or value <= limit
