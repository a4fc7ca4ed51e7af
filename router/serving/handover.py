"""One attempt at a request over both pools, with a hand-off between.

    SENDING ──handed_off──▶ SETTLED ◀──handed_off, or its books will not come──┐
       │ ▲                      ▲                                              │
       │ │ another              └──────────────tokens of decode──▶ DECODING ───┘
       │ │ target
       │ └────── handoff_failed, decode lost                     decode lost once it is committed, prefill lost before:
       └──decode gave it up──▶ DOUBTED ──the prefill worker     the attempt fails; the flow makes another from the
                               says why──▶ another target       tokens so far

The first token comes before, between or after; nothing of decode's is passed on before it, nor the last delta before the books.
A hand-off that fails while the prefill worker holds the KV is aimed at another decode worker, under a new id, at once; the prefill
worker acknowledges that within handoff_verdict_s: handoff_failed of the old id, or handed_off, which is too late. See
`router.serving.attempts` for what is true of every attempt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Final

from contracts.errors import DiptychError, Draining, InternalError, RequestCancelled, Unavailable, WorkerLost
from contracts.prefill import FirstTokens, HandedOff, HandoffFailed, Target
from contracts.request import TokenDelta
from contracts.worker import WorkerInfo, WorkerKind
from router.choosing.route import Route
from router.serving.alarms import Alarms
from router.serving.attempts import Means, judged, said_already
from router.serving.inbox import DecodeLost, DecodeTokens, Event, Inbox, PrefillEnded, TimeUp
from router.serving.progress import Progress, as_exception, may_retry
from router.workers.breakers import Trial
from router.workers.pairs import Pair
from router.workers.pools import Claim

_BOOKS_S = 0.5  # how long a finished answer waits for the prefill worker's account of the hand-off


class Stage(IntEnum):
    """Drawn above. From DECODING on the hand-off is committed: decode has the KV."""

    SENDING = 0
    DOUBTED = 1  # decode gave it up because it was told to, and the prefill worker is about to say why
    DECODING = 2
    SETTLED = 3  # the hand-off's stats and the prefill worker's stages are in, or will not come

    @property
    def committed(self) -> bool:
        """Whether decode has the KV."""
        return self >= Stage.DECODING


class News(IntEnum):
    """What a hand-over hears that may move it."""

    TOKENS = 0  # of decode
    HANDED_OFF = 1
    GIVEN_UP = 2  # by decode, cancelled
    AIMED = 3  # at another decode worker
    NO_BOOKS = 4  # the prefill worker has ended, has not heard of the commit, or says nothing for too long


TRANSITIONS: Final[Mapping[tuple[Stage, News], Stage]] = {
    (Stage.SENDING, News.TOKENS): Stage.DECODING,
    (Stage.SENDING, News.HANDED_OFF): Stage.SETTLED,
    (Stage.SENDING, News.GIVEN_UP): Stage.DOUBTED,
    (Stage.SENDING, News.AIMED): Stage.SENDING,
    (Stage.DOUBTED, News.TOKENS): Stage.DECODING,
    (Stage.DOUBTED, News.HANDED_OFF): Stage.SETTLED,  # too late: decode has dropped it, and the attempt fails
    (Stage.DOUBTED, News.GIVEN_UP): Stage.DOUBTED,
    (Stage.DOUBTED, News.AIMED): Stage.SENDING,
    (Stage.DECODING, News.TOKENS): Stage.DECODING,
    (Stage.DECODING, News.HANDED_OFF): Stage.SETTLED,
    (Stage.DECODING, News.NO_BOOKS): Stage.SETTLED,
    (Stage.SETTLED, News.TOKENS): Stage.SETTLED,
    (Stage.SETTLED, News.HANDED_OFF): Stage.SETTLED,
    (Stage.SETTLED, News.NO_BOOKS): Stage.SETTLED,
}


class _Past:
    """Hand-offs that were given up for another: why, and which of them the prefill worker has not acknowledged yet."""

    def __init__(self) -> None:
        self.why: dict[str, DiptychError] = {}  # by hand-off id
        self.unheard: set[str] = set()
        self.silence: Callable[[], object] = lambda: None  # ends the wait for that

    def wait(self, handoff_id: str, silence: Callable[[], object]) -> None:
        """This one is to be acknowledged, too."""
        self.unheard.add(handoff_id)
        self.silence = silence

    def hear(self, handoff_id: str) -> None:
        """With the last of them nothing is waited for any more."""
        if self.unheard == {handoff_id}:
            self.silence()
        self.unheard.discard(handoff_id)

    def hear_all(self) -> None:
        """The prefill worker goes along."""
        if self.unheard:
            self.silence()
            self.unheard.clear()


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
        self._stage = Stage.SENDING
        self._first_came = False
        # While it is doubted: what decode said, and what silences the wait for the prefill worker's word.
        self._doubt: tuple[DiptychError, Callable[[], object]] | None = None
        self._past = _Past()
        self._early: list[TokenDelta] = []  # decode's news that must wait for news of the prefill worker

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """See `router.serving.attempts`."""
        request = self._progress.request(self._means.new_id())
        claim = Claim(
            self._means.pools,
            self._prefill.ref,
            self._means.chooser.prompts.sent(self._progress, self._prefill.ref, WorkerKind.PREFILL, request.num_tokens),
            lambda error: self._inbox.put_nowait(PrefillEnded(error)),
        )
        self._prefill_trial = claim.trial
        try:
            self._alarms.deadline(self._progress.time_left_s)
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
                if self._stage.committed:
                    claim.release()
        finally:
            self._leg.cancel()
            self._detach()
            claim.release()
            self._alarms.cancel()

    def _turn(self, news: News) -> None:
        self._stage = TRANSITIONS[self._stage, news]
        if self._stage.committed:
            self._progress.prompt_cached.set()
            if self._progress.story is not None:
                self._progress.story.committed()
            if self._decode_claim is not None:
                self._decode_claim.computed()

    def _on(self, event: Event) -> Sequence[TokenDelta]:
        """One event; the deltas that may be passed on because of it."""
        match event:
            case FirstTokens(delta):
                return self._on_first(delta)
            case DecodeTokens(delta):
                self._on_decode(delta)
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
                if self._past.unheard:
                    self._progress.avoid.add(self._prefill.ref)
                if error is not None:
                    raise error
                self._turn(News.NO_BOOKS)
        return self._held_back()

    def _on_first(self, delta: TokenDelta) -> Sequence[TokenDelta]:
        self._first_came = True
        if delta.error is not None:
            raise judged(as_exception(delta.error), self._prefill.ref, self._means, self._progress, self._prefill_trial)
        return (delta, *self._held_back())

    def _on_decode(self, delta: TokenDelta) -> None:
        if delta.request_id != self._target.handoff_id:
            return  # of a hand-off that was given up
        if delta.error is not None:
            self._on_decode_failed(as_exception(delta.error), lost=False)
            return
        self._past.hear_all()
        self._turn(News.TOKENS)
        self._early.append(delta)

    def _held_back(self) -> Sequence[TokenDelta]:
        """What of decode's news may go on: nothing before the first token, and the last not before the hand-off's books."""
        if not (self._first_came and self._early):
            return ()
        ready, self._early = self._early, []
        if ready[-1].finish_reason is not None and self._stage is not Stage.SETTLED:
            self._early = [ready.pop()]
            self._alarms.set(_BOOKS_S, None)
        return ready

    def _on_handed_off(self, event: HandedOff) -> None:
        if event.handoff_id in self._past.why:  # committed before our word came: the KV is where nobody reads it
            raise self._past.why[event.handoff_id]
        if event.handoff_id != self._target.handoff_id:
            raise InternalError(f"hand-off {event.handoff_id} succeeded, which is not the one that was asked for")
        self._turn(News.HANDED_OFF)
        self._means.verdicts.worked(self._pair)
        self._progress.handed_off(event)
        if self._doubt is not None:
            raise self._doubt[0]

    def _on_prefill_ended(self, error: DiptychError | None) -> None:
        if self._stage.committed and self._first_came:  # decode has all it needs
            self._turn(News.NO_BOOKS)
            return
        ref = self._prefill.ref
        error = error or InternalError(f"prefill worker {ref.worker_id} ended the call without an outcome")
        error = judged(error, ref, self._means, self._progress, self._prefill_trial)
        if isinstance(error, Unavailable):
            self._means.pools.suspect(ref)
        raise error

    def _on_decode_failed(self, error: DiptychError, *, lost: bool) -> None:
        """The KV is still at the prefill worker: a second push is cheaper than a second prefill. Raises after the commit."""
        # Of a worker that is there, a failed hand-off is the pair's: its breaker hears only of what is surely its own.
        to_blame = self._decode_claim if lost or self._stage.committed or isinstance(error, InternalError) else None
        trial = None if to_blame is None else to_blame.trial
        error = judged(error, self._target.decode, self._means, self._progress, trial)
        if self._stage.committed:
            raise error
        if not lost:  # it is there, and has not got the KV
            self._means.verdicts.failed(self._pair, error)
        if isinstance(error, WorkerLost) and not self._first_came:  # not of this request: it had nothing of it
            error = Unavailable(error.message)
        verdict_s = self._means.retry.handoff_verdict_s
        if lost or not isinstance(error, RequestCancelled):
            before = self._target.handoff_id
            self._aim_elsewhere(error, with_worker=lost)
            self._past.wait(before, self._alarms.set(verdict_s, said_already(error)))
            return
        self._turn(News.GIVEN_UP)
        if self._doubt is None:
            self._doubt = error, self._alarms.set(verdict_s, error)

    def _on_handoff_failed(self, event: HandoffFailed) -> None:
        self._past.hear(event.handoff_id)
        if event.handoff_id == self._target.handoff_id and self._stage.committed:
            self._turn(News.NO_BOOKS)  # its tokens come: only the word of it did not get back to the prefill worker,
            self._leg.cancel()  # which would hold the KV for another target now
        elif event.handoff_id == self._target.handoff_id:
            error = judged(as_exception(event.error), self._target.decode, self._means, self._progress)
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
        self._past.why[self._target.handoff_id] = said_already(error)
        self._past.silence()
        self._target = Target(self._means.new_id(), decode.ref, decode.address)
        self._turn(News.AIMED)
        if self._doubt is not None:
            self._doubt[1]()
            self._doubt = None
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
