"""One request's life over the pools: choose, attempt, and attempt again from the tokens so far when something broke.

    choose ──▶ attempt ──▶ deltas … finish
       ▲          ├── fails: counted, backed off, excluded ──┐        over the budget: the error goes to the client
       │          └── its worker drains: excluded ───────────┤
       └─────────────────────────────────────────────────────┘

The same seed goes with every attempt, and a token is a function of (seed, position), so a client sees a pause, never
another answer. Does not know text, HTTP or gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from contracts.errors import DeadlineExceeded, DiptychError, Draining, InternalError, Overloaded, Unavailable
from contracts.request import TokenDelta
from contracts.worker import WorkerKind
from observability.metrics import RouterMetrics
from router.choosing.advisor import Advisor, Watch
from router.choosing.route import Reason, Route
from router.serving.attempts import Alone, Means
from router.serving.handover import HandOver
from router.serving.progress import Job, Progress
from router.serving.waiting import Waiting
from router.workers.registry import Change

# Before a request that waits for a worker looks at its own times again; the least is what differences of instants are off by.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.001, 1.0
_Begun = tuple[Alone | HandOver, Watch]


class Flow:
    """Runs jobs. Owns nothing; `means` are shared by all requests."""

    def __init__(self, means: Means, metrics: RouterMetrics, advisor: Advisor) -> None:
        """`advisor` says which way an attempt goes where both are there, and hears how it went."""
        self._means = means
        self._advisor = advisor
        self._metrics = metrics
        self._started_at = means.clock.now()
        self._waiting = Waiting(means.chooser.offer, means.clock, means.halt)

    def on_change(self, change: Change) -> None:
        """A worker came or went: who waits for one need not wait for the next look."""
        del change
        self._waiting.look()

    def start(self, job: Job, beside: Progress | None = None) -> Progress:
        """The books of a new job, to be passed to `deltas` and read when it ends; `beside` is an answer to the same prompt."""
        self._means.budget.asked()
        return Progress(job, self._means.clock, self._means.retry, beside, self._means.budget)

    async def deltas(self, progress: Progress) -> AsyncGenerator[TokenDelta, None]:
        """The answer's tokens, each once and in order; the last delta has a finish_reason of STOP or LENGTH.

        Raises DiptychError when the request cannot be served. Close the generator to cancel both legs at once.
        """
        while True:
            watch: Watch | None = None
            try:
                attempt, watch = await self._next_attempt(progress)
                made, story = attempt.deltas(), progress.story
                async with aclosing(made if story is None else story.told(made, progress)) as deltas:
                    async for delta in deltas:
                        now = self._means.clock.now()
                        progress.accept(delta)
                        if delta.finish_reason is not None:
                            watch.heard(delta, now)
                            yield delta
                            return
                        yield delta  # first: what is learnt of it is nobody's wait
                        watch.heard(delta, now)
                raise InternalError("an attempt ended without a finish reason")
            except DiptychError as error:
                if isinstance(error, Draining):
                    self._metrics.attempt_drained(len(progress.token_ids))
                else:
                    self._metrics.attempt_failed(error.code.value)
                if isinstance(error, Overloaded) and not self._another_may_have_room(progress):
                    raise
                counted = progress.fail(error)
                if counted:
                    self._metrics.retried()
                if progress.token_ids:
                    self._metrics.migrated("failure" if counted else "drain")
            finally:
                if watch is not None:
                    watch.end()
            if counted:
                await self._back_off(progress)

    def _another_may_have_room(self, progress: Progress) -> bool:
        alone = progress.job.route is Route.COLOCATED
        kinds = (WorkerKind.DECODE,) if alone else tuple(WorkerKind)
        return self._means.chooser.has_other(kinds, progress)

    async def _next_attempt(self, progress: Progress) -> _Begun:
        """Waits for workers if the request ran already, if one is known that is not ready just now, if the last has gone only
        just now (it may be on its way back), or if this router is so young that its workers may not have found it yet.
        """
        clock, retry = self._means.clock, self._means.retry
        give_up = clock.now() + retry.worker_wait_s
        while True:
            self._means.halt.check()
            attempt = self._attempt_now(progress)
            if attempt is not None:
                return attempt
            missing, why = self._missing(progress)
            if progress.time_left_s == 0:
                raise DeadlineExceeded(f"the request's time ran out while it waited: {why}")
            left_s = give_up - clock.now()
            if progress.num_failures + progress.num_moves == 0:  # one that ran waits in any case
                left_s = min(left_s, self._may_come_s(missing))
            if left_s <= 0:
                raise _NoWorker(why)
            await self._waiting.news(max(_SHORTEST_WAIT_S, min(_LONGEST_WAIT_S, left_s, progress.time_left_s)))

    def _may_come_s(self, missing: WorkerKind | None) -> float:
        """For how long yet a worker of this pool, of which none is ready, may come by itself."""
        if missing is None:
            return 0.0
        clock, retry = self._means.clock, self._means.retry
        young_s = self._started_at + retry.first_worker_wait_s - clock.now()
        return max(young_s, retry.worker_wait_s - self._means.pools.absent_s(missing))

    def _attempt_now(self, progress: Progress) -> _Begun | None:
        """None when a worker that it needs is not there."""
        chooser, route = self._means.chooser, progress.job.route
        why_alone = self._why_alone(progress)
        if why_alone is None:
            forced = route is Route.DISAGGREGATED
            pair = chooser.pair(progress, forced=forced)
            if pair is not None:
                watch = self._advisor.begin(progress, pair, Reason.REQUEST if forced else None)
                if watch.path is Route.COLOCATED:
                    return Alone(self._means, progress, pair[1]), watch
                return HandOver(self._means, progress, *pair), watch
            if forced:
                return None
            why_alone = Reason.NO_PAIR
        decode = chooser.decode(progress)
        if decode is None:
            return None
        return Alone(self._means, progress, decode), self._advisor.begin_alone(progress, decode, why_alone)

    def _why_alone(self, progress: Progress) -> Reason | None:
        """Why the attempt goes on a decode worker alone whatever it costs; None when it may go both ways."""
        if progress.job.route is not None:
            return Reason.REQUEST if progress.job.route is Route.COLOCATED else None
        if progress.num_handoff_failures > self._means.retry.max_handoff_failures:
            return Reason.HANDOFFS_FAILED
        return Reason.NEVER if self._advisor.never else None

    def _missing(self, progress: Progress) -> tuple[WorkerKind | None, str]:
        """Of which pool no worker is ready, decode first; none where it is only that every pair is bad. And in words."""
        for kind in (WorkerKind.DECODE, WorkerKind.PREFILL):
            if not self._means.pools.candidates(kind):
                return kind, f"no {kind} worker is ready"
            if not self._means.chooser.candidates(kind, progress):
                return kind, f"no {kind} worker is ready that is large enough for the request"
        return None, "no prefill worker can hand over to any decode worker: every pair of them is bad, see /health"

    async def _back_off(self, progress: Progress) -> None:
        pause = self._means.retry.backoff_s * 2 ** min(progress.num_failures - 1, 6)
        await self._means.clock.sleep(min(pause, progress.time_left_s))


class _NoWorker(Unavailable):
    """Waited for workers as long as it makes sense; another attempt would only wait again."""

    retryable = False
