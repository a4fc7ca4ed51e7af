"""Background tasks that a process cannot be without: started again when they die, and never quietly gone.

    kept_up     running ──dies──▶ logged, counted ──pause, doubling──▶ running      returns: it is done      cancelled: stopped
    watched     running ──dies──▶ logged, and whoever made it is told

Does not know what the tasks do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from contracts.clock import Clock
from observability.log import get_logger

log = get_logger(__name__)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


async def kept_up(
    name: str, make: Callable[[], Awaitable[None]], clock: Clock, on_restart: Callable[[str], object]
) -> None:
    """Run what `make` makes until it returns; make it anew whenever it raises. One that ran long pauses little again."""
    pause_s = _FIRST_PAUSE_S
    while True:
        began = clock.now()
        try:
            await make()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is: the process goes on, and says it
            if clock.now() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            log.error("a background task died, and is started again", error, task=name, pause_s=pause_s)
            on_restart(name)
        else:
            return
        await clock.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def watched(name: str, work: Coroutine[None, None, None], died: Callable[[], object]) -> asyncio.Task[None]:
    """A task whose death is not silent."""

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task died", error, task=name)
            died()

    task = asyncio.ensure_future(work)
    task.add_done_callback(ended)
    return task


async def pause(clock: Clock, delay_s: float, sooner: asyncio.Event) -> None:
    """Return after `delay_s` seconds of `clock`, or when `sooner` is set, whichever is first."""
    waits = (asyncio.ensure_future(clock.sleep(delay_s)), asyncio.ensure_future(sooner.wait()))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
