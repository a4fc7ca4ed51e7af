"""Whether something far away is there, since when, and who wants to know. Does not know what it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.clock import Clock
from observability.log import get_logger

log = get_logger(__name__)


class Presence:
    """What is known of one Redis, called `name` in the log; away until `say` says otherwise."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._problem: str | None = None  # None: nothing said yet; empty: it is there
        self._since = clock.now()
        self._came = asyncio.Event()
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def up(self) -> bool:
        """Whether it is there."""
        return self._problem == ""

    @property
    def away_s(self) -> float:
        """For how many seconds it has been away; 0 while it is there."""
        return 0.0 if self.up else self._clock.now() - self._since

    @property
    def problem(self) -> str:
        """What keeps it away, in words without credentials; empty while it is there."""
        return "not reached yet" if self._problem is None else self._problem

    def subscribe(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` on the event loop whenever it comes (True) or goes (False), from now on."""
        self._listeners.append(listener)

    async def wait_up(self) -> None:
        """Return when it is there."""
        await self._came.wait()

    def say(self, problem: str) -> None:
        """It is there (an empty problem), or it is away and why. Logs and tells only what is a change."""
        before, self._problem = self._problem, problem
        if before is not None and (before == "") == (problem == ""):
            return
        gone_s = self._clock.now() - self._since
        self._since = self._clock.now()
        if problem:
            self._came.clear()
            log.warning("redis is away; going on without it", redis=self._name, reason=problem)
        else:
            self._came.set()
            log.info("redis is there", redis=self._name, after_s=round(gone_s, 3))
        for listener in self._listeners:
            listener(not problem)
