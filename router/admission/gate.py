"""What a request passes before any work is done for it: its caller's rate limits, then the queue. Both hear how it ended.

    Ask ──estimate──▶ limits: RateLimited ──▶ permit: wait, Overloaded, DeadlineExceeded ──▶ Entry … what it really took

The limits come first: who may not ask does not stand in the queue. One that the queue refuses gets everything back. Text that is
only turned into tokens, or back, passes the same limits and a queue of its own: no worker has part in it, and a few at a time are
all that this process does well. Does not know what is done behind the gate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

from router.admission.permits import Admission, Demand, Permit
from router.admission.quota import Quota
from router.admission.rate_limits import Estimator, RateLimits, Use
from router.caller import Caller
from router.config import AdmissionConfig
from router.exchange import Ask

# Of text, at once: they share their threads with everybody's prompts.
READERS = AdmissionConfig(max_running=2, max_waiting=256)


@dataclass(slots=True)
class Entry:
    """A request that was let in. Say what it took before the block ends; one that is silent took nothing, and counts as a request
    only if `was_read`: to turn a long prompt into tokens is work, also when nothing can be done with them.
    """

    quota: Quota | None
    prompt_tokens: int = 0
    answer_tokens: int = 0
    was_read: bool = False

    def took(self, prompt_tokens: int, answer_tokens: int) -> None:
        """The prompt once, and all that was made of its answers."""
        self.prompt_tokens, self.answer_tokens = prompt_tokens, answer_tokens

    @property
    def charged(self) -> float:
        """Tokens to its caller's account."""
        return max(float(self.prompt_tokens + self.answer_tokens), float(self.was_read))


class Gate:
    """Puts the layers together. Owns nothing. `readers` are the places for text."""

    def __init__(self, admission: Admission, limits: RateLimits, readers: Admission) -> None:
        self._admission = admission
        self._limits = limits
        self._readers = readers
        self._estimator = Estimator()

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._admission.closed

    def enter(self, ask: Ask, deadline: float) -> AbstractAsyncContextManager[Entry]:
        """Be inside for the block. Raises RateLimited, Overloaded, Unavailable and DeadlineExceeded."""
        tokens = self._estimator.tokens(ask)
        demand = Demand(
            deadline=deadline, caller=ask.caller, priority=ask.priority, num_answers=ask.num_answers, tokens=tokens
        )
        return _Inside(self._limits.use(ask.caller, tokens), self._admission.permit(demand), self._estimator, ask)

    @asynccontextmanager
    async def read(self, caller: Caller, tokens: float, deadline: float) -> AsyncIterator[Entry]:
        """Be inside to turn about so many tokens from text or into it: one request with such a prompt. Raises as `enter`."""
        demand = Demand(deadline=deadline, caller=caller, tokens=tokens)
        async with self._limits.use(caller, tokens) as use, self._readers.permit(demand) as permit:
            entry = Entry(use.quota)
            try:
                yield entry
            finally:
                use.tokens, permit.tokens = entry.charged, float(entry.prompt_tokens)


class _Inside:
    """Both layers around a block, and at its end what it took, for both and for the estimates of those that come."""

    __slots__ = ("_ask", "_entry", "_estimator", "_permit", "_permitted", "_use", "_using")

    def __init__(
        self,
        using: AbstractAsyncContextManager[Use],
        permitted: AbstractAsyncContextManager[Permit],
        estimator: Estimator,
        ask: Ask,
    ) -> None:
        self._using = using
        self._permitted = permitted
        self._estimator = estimator
        self._ask = ask

    async def __aenter__(self) -> Entry:
        self._use = await self._using.__aenter__()
        try:
            self._permit = await self._permitted.__aenter__()
        except BaseException as error:
            await self._using.__aexit__(type(error), error, error.__traceback__)
            raise
        self._entry = Entry(self._use.quota)
        return self._entry

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = self._entry
        self._use.tokens, self._permit.tokens = entry.charged, float(entry.prompt_tokens + entry.answer_tokens)
        if entry.answer_tokens:
            self._estimator.ended(entry.answer_tokens / self._ask.num_answers)
        try:
            await self._permitted.__aexit__(kind, error, trace)
        finally:
            await self._using.__aexit__(kind, error, trace)
