"""A task that the router cannot be without is started again when it dies, and says so; no fault of its ends quietly.

    running ──dies──▶ logged, counted ──pause, doubling──▶ running          returns: it is done          cancelled: stopped

Does not know what the task does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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
        except Exception as error:  # noqa: BLE001 - whatever it is: the router goes on, and says it
            if clock.now() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            log.error("a task of this router died, and is started again", error, task=name, pause_s=pause_s)
            on_restart(name)
        else:
            return
        await clock.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
