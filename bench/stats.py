"""What the bench says about times: medians and spread of repeated runs, and one request's TTFT, ITL and TPOT.

    sent ──TTFT──▶ token 1 ──ITL──▶ token 2 ──ITL──▶ … ──▶ token n          E2E = sent … token n
    TPOT = (E2E - TTFT) / (n - 1), undefined for n = 1

All times in seconds of one monotonic clock. Does not know where the times come from.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, 0 <= q <= 100, linear between neighbours (numpy's default). ValueError when there is none."""
    if not values:
        raise ValueError("percentile of nothing")
    if not 0.0 <= q <= 100.0:
        raise ValueError(f"percentile must be from 0 to 100, got {q}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100.0
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    between = ordered[below] + (ordered[above] - ordered[below]) * (place - below)
    return min(between, ordered[above])  # rounding must not lead beyond a run


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated runs of one measure, in the order in which they were taken; never empty."""

    runs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("a measure needs at least one run")

    @property
    def median(self) -> float:
        """The middle of the runs."""
        return statistics.median(self.runs)

    @property
    def mean(self) -> float:
        """The arithmetic mean of the runs."""
        return statistics.fmean(self.runs)

    @property
    def low(self) -> float:
        """The smallest run."""
        return min(self.runs)

    @property
    def high(self) -> float:
        """The largest run."""
        return max(self.runs)

    def at(self, q: float) -> float:
        """The q-th percentile of the runs."""
        return percentile(self.runs, q)


def spread(runs: Sequence[float], factor: float = 1.0) -> Spread:
    """A Spread of `runs`, each times `factor` (1e3 makes milliseconds of seconds)."""
    return Spread(tuple(run * factor for run in runs))


def ratio(numerator: Spread, denominator: Spread) -> float:
    """Median over median: what a bar is compared with."""
    return numerator.median / denominator.median


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When one request was sent and when its tokens came.

    One entry per event of the stream: `arrivals_s` is when it was read, `num_tokens` how many tokens it brought (0 for an
    event that only says how the answer ended).
    """

    sent_s: float
    arrivals_s: tuple[float, ...]
    num_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.arrivals_s) != len(self.num_tokens):
            raise ValueError(f"{len(self.arrivals_s)} arrivals of {len(self.num_tokens)} events")

    @property
    def token_times_s(self) -> tuple[float, ...]:
        """When each token came; tokens of one event came together."""
        return tuple(t for t, count in zip(self.arrivals_s, self.num_tokens, strict=True) for _ in range(count))

    @property
    def ttft_s(self) -> float:
        """Sent to first token. ValueError when no token came."""
        times = self.token_times_s
        if not times:
            raise ValueError("no token came")
        return times[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Sent to last token. ValueError when no token came."""
        times = self.token_times_s
        if not times:
            raise ValueError("no token came")
        return times[-1] - self.sent_s

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gap before each token but the first."""
        times = self.token_times_s
        return tuple(later - earlier for earlier, later in itertools.pairwise(times))

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (n - 1), None for fewer than two tokens."""
        num_tokens = sum(self.num_tokens)
        return (self.e2e_s - self.ttft_s) / (num_tokens - 1) if num_tokens > 1 else None


def steady_window_s(streams: Sequence[TokenTimes]) -> tuple[float, float]:
    """From when to when every stream was streaming: the last first token, the first last token. May be empty (end first).

    ValueError when a stream has no token.
    """
    times = [stream.token_times_s for stream in streams]
    if not times or not all(times):
        raise ValueError("a stream without tokens has no steady part")
    return max(t[0] for t in times), min(t[-1] for t in times)


def steady_itl_s(streams: Sequence[TokenTimes]) -> float:
    """The mean gap of a token in the steady window of the streams.

    Each stream counts with its own tokens in that window: (its last - its first arrival there) over the gaps between, and
    the streams are averaged. So neither the start, when prompts are still read, nor the end, when streams are missing
    from the batch, is in it. ValueError when the streams never all streamed at once.
    """
    begin, end = steady_window_s(streams)
    means = []
    for stream in streams:
        inside = [t for t in stream.token_times_s if begin <= t <= end]
        if len(inside) < 2:
            raise ValueError("the streams did not run side by side long enough")
        means.append((inside[-1] - inside[0]) / (len(inside) - 1))
    return statistics.fmean(means)
