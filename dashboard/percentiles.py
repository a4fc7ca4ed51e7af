"""Percentiles over the last seconds, renewed each second at a bounded price.

    add ─▶ this second ──close──▶ a thinned, sorted sample ─▶ the last `span` of them ──▶ percentiles

A second with more than `MOST` values keeps every k-th of them, evenly spaced as they came: an event loop must not stand still
to sort what a thousand streams delivered. With fewer, the percentiles are exact. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

MOST = 1024  # values of one second that are kept


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of these ascending ones lie, interpolated linearly. Raises ValueError for none."""
    if not ordered:
        raise ValueError("no values, no percentile")
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def thinned(values: Sequence[float], most: int = MOST) -> list[float]:
    """These, or `most` of them evenly spaced, in their order."""
    if len(values) <= most:
        return list(values)
    step = len(values) / most
    return [values[int(index * step)] for index in range(most)]


class Sliding:
    """The values of the last `span` closed seconds."""

    def __init__(self, span: int) -> None:
        self._seconds: deque[list[float]] = deque(maxlen=span)

    def close(self, values: Sequence[float]) -> None:
        """One second is over; these came in it."""
        self._seconds.append(sorted(thinned(values)))

    def at(self, shares: Iterable[float]) -> tuple[float, ...] | None:
        """The percentiles for these shares; None where nothing came."""
        ordered = sorted(chain.from_iterable(self._seconds))  # runs that are sorted already are merged
        return tuple(percentile(ordered, share) for share in shares) if ordered else None
