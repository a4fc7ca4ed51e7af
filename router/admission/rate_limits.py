"""What one caller has left: its limits applied to a request before it waits for anything, and corrected when it ends.

    Ask ──estimate──▶ take from its caller's buckets ──▶ Quota for the answer's headers ──▶ RateLimited(retry_after_s)
                          └──── the request ends: what it did not use is given back, what it used beyond is owed

As OpenAI does it, a request is charged with its prompt and with the most tokens that its answers may take (`max_tokens`, times
n) before it begins; unlike there, the difference to what it really used comes back when it ends, and a request that was not let
in gets everything back. A prompt is tokenised only after that (it is work), so text counts as a token per four characters
until then; token ids count exactly. Does not know where buckets are kept, nor fronts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

from contracts.errors import RateLimited, counted
from observability.log import get_logger
from router.admission.limits import Buckets, Kind, Rate, Wanted
from router.admission.quota import Quota
from router.caller import Caller
from router.config import LimitsConfig
from router.exchange import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt

log = get_logger(__name__)
_CHARS_PER_TOKEN = 4
_KEPT = 0.95  # of the mean length of answers, at each that ends
_FIRST_GUESS = 256.0  # tokens of an answer without max_tokens, before any has ended


@dataclass(slots=True)
class Use:
    """Of one request. `tokens` is what prompt and answers took in the end; say it before the block ends."""

    quota: Quota | None = None
    tokens: float = 0.0


class Estimator:
    """About how many tokens a request will take, before it is tokenised."""

    def __init__(self) -> None:
        self._answer = _FIRST_GUESS

    def tokens(self, ask: Ask) -> float:
        """Prompt once, and the most that its answers may take; a client that sets no bound is taken for the average one."""
        if ask.prompt_only:
            return max(1.0, prompt_tokens(ask))
        bound = ask.fill_at_most if ask.fill_context else ask.sampling.max_tokens
        answer = self._answer if bound is None else float(bound) if not ask.fill_context else min(bound, self._answer)
        return max(1.0, prompt_tokens(ask) + answer * ask.num_answers)

    def ended(self, num_tokens: float) -> None:
        """Answers had so many tokens each."""
        self._answer = _KEPT * self._answer + (1 - _KEPT) * num_tokens


def prompt_tokens(ask: Ask) -> float:
    """About how many tokens the prompts have."""
    return sum(map(length, ask.prompts))


def length(prompt: Prompt) -> float:
    """About how many tokens a prompt has."""
    match prompt:
        case TokenPrompt(token_ids):
            return float(len(token_ids))
        case TextPrompt(text):
            return len(text) / _CHARS_PER_TOKEN
        case ChatPrompt(conversation):
            return conversation.num_chars / _CHARS_PER_TOKEN


class RateLimits:
    """The limits of all callers, kept in `buckets`."""

    def __init__(self, config: LimitsConfig, buckets: Buckets, on_limited: Callable[[str], None] | None = None) -> None:
        """`on_limited` hears which limit a request was over."""
        self._config = config
        self._buckets = buckets
        self._on_limited = on_limited
        self._giving: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait until everything is given back."""
        if self._giving:
            await asyncio.wait(self._giving)

    def use(self, caller: Caller, tokens: float) -> AbstractAsyncContextManager[Use]:
        """Charge `caller` with a request of so many tokens for the block. Raises RateLimited when it may not have them now."""
        wanted = self._wanted(caller, tokens)
        return self._charged(caller, wanted) if wanted else nullcontext(Use())

    @asynccontextmanager
    async def _charged(self, caller: Caller, wanted: list[Wanted]) -> AsyncIterator[Use]:
        verdict = await self._buckets.take(caller.name, wanted)
        quota = Quota(verdict.standings)
        if verdict.lacking is not None:
            if self._on_limited is not None:
                self._on_limited(verdict.lacking.value)
            raise _refusal(caller, wanted, verdict.lacking, verdict.retry_after_s, quota)
        use = Use(quota)
        try:
            yield use
        finally:
            back = [
                Wanted(want.kind, want.rate, _unused(want, use.tokens))
                for want in wanted
                if want.kind is Kind.TOKENS or not use.tokens  # a request that took nothing was none
            ]
            if back:  # beside the request: its client neither waits for that nor can cut it short
                giving = asyncio.ensure_future(self._buckets.give(caller.name, back))
                self._giving.add(giving)
                giving.add_done_callback(self._given)

    def _given(self, giving: asyncio.Task[None]) -> None:
        self._giving.discard(giving)
        error = None if giving.cancelled() else giving.exception()
        if error is not None:
            log.error("what a request did not use was not given back", error)

    def _wanted(self, caller: Caller, tokens: float) -> list[Wanted]:
        config, wanted = self._config, []
        requests = config.requests_per_minute if caller.requests_per_minute is None else caller.requests_per_minute
        if requests is not None:
            wanted.append(Wanted(Kind.REQUESTS, Rate(requests, config.burst_s), 1.0))
        limit = config.tokens_per_minute if caller.tokens_per_minute is None else caller.tokens_per_minute
        if limit is not None:
            wanted.append(Wanted(Kind.TOKENS, Rate(limit, config.burst_s), tokens))
        return wanted


def _unused(want: Wanted, used: float) -> float:
    """Of what was taken, which is at most what the bucket holds."""
    taken = min(want.amount, want.rate.capacity)
    return taken - (used if want.kind is Kind.TOKENS else 0.0)


def _refusal(caller: Caller, wanted: list[Wanted], lacking: Kind, retry_after_s: float, quota: Quota) -> RateLimited:
    want = next(want for want in wanted if want.kind is lacking)
    left = next(standing.remaining for standing in quota.standings if standing.kind is lacking)
    who = f" for {caller.name!r}" if caller.name else ""
    noun = lacking.value.removesuffix("s")
    asked = f"{counted(round(min(want.amount, want.rate.capacity)), noun)} wanted, {left} left"
    words = (
        f"rate limit of {counted(want.rate.per_minute, noun)} per minute{who}: {asked}; again in {retry_after_s:.3g} s"
    )
    return RateLimited(words, retry_after_s, quota.words())
