"""What is promised to users, as an operator sets it. Whether a request kept it: `observability.slo`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contracts.errors import ConfigError
from observability.slo import Limits


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

    @property
    def limits(self) -> Limits:
        """What requests are judged by."""
        return Limits(self.ttft_s, self.itl_s, self.e2e_s)
