"""When requests come: as vLLM's `bench serve` has it, gaps of a gamma distribution with the mean 1/rate.

    burstiness 1      Poisson: gaps are exponential
    burstiness < 1    bursts; the gaps' coefficient of variation is 1/sqrt(burstiness)
    burstiness > 1    more even
    burstiness inf    constant

The gaps are scaled so that together they last as long as constant ones, as vLLM does: a hundred gaps at random are else 10 % off
the rate, and a sweep compares what was not asked for. Does not wait; `drive` does.
"""

from __future__ import annotations

import math

import numpy as np

from contracts.errors import ConfigError


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> tuple[float, ...] | None:
    """`count` moments in seconds, rising from 0; None for an infinite rate: nothing is scheduled. Raises ConfigError."""
    if not rate > 0:
        raise ConfigError(f"--request-rate: {rate} must be above 0, or inf")
    if not burstiness > 0:
        raise ConfigError(f"--burstiness: {burstiness} must be above 0, or inf for constant gaps")
    if math.isinf(rate):
        return None
    if math.isinf(burstiness):
        return tuple(index / rate for index in range(count))
    gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1.0 / (rate * burstiness), max(0, count - 1))
    times = np.cumsum(gaps)
    if len(times) and times[-1] > 0:
        times *= len(times) / rate / times[-1]
    return (0.0, *times.tolist())[:count]
