"""An event loop on a VirtualClock: whenever nothing is left to do, time jumps to the next sleeper or timer.

    ready callbacks ──▶ run them ──▶ none left: the clock skips ──▶ …          nobody sleeps, no timer: Deadlock

Everything in it, also asyncio's own timeouts, happens on that clock, so nothing depends on the machine's speed.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import TypeVar

from contracts.clock import VirtualClock

T = TypeVar("T")


class Deadlock(AssertionError):
    """All wait for each other: nothing will ever happen again."""


class _SkippingSelector(selectors.DefaultSelector):
    """asyncio asks it to wait; it lets the clock skip instead. The loop's own socket is looked at, never waited for."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is not None:
            self._clock.skip(timeout)
        elif not self._clock.skip():
            raise Deadlock("nobody sleeps and nothing is left to do")
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module. `faults` are what was reported to the loop because nobody else would hear of it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_SkippingSelector(clock))
        self._virtual_clock = clock
        self.faults: list[dict[str, object]] = []
        self.set_exception_handler(lambda loop, context: self.faults.append(context))

    def time(self) -> float:
        """The clock's instant: loop.call_later, asyncio.timeout and asyncio.sleep follow it."""
        return self._virtual_clock.now()


def run(main: Callable[[VirtualClock], Coroutine[None, None, T]]) -> T:
    """The result of `main` in a loop of its own. AssertionError when anything failed that nobody heard of."""
    clock = VirtualClock()
    loop = VirtualTimeLoop(clock)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main(clock))
    assert not loop.faults, loop.faults
    return result
