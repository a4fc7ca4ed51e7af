"""What of a promise to users a request missed: the one definition of goodput, for metrics, alerts and dashboard alike.

A request that was not answered misses `errors` and nothing else. One that is excused (its client left, or was refused for what it
asked or had used up) says nothing of how well users are served: callers leave it out. Does not know where the promise is written
down.
"""

from __future__ import annotations

from dataclasses import dataclass

from observability.samples import RequestSample

LIMITS = ("ttft", "itl", "e2e")
ERRORS = "errors"


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits in seconds, None for no limit: time to the first token, mean time between tokens, the whole request."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def there(self) -> dict[str, float]:
        """Those that are set, in seconds, by name."""
        all_of_them = zip(LIMITS, (self.ttft_s, self.itl_s, self.e2e_s), strict=True)
        return {name: limit_s for name, limit_s in all_of_them if limit_s is not None}

    def missed(self, sample: RequestSample) -> tuple[str, ...]:
        """Which of LIMITS it was over, or ERRORS; nothing: it is one that goodput counts."""
        if not sample.succeeded or sample.ttft_s is None:
            return (ERRORS,)
        took = zip(LIMITS, (sample.ttft_s, sample.mean_gap_s, sample.e2e_s), strict=True)
        limits = self.there()
        return tuple(name for name, value in took if value is not None and value > limits.get(name, value))
