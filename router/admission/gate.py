"""What a request passes before any work is done for it: its caller's rate limits, then the queue. Both hear how it ended.

    Ask ──estimate──▶ limits: RateLimited ──▶ permit: wait, Overloaded, DeadlineExceeded ──▶ Entry … what it really took

The limits come first: who may not ask does not stand in the queue. One that the queue refuses gets everything back. Does not
know what is done behind the gate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.admission.permits import Admission, Demand
from router.admission.quota import Quota
from router.admission.rate_limits import Estimator, RateLimits
from router.exchange import Ask


@dataclass(slots=True)
class Entry:
    """A request that was let in. Say what it took before the block ends; one that is silent took nothing."""

    quota: Quota | None
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def took(self, prompt_tokens: int, answer_tokens: int) -> None:
        """The prompt once, and all that was made of its answers."""
        self.prompt_tokens, self.answer_tokens = prompt_tokens, answer_tokens


class Gate:
    """Puts the layers together. Owns nothing."""

    def __init__(self, admission: Admission, limits: RateLimits) -> None:
        self._admission = admission
        self._limits = limits
        self._estimator = Estimator()

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._admission.closed

    @asynccontextmanager
    async def enter(self, ask: Ask, deadline: float) -> AsyncIterator[Entry]:
        """Be inside for the block. Raises RateLimited, Overloaded, Unavailable and DeadlineExceeded."""
        tokens = self._estimator.tokens(ask)
        demand = Demand(
            deadline=deadline, caller=ask.caller, priority=ask.priority, num_answers=ask.num_answers, tokens=tokens
        )
        async with self._limits.use(ask.caller, tokens) as use, self._admission.permit(demand) as permit:
            entry = Entry(use.quota)
            try:
                yield entry
            finally:
                use.tokens = permit.tokens = float(entry.prompt_tokens + entry.answer_tokens)
                if entry.answer_tokens:
                    self._estimator.ended(entry.answer_tokens / ask.num_answers)
