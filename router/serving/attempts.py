"""One attempt at a request: what every attempt works with and judges errors by, and the one on a decode worker alone.

    Alone       generate ──▶ tokens … finish
    HandOver    over both pools, with a hand-off between: `router.serving.handover`

An attempt yields deltas as they come and raises DiptychError when it cannot go on. However it ends, also by the client
leaving, both legs are cancelled before `deltas` returns. Does not know retries, text or clients.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from contracts.clock import Clock
from contracts.errors import DiptychError, Draining, InternalError, Unavailable, WorkerLost
from contracts.request import TokenDelta
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.choosing.choice import Chooser
from router.choosing.route import Route
from router.config import RetryConfig
from router.halt import Halt
from router.serving.alarms import Alarms, out_of_time
from router.serving.inbox import DecodeLost, DecodeTokens, Inbox, TimeUp
from router.serving.progress import Progress, as_exception
from router.serving.retry_budget import RetryBudget
from router.workers.breakers import Trial
from router.workers.pairs import Verdicts
from router.workers.pools import Claim, Pools


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
                            raise judged(
                                as_exception(delta.error), self._decode.ref, self._means, self._progress, claim.trial
                            )
                        claim.computed()
                        self._progress.prompt_cached.set()
                        yield delta
                    case DecodeLost(_, error):
                        raise judged(error, self._decode.ref, self._means, self._progress, claim.trial)
                    case TimeUp(error):
                        raise error or out_of_time()
                    case event:
                        raise InternalError(f"{type(event).__name__} came to a request that runs alone")
        finally:
            session.cancel(request.request_id)
            claim.release()
            alarms.cancel()


def judged(
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


def said_already(error: DiptychError) -> DiptychError:
    """For an error that may end the attempt later: a worker's death is counted once."""
    return Unavailable(error.message) if isinstance(error, WorkerLost) else error
