"""One request's life over the pools: choose, attempt, and attempt again from the tokens so far when something broke.

    choose ──▶ attempt ──▶ deltas … finish
       ▲          └── fails: counted, backed off, excluded ──┐        over the budget: the error goes to the client
       └─────────────────────────────────────────────────────┘

The same seed goes with every attempt, and a token is a function of (seed, position), so a client sees a pause, never
another answer. Does not know text, HTTP or gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from contracts.errors import DeadlineExceeded, DiptychError, InternalError, Overloaded, Unavailable
from contracts.request import TokenDelta
from contracts.worker import WorkerInfo, WorkerKind
from observability.metrics import RouterMetrics
from router.attempts import Alone, HandOver, Means
from router.exchange import Route
from router.progress import Job, Progress

_POLL_S = 0.05  # while there is no worker


class Flow:
    """Runs jobs. Owns nothing; `means` are shared by all requests."""

    def __init__(self, means: Means, metrics: RouterMetrics) -> None:
        self._means = means
        self._metrics = metrics
        self._started_at = means.clock.now()

    def start(self, job: Job, beside: Progress | None = None) -> Progress:
        """The books of a new job, to be passed to `deltas` and read when it ends; `beside` is an answer to the same prompt."""
        return Progress(job, self._means.clock, self._means.retry.max_failures, beside)

    async def deltas(self, progress: Progress) -> AsyncGenerator[TokenDelta, None]:
        """The answer's tokens, each once and in order; the last delta has a finish_reason of STOP or LENGTH.

        Raises DiptychError when the request cannot be served. Close the generator to cancel both legs at once.
        """
        while True:
            try:
                attempt = await self._next_attempt(progress)
                async with aclosing(attempt.deltas()) as deltas:
                    async for delta in deltas:
                        yield progress.accept(delta)
                        if delta.finish_reason is not None:
                            return
                raise InternalError("an attempt ended without a finish reason")
            except DiptychError as error:
                self._metrics.attempt_failed(error.code.value)
                if isinstance(error, Overloaded) and not self._another_may_have_room(progress):
                    raise
                progress.fail(error)
            await self._back_off(progress)

    def _another_may_have_room(self, progress: Progress) -> bool:
        alone = progress.job.route is Route.COLOCATED
        kinds = (WorkerKind.DECODE,) if alone else tuple(WorkerKind)
        return self._means.chooser.has_other(kinds, progress.avoid)

    async def _next_attempt(self, progress: Progress) -> Alone | HandOver:
        decode = await self._worker(WorkerKind.DECODE, progress)
        prefill = await self._prefill_worker(progress)
        if prefill is None:
            return Alone(self._means, progress, decode)
        return HandOver(self._means, progress, prefill, decode)

    async def _prefill_worker(self, progress: Progress) -> WorkerInfo | None:
        """None when the request shall run on a decode worker alone."""
        match progress.job.route:
            case Route.COLOCATED:
                return None
            case Route.DISAGGREGATED:
                return await self._worker(WorkerKind.PREFILL, progress)
            case None:
                if progress.num_handoff_failures > self._means.retry.max_handoff_failures:
                    return None
                # A decode worker alone is better than a prefill worker that has failed this request already.
                return self._means.chooser.choose_fresh(WorkerKind.PREFILL, progress, progress.avoid)

    async def _worker(self, kind: WorkerKind, progress: Progress) -> WorkerInfo:
        """A ready worker. Waits for one if the request ran already, if one is known that is not ready just now, or if this
        router is so young that its workers may not have found it yet.
        """
        clock, retry = self._means.clock, self._means.retry
        give_up = clock.now() + retry.worker_wait_s
        while True:
            self._means.halt.check()
            chosen = self._means.chooser.choose(kind, progress)
            if chosen is not None:
                return chosen
            if progress.time_left_s == 0:
                raise DeadlineExceeded(f"the request's time ran out while it waited for a {kind} worker")
            young = clock.now() < self._started_at + retry.first_worker_wait_s
            hopeful = progress.num_failures > 0 or young or self._means.pools.knows_any(kind)
            if not hopeful or clock.now() >= give_up:
                raise _NoWorker(f"no {kind} worker is ready")
            await clock.sleep(min(_POLL_S, progress.time_left_s))

    async def _back_off(self, progress: Progress) -> None:
        pause = self._means.retry.backoff_s * 2 ** min(progress.num_failures - 1, 6)
        await self._means.clock.sleep(min(pause, progress.time_left_s))


class _NoWorker(Unavailable):
    """Waited for a worker as long as it makes sense; another attempt would only wait again."""

    retryable = False
