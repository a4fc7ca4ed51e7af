"""One attempt at a request: on a decode worker alone, or over both pools with a hand-off between.

    Alone       generate ──▶ tokens … finish

    HandOver    PREFILLING ──first token──▶ SENDING ──handed_off, or tokens of decode──▶ DECODING ──finish──▶ over
                     │ finish: over             │ handoff_failed ──▶ another decode worker, new hand-off id, SENDING
                     │ decode lost              │ decode lost ──▶ the same at once; the prefill worker acknowledges it within
                     │  ──▶ the same            │   handoff_verdict_s: handoff_failed of the old id, or handed_off: too late
                     └ prefill lost             └ prefill lost
                              └───────────┬──────────┘                              │ decode lost
                                          ▼                                         ▼
                              the attempt fails; the flow makes another from the tokens so far

An attempt yields deltas as they come and raises DiptychError when it cannot go on. However it ends, also by the client
leaving, both legs are cancelled before `deltas` returns. Does not know retries, text or clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from contracts.clock import Clock
from contracts.errors import (
    DiptychError,
    Draining,
    InternalError,
    RequestCancelled,
    Unavailable,
    WorkerLost,
)
from contracts.prefill import FirstTokens, HandedOff, HandoffFailed, Target
from contracts.request import TokenDelta
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.choosing.choice import Chooser
from router.choosing.route import Route
from router.config import RetryConfig
from router.halt import Halt
from router.serving.alarms import Alarms, out_of_time
from router.serving.inbox import DecodeLost, DecodeTokens, Event, Inbox, PrefillEnded, TimeUp
from router.serving.progress import Progress, as_exception, may_retry
from router.serving.retry_budget import RetryBudget
from router.workers.breakers import Trial
from router.workers.pairs import Pair, Verdicts
from router.workers.pools import Claim, Pools

_BOOKS_S = 0.5  # how long a finished answer waits for the prefill worker's account of the hand-off


@dataclass(frozen=True, slots=True)
class Means:
    """What every attempt works with. `new_id` makes ids that are unique for ever; `halt` ends all attempts at once;
    `verdicts` hears how hand-offs end, `budget` is what all requests together may retry.
    """

    pools: Pools
    chooser: Chooser
    clock: Clock
    retry: RetryConfig
    new_id: Callable[[], str]
    halt: Halt
    verdicts: Verdicts
    budget: RetryBudget


class Alone:
    """Runs the request on one decode worker, prefill included."""

    def __init__(self, means: Means, progress: Progress, decode: WorkerInfo) -> None:
        self._means = means
        self._progress = progress
        self._decode = decode

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """See the module."""
        inbox = Inbox()
        alarms = Alarms(self._means.clock, inbox, self._means.halt)
        request = self._progress.request(self._means.new_id())
        session = self._means.pools.session(self._decode.ref)
        claim = Claim(
            self._means.pools,
            self._decode.ref,
            self._means.chooser.prompts.sent(self._progress, self._decode.ref, WorkerKind.DECODE, request.num_tokens),
            lambda error: inbox.put_nowait(DecodeLost(request.request_id, error)),
            num_kv_tokens=request.num_tokens,
        )
        try:
            alarms.deadline(self._progress.time_left_s)
            session.generate(request, inbox)
            self._progress.at[WorkerKind.DECODE] = self._decode.ref
            self._progress.departed(Route.COLOCATED)
            while True:
                match await inbox.get():
                    case DecodeTokens(delta):
                        if delta.error is not None:
                            raise _judged(
                                as_exception(delta.error), self._decode.ref, self._means, self._progress, claim.trial
                            )
                        claim.computed()
                        self._progress.prompt_cached.set()
                        yield delta
                    case DecodeLost(_, error):
                        raise _judged(error, self._decode.ref, self._means, self._progress, claim.trial)
                    case TimeUp(error):
                        raise error or out_of_time()
                    case event:
                        raise InternalError(f"{type(event).__name__} came to a request that runs alone")
        finally:
            session.cancel(request.request_id)
            claim.release()
            alarms.cancel()


class _Unheard:
    """Hand-offs that were given up and that the prefill worker has not acknowledged yet; `silence` ends the wait for that."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.silence: Callable[[], object] = lambda: None

    def add(self, handoff_id: str, silence: Callable[[], object]) -> None:
        self.ids.add(handoff_id)
        self.silence = silence

    def hear(self, handoff_id: str) -> None:
        """With the last of them nothing is waited for any more."""
        if self.ids == {handoff_id}:
            self.silence()
        self.ids.discard(handoff_id)

    def hear_all(self) -> None:
        """The prefill worker goes along."""
        if self.ids:
            self.silence()
            self.ids.clear()


