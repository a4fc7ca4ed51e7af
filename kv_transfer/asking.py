"""Asking a decode worker: one message within its time, and again while no answer comes or there is no room.

Calls of a hand-off are idempotent, so a lost answer is repaired by asking again; every other error is the answer. Time is a
Clock's. Does not know what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TypeVar

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, HandoffError, NoRoom, TransferFailed, Unavailable
from kv_transfer.config import SenderConfig
from kv_transfer.endings import within

T = TypeVar("T")

NO_ANSWER = (Unavailable, DeadlineExceeded, TimeoutError)


class Asker:
    """Asks the worker called `name`, with the patience of a SenderConfig."""

    def __init__(self, name: str, clock: Clock, config: SenderConfig) -> None:
        self._name = name
        self._clock = clock
        self._config = config

    async def once(self, message: Coroutine[None, None, T]) -> T:
        """The answer to one message; one of NO_ANSWER when it does not come within the call timeout."""
        return await within(self._clock, self._config.call_timeout_s, message)

    async def until_answer(self, ask: Callable[[], Coroutine[None, None, T]], deadline_s: float) -> T:
        """Ask, and again with growing pauses until the deadline; then NoRoom, or TransferFailed where nobody answers."""
        pause_s = self._config.reserve_backoff_s
        while True:
            failure: HandoffError
            wait_s = pause_s
            try:
                return await ask()
            except NoRoom as error:
                failure = error
                wait_s = max(pause_s, error.retry_after_s)
            except NO_ANSWER as error:
                failure = TransferFailed(f"{self._name} does not answer: {error}")
            if self._clock.now() + wait_s > deadline_s:
                raise failure
            await self._clock.sleep(wait_s)
            pause_s = min(2 * pause_s, self._config.max_backoff_s)
