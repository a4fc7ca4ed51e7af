"""What ends one attempt from outside: timers and the router's halt, heard in the attempt's own inbox. Does not know attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.clock import Clock
from contracts.errors import DiptychError
from router.halt import Halt
from router.serving.inbox import Inbox, TimeUp


class Alarms:
    """What ends one attempt from outside and rings in its inbox: timers, and the router's halt. `cancel` silences all."""

    def __init__(self, clock: Clock, inbox: Inbox, halt: Halt) -> None:
        self._clock = clock
        self._inbox = inbox
        self._tasks: list[asyncio.Task[None]] = []
        self._unlisten = halt.listen(lambda reason: inbox.put_nowait(TimeUp(reason)))

    def set(self, delay_s: float, error: DiptychError | None) -> Callable[[], object]:
        """Put TimeUp(error) into the inbox after `delay_s`; what silences this one timer comes back."""
        task = asyncio.ensure_future(self._ring(delay_s, error))
        self._tasks.append(task)
        return task.cancel

    def cancel(self) -> None:
        """None of them rings any more."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._unlisten()

    async def _ring(self, delay_s: float, error: DiptychError | None) -> None:
        await self._clock.sleep(delay_s)
        self._inbox.put_nowait(TimeUp(error))