class HandOver:
    """Runs the request over a prefill and a decode worker. Drawn above."""

    def __init__(self, means: Means, progress: Progress, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        self._means = means
        self._progress = progress
        self._prefill = prefill
        self._inbox = Inbox()
        self._alarms = Alarms(means.clock, self._inbox, means.halt)
        self._leg = means.pools.prefill_leg(prefill.ref, self._inbox)
        self._target = Target(means.new_id(), decode.ref, decode.address)
        self._prefill_trial: Trial | None = None
        self._decode_claim: Claim | None = None
        self._first_came = False
        self._committed = False
        self._settled = False  # hand-off stats and prefill stages are in, or will not come
        self._decode_error: DiptychError | None = None
        self._given_up: dict[str, DiptychError] = {}  # hand-off id → why another was begun instead
        self._unheard = _Unheard()
        # What silences the wait for the prefill worker's word on why a hand-off failed.
        self._verdict_alarm: Callable[[], object] = lambda: None
        self._early: list[TokenDelta] = []  # decode's news that must wait for news of the prefill worker

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """See the module."""
        request = self._progress.request(self._means.new_id())
        claim = Claim(
            self._means.pools,
            self._prefill.ref,
            self._means.chooser.prompts.sent(self._progress, self._prefill.ref, WorkerKind.PREFILL, request.num_tokens),
            lambda error: self._inbox.put_nowait(PrefillEnded(error)),
        )
        self._prefill_trial = claim.trial
        try:
            self._leg.open()
            self._alarms.deadline(self._progress.time_left_s)
            await asyncio.sleep(
                0
            )  # whoever chooses next knows of the claim; what follows is done while the headers travel
            self._leg.start(request, self._target)
            self._attach()
            self._progress.at[WorkerKind.PREFILL] = self._prefill.ref
            self._progress.departed(Route.DISAGGREGATED)
            while True:
                event = await self._inbox.get()
                for delta in self._on(event):
                    yield delta
                if self._first_came:
                    claim.computed()
                if self._committed:
                    claim.release()
        finally:
            self._leg.cancel()
            self._detach()
            claim.release()
            self._alarms.cancel()

    def _on(self, event: Event) -> Sequence[TokenDelta]:
        """One event; the deltas that may be passed on because of it."""
        match event:
            case FirstTokens(delta):
                return self._on_first(delta)
            case DecodeTokens(delta):
                return self._on_decode(delta)
            case HandedOff():
                self._on_handed_off(event)
            case HandoffFailed():
                self._on_handoff_failed(event)
            case PrefillEnded(error):
                self._on_prefill_ended(error)
            case DecodeLost(handoff_id, error):
                if handoff_id == self._target.handoff_id:
                    self._on_decode_failed(error, lost=True)
            case TimeUp(error):
                self._settled = True
                if self._unheard.ids:
                    self._progress.avoid.add(self._prefill.ref)
                if error is not None:
                    raise error
        return self._held_back()

    def _on_first(self, delta: TokenDelta) -> Sequence[TokenDelta]:
        self._first_came = True
        if delta.error is not None:
            raise _judged(
                as_exception(delta.error), self._prefill.ref, self._means, self._progress, self._prefill_trial
            )
        if delta.finish_reason is None:
            delta = replace(delta, stages=None)  # they come again, whole, with the hand-off
        return (delta, *self._held_back())

    def _on_decode(self, delta: TokenDelta) -> Sequence[TokenDelta]:
        if delta.request_id != self._target.handoff_id:
            return ()  # of a hand-off that was given up
        if delta.error is not None:
            self._on_decode_failed(as_exception(delta.error), lost=False)
            return ()
        self._unheard.hear_all()
        self._take_commit()
        self._early.append(delta)
        return self._held_back()

    def _held_back(self) -> Sequence[TokenDelta]:
        """What of decode's news may go on: nothing before the first token, and the last not before the hand-off's books."""
        if not self._first_came:
            return ()
        ready, self._early = self._early, []
        if ready and ready[-1].finish_reason is not None and not self._settled:
            self._early = [ready.pop()]
            self._alarms.set(_BOOKS_S, None)
        return ready

    def _on_handed_off(self, event: HandedOff) -> None:
        if event.handoff_id in self._given_up:  # committed before our word came: the KV is where nobody reads it
            raise self._given_up[event.handoff_id]
        if event.handoff_id != self._target.handoff_id:
            raise InternalError(f"hand-off {event.handoff_id} succeeded, which is not the one that was asked for")
        self._take_commit()
        self._settled = True
        self._means.verdicts.worked(self._pair)
        self._progress.handoff = event.stats
        self._progress.stages = self._progress.stages.merged(event.stages)
        if self._decode_error is not None:
            raise self._decode_error

    def _take_commit(self) -> None:
        self._committed = True
        self._progress.prompt_cached.set()
        if self._decode_claim is not None:
            self._decode_claim.computed()

    def _on_prefill_ended(self, error: DiptychError | None) -> None:
        if self._committed and self._first_came:  # decode has all it needs
            self._settled = True
            return
        ref = self._prefill.ref
        error = error or InternalError(f"prefill worker {ref.worker_id} ended the call without an outcome")
        error = _judged(error, ref, self._means, self._progress, self._prefill_trial)
        if isinstance(error, Unavailable):
            self._means.pools.suspect(ref)
        raise error

    def _on_decode_failed(self, error: DiptychError, *, lost: bool) -> None:
        """The KV is still at the prefill worker: a second push is cheaper than a second prefill. Raises after the commit."""
        # Of a worker that is there, a failed hand-off is the pair's: its breaker hears only of what is surely its own.
        to_blame = self._decode_claim if lost or self._committed or isinstance(error, InternalError) else None
        trial = None if to_blame is None else to_blame.trial
        error = _judged(error, self._target.decode, self._means, self._progress, trial)
        if self._committed:
            raise error
        if not lost:  # it is there, and has not got the KV
            self._means.verdicts.failed(self._pair, error)
        if isinstance(error, WorkerLost) and not self._first_came:  # not of this request: it had nothing of it
            error = Unavailable(error.message)
        if lost or not isinstance(error, RequestCancelled):
            before = self._target.handoff_id
            self._aim_elsewhere(error, with_worker=lost)
            self._unheard.add(before, self._alarms.set(self._means.retry.handoff_verdict_s, _said_already(error)))
        elif self._decode_error is None:  # the prefill worker gave it up, and is about to say why
            self._decode_error = error
            self._verdict_alarm = self._alarms.set(self._means.retry.handoff_verdict_s, error)

    def _on_handoff_failed(self, event: HandoffFailed) -> None:
        self._unheard.hear(event.handoff_id)
        if event.handoff_id == self._target.handoff_id and self._committed:
            self._settled = True  # its tokens come: only the word of it did not get back to the prefill worker,
            self._leg.cancel()  # which would hold the KV for another target now
        elif event.handoff_id == self._target.handoff_id:
            error = _judged(as_exception(event.error), self._target.decode, self._means, self._progress)
            if not isinstance(error, Draining):
                self._means.verdicts.failed(self._pair, error)
            self._aim_elsewhere(error)

    def _aim_elsewhere(self, error: DiptychError, *, with_worker: bool = False) -> None:
        """Aim at another decode worker, or at the same again when there is no other. Raises when that was tried enough,
        or where there is none: then the failure is counted by whoever makes another attempt, once.

        The prefill worker may not know yet that the hand-off has failed: then it gives it up because of this.
        """
        progress = self._progress
        if not isinstance(error, Draining):
            progress.num_handoff_failures += 1
            if progress.num_handoff_failures > self._means.retry.max_handoff_failures:
                raise error
        decode = self._means.chooser.decode_for(self._prefill.ref, progress)
        if decode is None and may_retry(error):
            why = f"no decode worker is ready to take the hand-off: {error.message}"
            raise type(error)(why) if isinstance(error, Draining | WorkerLost) else Unavailable(why)
        progress.fail(error, with_worker=with_worker)
        if decode is None:
            raise error
        self._detach()
        self._given_up[self._target.handoff_id] = _said_already(error)
        self._target = Target(self._means.new_id(), decode.ref, decode.address)
        self._decode_error = None
        self._verdict_alarm()
        self._unheard.silence()
        self._attach()
        self._leg.retarget(self._target)

    @property
    def _pair(self) -> Pair:
        return Pair(self._prefill.ref, self._target.decode)

    def _attach(self) -> None:
        ref = self._target.decode
        session = self._means.pools.session(ref)
        lost = partial(DecodeLost, self._target.handoff_id)
        num_tokens = len(self._progress.job.prompt_token_ids) + len(self._progress.token_ids)
        self._means.chooser.prompts.sent(self._progress, ref, WorkerKind.DECODE, num_tokens)
        self._decode_claim = Claim(
            self._means.pools, ref, 0, lambda error: self._inbox.put_nowait(lost(error)), num_kv_tokens=num_tokens
        )
        session.attach(self._target.handoff_id, self._progress.time_left_s, self._inbox)
        self._progress.at[WorkerKind.DECODE] = ref

    def _detach(self) -> None:
        claim, self._decode_claim = self._decode_claim, None
        if claim is None:
            return
        session = self._means.pools.find_session(self._target.decode)
        if session is not None:
            session.cancel(self._target.handoff_id)
        claim.release()


def _judged(
    error: DiptychError, ref: WorkerRef, means: Means, progress: Progress, trial: Trial | None = None
) -> DiptychError:
    """What `error` of this worker means for the request, which avoids the worker from now on; `trial` hears of it.

    One that has said farewell is not lost: it left. One that drains gets nothing new from anybody, heard or not.
    """
    progress.avoid.add(ref)
    if trial is not None:
        trial.failed(error)
    if isinstance(error, WorkerLost) and means.pools.has_left(ref):
        error = Draining(error.message)
    if isinstance(error, Draining):
        means.pools.suspect(ref)
    return error


def _said_already(error: DiptychError) -> DiptychError:
    """For an error that may end the attempt later: a worker's death is counted once."""
    return Unavailable(error.message) if isinstance(error, WorkerLost) else error
