"""How much all requests of this router together may retry: so many of each hundred requests, and a few besides.

    allowed within window_s  =  min_per_s × window_s  +  ratio × requests begun within window_s

One request's patience (`RetryConfig`) says how often it may fail; this says that a broken pool does not get a multiple of
the load that broke it. A retry over the budget is not made: the client gets the error, and when to come back. What moves
because its worker has gone (or drains) is no retry in this sense: the work that it makes has gone with the worker.
As Finagle's RetryBudget, with its defaults. Does not know requests or errors.
"""

from __future__ import annotations

from collections import deque

from contracts.clock import Clock
from router.config import RetryBudgetConfig

_SLICES = 10  # of the window: what is older than it goes in slices, so a count costs no memory per request


class _Count:
    """How many of something there were within the window."""

    def __init__(self, window_s: float, clock: Clock) -> None:
        self._slice_s = window_s / _SLICES
        self._clock = clock
        self._slices: deque[list[int]] = deque()  # [number of the slice, count]
        self._total = 0

    def add(self) -> None:
        number = self._number()
        self._forget(number)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0])
        self._slices[-1][1] += 1
        self._total += 1

    def total(self) -> int:
        self._forget(self._number())
        return self._total

    def until_less_s(self) -> float:
        """When the oldest slice goes; 0 when there is none."""
        self._forget(self._number())
        if not self._slices:
            return 0.0
        return max(0.0, (self._slices[0][0] + _SLICES) * self._slice_s - self._clock.now())

    def _number(self) -> int:
        return int(self._clock.now() / self._slice_s)

    def _forget(self, number: int) -> None:
        while self._slices and self._slices[0][0] <= number - _SLICES:
            self._total -= self._slices.popleft()[1]


class RetryBudget:
    """One per router. Used on the event loop. `num_refused` grows for ever."""

    def __init__(self, config: RetryBudgetConfig, clock: Clock) -> None:
        self._config = config
        self._requests = _Count(config.window_s, clock)
        self._retries = _Count(config.window_s, clock)
        self.num_refused = 0

    def asked(self) -> None:
        """A request begins."""
        self._requests.add()

    def spend(self) -> bool:
        """Take one retry; False when there is none left."""
        config = self._config
        allowed = config.min_per_s * config.window_s + config.ratio * self._requests.total()
        if self._retries.total() + 1 > allowed:
            self.num_refused += 1
            return False
        self._retries.add()
        return True

    def retry_after_s(self) -> float:
        """When some of it comes back, if no more requests came: at least a second."""
        return max(1.0, self._retries.until_less_s())
