"""What follows from a step: counters move, full blocks are published, tokens go out, requests end or go on elsewhere.

    computed ─▶ a fault, a deadline ─▶ blocks freed ─▶ delta(error); the rest of the step goes on
    computed ─▶ published ─▶ token? ─▶ ends: blocks freed ─▶ delta(finish_reason)
                                   ├▶ retains its KV      ─▶ delta + Retained(lease)
                                   └▶ stays               ─▶ delta

Does not know how the step was chosen or computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.errors import ErrorCode
from contracts.request import ErrorInfo, FinishReason, TokenDelta
from engine.execution.interface import SampledToken
from engine.kv.cache_manager import KVCacheManager
from engine.lent import LentLeases
from engine.output import Progress, Retained
from engine.request import Request, RequestStatus
from engine.roster import Roster
from engine.scheduling.scheduler import Scheduler, Share
from observability.samples import EngineSample


@dataclass(slots=True)
class News:
    """What one step, begun at that instant, has to tell; grows while it is committed."""

    began_s: float
    deltas: list[TokenDelta] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    retained: list[Retained] = field(default_factory=list)
    ended: list[EngineSample] = field(default_factory=list)
    num_made: int = 0  # tokens


class Committer:
    """Moves requests on. The only place where one enters or leaves scheduler and roster, so that both always agree."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        roster: Roster,
        lent: LentLeases,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._roster = roster
        self._lent = lent
        self._eos_token_ids = eos_token_ids

    def enter(self, request: Request) -> None:
        """It comes in."""
        self._roster.enter(request)
        self._scheduler.add(request)

    def publish(self, request: Request) -> None:
        """Let the prefix cache know the request's full computed blocks."""
        self._kv.hasher.extend(request.block_hashes, request.token_ids)
        self._kv.publish(request.lease, request.block_hashes, request.num_computed_tokens)

    def drop(self, request: Request) -> None:
        """It leaves; its blocks, if it has any, are free."""
        self._scheduler.remove(request)
        self._roster.leave(request)
        if request.status is RequestStatus.RUNNING:
            request.give_up_lease(RequestStatus.FINISHED).release()
        request.status = RequestStatus.FINISHED

    def expire(self, news: News, now_s: float) -> None:
        """End every request whose deadline has passed."""
        for request in self._roster.expired(now_s):
            message = f"deadline of {request.facts.deadline_s:g} s passed after {request.num_output_tokens} tokens"
            self._end_badly(news, request, ErrorCode.DEADLINE_EXCEEDED, message, now_s)

    def commit(self, news: News, shares: Sequence[Share], sampled: Sequence[SampledToken], now_s: float) -> None:
        """Take the runner's results, one per share in the same order."""
        for share, result in zip(shares, sampled, strict=True):
            request = share.request
            if result.fault is not None:
                self._end_badly(news, request, ErrorCode.INTERNAL, result.fault, now_s)
                continue
            if (result.token_id is not None) != (share.num_tokens == request.num_uncomputed_tokens):
                raise RuntimeError(f"the runner's result for {request.request_id} does not match what was scheduled")
            request.num_computed_tokens += share.num_tokens
            self.publish(request)
            request.prompt_logprobs.extend(result.prompt_logprobs)
            if request.retain_kv:
                news.progress.append(_progress(share))
            if result.token_id is not None:
                self._take_token(news, request, result, result.token_id, now_s)

    def _end_badly(self, news: News, request: Request, code: ErrorCode, message: str, now_s: float) -> None:
        """It ends with an error of its own; the others of its step go on."""
        delta = TokenDelta(
            request.request_id,
            request.num_output_tokens,
            finish_reason=FinishReason.ERROR,
            error=ErrorInfo(code, message, retryable=code is ErrorCode.INTERNAL),
            stages=request.stages(now_s),
        )
        news.deltas.append(delta)
        news.ended.append(request.sample(FinishReason.ERROR, now_s))
        self.drop(request)

    def _take_token(self, news: News, request: Request, result: SampledToken, token_id: int, now_s: float) -> None:
        is_first = request.first_token_s is None
        wants_prompt = request.sampling.prompt_logprobs is not None
        stages = request.append(token_id, news.began_s, now_s)
        news.num_made += 1
        reason = request.finish_reason(self._eos_token_ids)
        delta = TokenDelta(
            request.request_id,
            request.num_output_tokens - 1,
            (token_id,),
            logprobs=() if result.logprob is None else (result.logprob,),
            prompt_logprobs=(None, *request.prompt_logprobs) if wants_prompt else (),
            finish_reason=reason,
            stop_token_id=token_id if reason is FinishReason.STOP else None,
            num_cached_tokens=request.num_cached_tokens if is_first else 0,
            stages=stages,
        )
        news.deltas.append(delta)
        if reason is not None or request.retain_kv:
            news.ended.append(request.sample(reason or FinishReason.LENGTH, now_s))
        if reason is not None:
            self.drop(request)
        elif request.retain_kv:
            news.retained.append(self._retain(request, delta, now_s))

    def _retain(self, request: Request, delta: TokenDelta, now_s: float) -> Retained:
        self._scheduler.remove(request)
        self._roster.leave(request)
        num_computed_tokens = request.num_computed_tokens
        num_full_blocks = num_computed_tokens // self._kv.block_size
        lease = request.give_up_lease(RequestStatus.FINISHED)
        self._lent.retain(lease)
        return Retained(
            request=request.continuation(now_s),
            lease=lease,
            num_computed_tokens=num_computed_tokens,
            num_cached_tokens=request.num_cached_tokens,
            block_hashes=tuple(request.block_hashes[:num_full_blocks]),
            first_token_logprob=delta.logprobs[0] if delta.logprobs else None,
            stages=request.stages(now_s),
        )


def _progress(share: Share) -> Progress:
    request = share.request
    is_first = request.num_computed_tokens - share.num_tokens == request.lease.num_cached_tokens
    return Progress(request.request_id, request.num_computed_tokens, tuple(request.lease.block_ids), is_first)
