"""How far one user's request has come, over all its attempts: tokens, failures, stages, hand-off.

The tokens so far are the truth that a next attempt goes on from: `request` makes the prompt for it, `accept` proves that
each token comes once and in order. Does not know workers' addresses or connections.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace

from contracts.clock import Clock
from contracts.errors import (
    DeadlineExceeded,
    DiptychError,
    Draining,
    ErrorCode,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    RetriesSpent,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from contracts.prefill import HandedOff
from contracts.request import ErrorInfo, FinishReason, GenerationRequest, TokenDelta
from contracts.sampling import SamplingParams
from contracts.worker import WorkerKind, WorkerRef
from observability.log import get_logger
from observability.stages import HandoffStats, StageTimes
from router.choosing.route import Decision, Route
from router.config import RetryConfig
from router.policies import Query
from router.serving.retry_budget import RetryBudget
from router.serving.story import Story

log = get_logger(__name__)
_HARMLESS_TOKENS = 8  # who makes so many more in between is not what its workers die of
_FIELD_GOT = re.compile(r"(?P<field>[\w.]+): got (?P<value>.*), (?P<limit>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One user's request, validated and tokenised. `deadline` is an instant of the router's clock."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: float
    route: Route | None = None
    priority: int = 0
    session: str = ""  # see Ask.session_key
    traceparent: str = ""
    tracestate: str = ""


class Progress:
    """One per Job. `num_failures` is what the retry budget is spent on, `num_moves` how often a draining worker gave it up,
    which costs nothing; `avoid` are the workers that did either; `at` is the worker of each pool that it last ran on.
    `beside` is an answer to the same prompt, whose workers have its KV.
    """

    def __init__(
        self,
        job: Job,
        clock: Clock,
        retry: RetryConfig,
        beside: Progress | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        """`budget` is what all requests share, if this one may spend of it."""
        self.job = job
        self.token_ids: list[int] = []
        self.stages = StageTimes()
        self.handoff: HandoffStats | None = None
        self.route = Route.COLOCATED
        self.decision: Decision | None = None  # of the last attempt
        self.query: Query | None = None if beside is None else beside.query  # made when workers are first chosen
        self.num_cached_tokens = 0
        self.num_failures = 0
        self.num_worker_deaths = 0
        self.num_handoff_failures = 0
        self.num_moves = 0
        self._tokens_at_death = 0  # when a worker went away with it last
        self._end: DiptychError | None = None  # what `fail` raised: it may come by again, and is no other failure
        self.avoid: set[WorkerRef] = set()
        self.at: dict[WorkerKind, WorkerRef] = {}
        self.beside = beside
        self.story: Story | None = None  # set where the request is traced
        self._clock = clock
        self._retry = retry
        self._budget = budget
        self._computed_on: set[WorkerRef] = set()  # prompts: the workers that may have this request's own blocks cached
        self._finds_own = False  # whether the attempt that runs may
        self.began_at = clock.now()  # when choosing workers does
        self._departed_at: list[float] = []  # of each attempt
        self.heard_at: list[float] = []  # the first token and the second
        self._timing = True  # until there are both
        self._heard_of = 0  # the number of the attempt that made the first
        self._told_of_gap = {"decode": False, "prefill": False}  # what the workers of both pools know of it
        self._alone = False  # which ran on one worker
        self._heard = False  # whether any delta came
        # Set once the prompt's KV is known to be where an answer beside this one will look for it: on the worker that runs
        # all of it, or on both of a hand-off that is committed.
        self.prompt_cached = asyncio.Event()

    @property
    def time_left_s(self) -> float:
        """Seconds to the deadline, not below 0."""
        return max(0.0, self.job.deadline - self._clock.now())

    def near(self, kind: WorkerKind) -> WorkerRef | None:
        """The worker of this pool that most likely has the prompt's KV, if another answer to it told."""
        return None if self.beside is None else self.beside.at.get(kind)

    def request(self, request_id: str) -> GenerationRequest:
        """What the next attempt runs: the prompt, the tokens so far, the same seed."""
        sampling = self.job.sampling
        if self._heard and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)  # they came with the first delta
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=self.job.prompt_token_ids,
            sampling=sampling,
            output_token_ids=tuple(self.token_ids),
            priority=self.job.priority,
            deadline_s=self.time_left_s,
            traceparent=self.job.traceparent,
            tracestate=self.job.tracestate,
        )

    def departed(self, route: Route) -> None:
        """An attempt was sent off to the workers `at`; the first one ends the time that routing took."""
        self.route = route
        computes = self.at.get(WorkerKind.PREFILL if route is Route.DISAGGREGATED else WorkerKind.DECODE)
        self._finds_own = computes in self._computed_on
        if computes is not None:
            self._computed_on.add(computes)
        now, before = self._clock.now(), self._departed_at
        if not before:
            self.stages = replace(self.stages, route_s=now - self.began_at)
        elif not self.heard_at:
            self.stages = replace(self.stages, retry_s=now - before[0])
        before.append(now)

    def accept(self, delta: TokenDelta) -> TokenDelta:
        """Take a delta into the answer. Raises InternalError when tokens are missing or come again.

        Raises what the delta says when it is the end of an attempt by an error.
        """
        if delta.error is not None:
            raise as_exception(delta.error)
        if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise Unavailable(f"the worker ended the request: {delta.finish_reason}")
        if delta.token_ids and delta.first_index != len(self.token_ids):
            raise InternalError(f"tokens out of order: expected index {len(self.token_ids)}, got {delta.first_index}")
        if not self._heard:
            # What an attempt before this one has left there is no hit of the user's, and how much that is nobody says.
            self.num_cached_tokens = 0 if self._finds_own else delta.num_cached_tokens
        self._heard = True
        self.token_ids.extend(delta.token_ids)
        if self._timing or delta.stages is not None:
            self._time(delta)
        return delta

    def handed_off(self, event: HandedOff) -> None:
        """The prefill worker's account of a hand-off that was committed. Its stages before the first token came with that."""
        self.handoff = event.stats
        if self._tells_gap:
            felt = event.stages
            self._told_of_gap["prefill"] = True
            self.stages = replace(self.stages, transfer_s=felt.transfer_s, commit_s=felt.commit_s)

    def timed(self, gap_s: float | None) -> StageTimes:
        """The stages; those of the gap, once all are known, as they were felt by a client that had the second token so long after
        the first.
        """
        told, heard_at = self._told_of_gap, self.heard_at
        known = (told["decode"] and (told["prefill"] or self._alone)) or self.stages.recover_s > 0
        if gap_s is None or len(heard_at) < 2 or not known:
            return self.stages
        return self.stages.felt(heard_at[1] - heard_at[0], gap_s)

    @property
    def _tells_gap(self) -> bool:
        """Whether the attempt that runs made the first token and, if there is one, the second."""
        return len(self._departed_at) == self._heard_of and not self.stages.recover_s

    def _time(self, delta: TokenDelta) -> None:
        """Keep what this delta, which came just now, says of the first token's time or of the second's; drop what it says of
        others: an attempt that goes on from there reads the prompt again, which is none of their stages.
        """
        told = StageTimes() if delta.stages is None else delta.stages
        if not delta.token_ids:
            return
        if not self.heard_at:
            now = self._clock.now()
            self.heard_at.append(now)
            self._heard_of, self._alone = len(self._departed_at), self.route is Route.COLOCATED
            queue_s, compute_s = told.prefill_queue_s, told.prefill_compute_s
            known = bool(self._departed_at) and delta.stages is not None
            notify_s = max(0.0, now - self._departed_at[-1] - queue_s - compute_s) if known else 0.0
            self.stages = replace(self.stages, prefill_queue_s=queue_s, prefill_compute_s=compute_s, notify_s=notify_s)
        elif len(self.heard_at) == 1:
            self.heard_at.append(self._clock.now())
            self._timing = False
            if len(self._departed_at) != self._heard_of:
                gap_s = self.heard_at[1] - self.heard_at[0]
                self._told_of_gap["decode"] = False
                self.stages = replace(
                    self.stages, transfer_s=0.0, commit_s=0.0, decode_queue_s=0.0, first_step_s=0.0, recover_s=gap_s
                )
        if self._tells_gap:
            queue_s, step_s = told.decode_queue_s, told.first_step_s
            if queue_s or step_s:
                self._told_of_gap["decode"] = True
                self.stages = replace(self.stages, decode_queue_s=queue_s, first_step_s=step_s)

    def fail(self, error: DiptychError, *, with_worker: bool = False) -> bool:
        """Count a failure; raise it when another attempt cannot help or a budget is spent. False for what is none.

        What goes on because its worker is gone (WorkerLost, or `with_worker`) costs nothing of the budget that all share, but
        where that happens to one request again before it gets on: then it is no accident, and trying multiplies load.
        """
        if error is self._end:
            raise error
        if isinstance(error, Draining):
            self.num_moves += 1
            log.info("goes on elsewhere", request_id=self.job.request_id, tokens=len(self.token_ids), reason=error)
            return False
        self.num_failures += 1
        if isinstance(error, WorkerLost):
            grown = len(self.token_ids) - self._tokens_at_death >= _HARMLESS_TOKENS
            self.num_worker_deaths = 1 + (0 if grown else self.num_worker_deaths)
            self._tokens_at_death = len(self.token_ids)
        log.warning(
            "attempt failed",
            request_id=self.job.request_id,
            failures=self.num_failures,
            tokens=len(self.token_ids),
            code=error.code.value,
            reason=error,
        )
        if self.num_worker_deaths > self._retry.max_worker_deaths:
            said = f"given up: {self.num_worker_deaths} workers in a row went away while they had this request"
            self._end = WorkerLost(f"{said}; the last: {error.message}")
        elif not may_retry(error) or self.num_failures > self._retry.max_failures:
            self._end = error
        elif not (self._is_accident(error, with_worker) or self._budget is None or self._budget.spend()):
            self._end = RetriesSpent(f"too much fails here for another try; the last: {error.message}")
            self._end.retry_after_s = self._budget.retry_after_s()
        if self._end is not None:
            raise self._end
        return True

    def _is_accident(self, error: DiptychError, with_worker: bool) -> bool:
        return (with_worker or isinstance(error, WorkerLost)) and self.num_worker_deaths <= 1


