"""How long a step takes on this machine, by its size, so that a long legal step is told from one that does not end.

    begin(tokens) ──▶ the step runs: expected_s says what it should take at most ──▶ end(seconds): one more is known

Sizes are powers of two. A step should take no longer than the slowest one so far up to the nearest size that is no smaller;
one larger than all before, as the largest of them would have taken per token. So a decode step is not given the time of a
prompt's chunk, and the first big chunk on a slow machine is not held against what decode steps take. Warm-up makes the
first entries, before anybody is served. Written in one thread, read in any. Does not know what the limit is.
"""

from __future__ import annotations

_SIZES = 33  # bit lengths of token counts


class Pace:
    """The slowest step so far of each size, and the size of the one that runs now."""

    def __init__(self) -> None:
        self._slowest_s = [0.0] * _SIZES
        self._size = 0  # of the last step that began: it stays known until the next, so that a reader sees no gap

    def begin(self, num_tokens: int) -> None:
        """A step with this many scheduled tokens begins."""
        self._size = num_tokens.bit_length()

    def end(self, step_s: float) -> None:
        """The step that began has ended, after `step_s`."""
        if self._size:  # a step may have had nothing to compute
            self._slowest_s[self._size] = max(self._slowest_s[self._size], step_s)

    def expected_s(self) -> float:
        """The longest that the step which began last should take, in seconds; 0 when nothing is known or it computes nothing."""
        size, slowest_s = self._size, self._slowest_s
        if size == 0:
            return 0.0
        for known in range(size, _SIZES):
            if slowest_s[known]:
                return max(slowest_s[: known + 1])
        for known in range(size - 1, 0, -1):
            if slowest_s[known]:
                return float(slowest_s[known] * 2 ** (size - known))
        return 0.0
