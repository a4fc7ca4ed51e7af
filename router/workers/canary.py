"""Tiny requests of the router's own, by the way that users' requests take, over one given pair of workers.

    every spacing_s: the pair that is due (`pairs.PairBook.due`) ──▶ HandOver over it ──▶ a hand-off was committed: OK
                                                                       └─ it failed, or did not end in time: FAILED

A canary has a prompt of less than a block, so no prefix cache keeps it and its KV really travels, and makes two tokens: one
at each worker. It is no user's request: it takes no permit and is in no metric but its own. When every pair is bad, which
leaves requests to decode workers alone, that is said aloud, once. Does not know users' requests, nor when a pair is bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum

from contracts.errors import DeadlineExceeded, DiptychError, TransferFailed, WorkerLost
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerKind, WorkerRef
from observability.log import get_logger
from observability.metrics import RouterMetrics
from router.choosing.route import Route
from router.config import CanaryConfig
from router.policies import Candidate
from router.serving.attempts import Means
from router.serving.handover import HandOver
from router.serving.progress import Job, Progress
from router.workers.pairs import Pair, PairBook, may_be_the_way

log = get_logger(__name__)
_PROMPT = (1, 2, 3)  # ids that every vocabulary has; fewer than a block
_SAMPLING = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
_FULL = 0.95  # share of a decode worker's KV memory in use
_WORKERS_SHARE = 0.8  # of a canary's time, so that what they say was missing (room!) comes before it is over


class Outcome(StrEnum):
    """What a canary says of its pair."""

    OK = "ok"
    FAILED = "failed"
    UNDECIDED = "undecided"  # what went wrong was not the way between the two


@dataclass(slots=True)
class _Heard:
    """What was heard of one canary over `pair`. The Verdicts of its attempt."""

    pair: Pair
    committed: bool = False
    first_came: bool = False
    crowded: bool = False  # the decode worker, at the end: then it may be room that is missing
    refusal: DiptychError | None = None  # why its hand-off was given up
    end: DiptychError | None = None  # why its answer is not whole

    def worked(self, pair: Pair) -> None:
        self.committed = self.committed or pair == self.pair  # a worker that drains sends it elsewhere

    def failed(self, pair: Pair, error: DiptychError) -> None:
        if pair == self.pair:
            self.refusal = error

    def fault(self) -> DiptychError | None:
        """What is wrong with the way between the two; None when nothing is, or when it was not put to the test."""
        if self.committed:
            return None
        if isinstance(self.refusal or self.end, DeadlineExceeded):  # its deadline was long enough
            late = TransferFailed("the first token came, and the hand-off did not end in its time")
            return late if self.first_came and not self.crowded else None
        return self.refusal if self.refusal is not None and may_be_the_way(self.refusal) else None


class _CanaryProgress(Progress):
    """Gives the workers less time than the canary has."""

    def request(self, request_id: str) -> GenerationRequest:
        return replace(super().request(request_id), deadline_s=self.time_left_s * _WORKERS_SHARE)


class Canary:
    """Sends canaries, one at a time, and writes into the book what they say."""

    def __init__(self, means: Means, book: PairBook, config: CanaryConfig, metrics: RouterMetrics) -> None:
        self._means = replace(means, retry=replace(means.retry, max_handoff_failures=0))  # no other target
        self._book = book
        self._config = config
        self._metrics = metrics
        self._all_bad = False
        self._stopped = not config.enabled

    def stop(self) -> None:
        """Send no more; one that is under way ends by itself."""
        self._stopped = True

    async def run(self) -> None:
        """Send them where they are due until stopped or cancelled; returns at once where they are off."""
        while not self._stopped:
            pair = self._book.due(self._means.chooser.pairs())
            if pair is not None:
                await self.probe(pair)
            self._say_whether_any_works()
            await self._means.clock.sleep(self._config.spacing_s)

    async def probe(self, pair: Pair) -> Outcome:
        """Send one over this pair and write down what it says."""
        heard = await self._send(pair)
        fault = heard.fault()
        if heard.committed:
            self._book.worked(pair)
            outcome = Outcome.OK if heard.end is None else Outcome.UNDECIDED
        elif fault is not None:
            self._book.canary_failed(pair, fault)
            outcome = Outcome.FAILED
        else:
            self._book.canary_said_nothing(pair)
            outcome = Outcome.UNDECIDED
        log.debug("canary", prefill=pair.prefill.worker_id, decode=pair.decode.worker_id, outcome=outcome.value)
        self._metrics.canary_ended(outcome.value)
        return outcome

    async def _send(self, pair: Pair) -> _Heard:
        pools, clock, heard = self._means.pools, self._means.clock, _Heard(pair)
        job = Job(
            request_id=f"canary-{self._means.new_id()}",
            prompt_token_ids=_PROMPT,
            sampling=_SAMPLING,
            deadline=clock.now() + self._config.timeout_s,
            route=Route.DISAGGREGATED,
        )
        progress = _CanaryProgress(job, clock, self._means.retry)
        try:
            prefill = _find(pools.candidates(WorkerKind.PREFILL), pair.prefill)
            decode = _find(pools.candidates(WorkerKind.DECODE), pair.decode)
            attempt = HandOver(replace(self._means, verdicts=heard), progress, prefill.info, decode.info)
            async with aclosing(attempt.deltas()) as deltas:
                async for delta in deltas:
                    progress.accept(delta)
                    heard.first_came = True
                    if delta.finish_reason is not None:
                        return heard
        except DiptychError as error:
            heard.end = error
            now = [c for c in pools.candidates(WorkerKind.DECODE) if c.info.ref == pair.decode]
            heard.crowded = any(c.load.kv_usage > _FULL or c.load.num_waiting for c in now)
        return heard

    def _say_whether_any_works(self) -> None:
        pairs, bad = self._means.chooser.pairs(), self._means.chooser.bad_pairs()
        all_bad = bool(pairs) and len(bad) == len(pairs)
        if all_bad and not self._all_bad:
            reasons = sorted({self._book.reason(pair) for pair in bad})
            log.error("no hand-off gets through: requests run on decode workers alone", pairs=len(bad), why=reasons[0])
        elif self._all_bad and not all_bad and pairs:
            log.info("hand-offs get through again")
        self._all_bad = all_bad


def _find(pool: Sequence[Candidate], ref: WorkerRef) -> Candidate:
    """Raises WorkerLost when it takes no work any more."""
    for candidate in pool:
        if candidate.info.ref == ref:
            return candidate
    raise WorkerLost(f"worker {ref.worker_id} takes no work any more")