def may_retry(error: DiptychError) -> bool:
    """Whether another attempt can help."""
    return error.retryable or isinstance(error, Overloaded | RequestCancelled)


def as_exception(info: ErrorInfo) -> DiptychError:
    """The error that a worker sent as a value, as an exception of the class that its code stands for.

    It lives to tell, so it is never WorkerLost.
    """
    if info.draining:
        return Draining(info.message)
    match info.code:
        case ErrorCode.INVALID_ARGUMENT:
            found = _FIELD_GOT.fullmatch(info.message)
            if found is None:
                return InvalidRequest("request", "this prompt and its parameters", info.message)
            return InvalidRequest(found["field"], _Shown(found["value"]), found["limit"])
        case ErrorCode.RESOURCE_EXHAUSTED:
            return Overloaded(info.message, info.retry_after_s) if info.retry_after_s else Overloaded(info.message)
        case ErrorCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(info.message)
        case ErrorCode.CANCELLED:
            return RequestCancelled(info.message)
        case ErrorCode.UNAVAILABLE:
            return Unavailable(info.message)
        case ErrorCode.FAILED_PRECONDITION | ErrorCode.NOT_FOUND:
            return TransferFailed(info.message)
        case ErrorCode.INTERNAL | ErrorCode.UNAUTHENTICATED | ErrorCode.PERMISSION_DENIED:
            return InternalError(
                info.message
            )  # of the last two: it is the router whom it does not trust, not the client


class _Shown(str):
    """A value that was rendered already, so that it is not quoted a second time."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
