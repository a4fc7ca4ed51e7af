"""Time in which this process could have heard somebody: what it was stopped for, or did not get round to anything, counts little.

    pulse ──at most most_s──▶ pulse ──at most most_s──▶ …

However long a pause is (SIGSTOP, a machine that is paused, a blocked event loop), it counts as `most_s`: nobody is called silent
for it. The words that others said meanwhile lie in this process's sockets when it goes on; they are read before more time than that
has passed here. Does not know whose words.
"""

from __future__ import annotations

from typing import Protocol

from contracts.clock import Clock
from observability.log import get_logger

log = get_logger(__name__)
_PULSES = 5  # within most_s: one that comes late by the machine's being busy loses nothing


class Time(Protocol):
    """Instants that are only compared with each other."""

    def now(self) -> float:
        """Seconds since some fixed point."""
        ...


class AwakeTime:
    """A time that goes with `clock` as long as `run` runs; never more than `most_s` from one pulse to the next."""

    def __init__(self, clock: Clock, most_s: float) -> None:
        self._clock = clock
        self._most_s = most_s
        self._pulse_at = clock.now()
        self._counted_s = 0.0  # until that pulse

    def now(self) -> float:
        """See Time."""
        return self._counted_s + min(self._clock.now() - self._pulse_at, self._most_s)

    async def run(self) -> None:
        """Pulse until cancelled."""
        while True:
            self._pulse()
            await self._clock.sleep(self._most_s / _PULSES)

    def _pulse(self) -> None:
        now = self._clock.now()
        passed_s, self._pulse_at = now - self._pulse_at, now
        self._counted_s += min(passed_s, self._most_s)
        if passed_s > self._most_s:
            log.warning(
                "this process did not run for a while; nobody counts as silent for that", passed_s=round(passed_s, 3)
            )
