"""What is left of a caller's rate limits, in the words that OpenAI's clients know.

    x-ratelimit-limit-requests: 60      x-ratelimit-remaining-requests: 59      x-ratelimit-reset-requests: 1s

and the same of tokens; only for limits that there are. HTTP sends them as headers, gRPC as metadata. Does not know buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.admission.limits import Standing


@dataclass(frozen=True, slots=True)
class Quota:
    """How a caller's limits stand after its request was counted."""

    standings: tuple[Standing, ...]

    def words(self) -> Mapping[str, str]:
        """Names and values, lower case."""
        words = {}
        for standing in self.standings:
            kind = standing.kind.value
            words[f"x-ratelimit-limit-{kind}"] = str(standing.limit)
            words[f"x-ratelimit-remaining-{kind}"] = str(standing.remaining)
            words[f"x-ratelimit-reset-{kind}"] = duration(standing.reset_s)
        return words


def duration(seconds: float) -> str:
    """A time as OpenAI writes it: 6m0s, 1.5s, 20ms."""
    milliseconds = round(seconds * 1e3)
    minutes, rest = divmod(milliseconds, 60_000)
    if minutes:
        return f"{minutes}m{rest / 1000:g}s"
    return f"{rest}ms" if rest < 1000 else f"{rest / 1000:g}s"
