"""Asking a decode worker: one message within its time, and again while no answer comes or there is no room.

Calls of a hand-off are idempotent, so a lost answer is repaired by asking again; every other error is the answer. An answer
from another life than the one that was asked is none: StaleEpoch. Time is a Clock's. Does not know what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TypeVar

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, HandoffError, NoRoom, TransferFailed, Unavailable
from contracts.ticket import Answer, check_answer
from contracts.worker import WorkerRef
from kv_transfer.config import SenderConfig
from kv_transfer.endings import within

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=Answer)

NO_ANSWER = (Unavailable, DeadlineExceeded, TimeoutError)


class Asker:
    """Asks `decode` in the name of `prefill`, with the patience of a SenderConfig."""

    def __init__(self, prefill: WorkerRef, decode: WorkerRef, clock: Clock, config: SenderConfig) -> None:
        self._prefill = prefill
        self._decode = decode
        self._clock = clock
        self._config = config

    async def once(self, message: Coroutine[None, None, AnswerT]) -> AnswerT:
        """The answer to one message; one of NO_ANSWER when it does not come within the call timeout.

        StaleEpoch when it is an answer of, or for, another life.
        """
        answer = await within(self._clock, self._config.call_timeout_s, message)
        check_answer(answer, self._prefill, self._decode)
        return answer

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
                failure = TransferFailed(f"{self._decode.worker_id} does not answer: {error}")
            if self._clock.now() + wait_s > deadline_s:
                raise failure
            await self._clock.sleep(wait_s)
            pause_s = min(2 * pause_s, self._config.max_backoff_s)
