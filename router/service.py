"""The router's onion, for every front alike: validate → gate (limits, permit) → tokenise once → choose and run → stream.

    Ask ──▶ answer ──▶ Piece, Piece, … , Piece(ending, usage)

The layers are the methods of `Inference`, in this order; the last two are in `router.serving.answers`. Errors are DiptychError,
raised before the first piece or between two; closing the generator cancels everything that the request holds. Does not know
HTTP or gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, DiptychError, InvalidRequest, ModelNotFound
from contracts.request import FinishReason, GenerationRequest
from contracts.sampling import MAX_MAX_TOKENS, SamplingParams
from contracts.worker import WorkerInfo
from observability.log import get_logger
from observability.metrics import RequestSample, RouterMetrics
from observability.stages import StageTimes
from router.admission.gate import Gate
from router.choosing import fit
from router.exchange import Ask, Piece, Prompt
from router.prompt_log import Listener, unheard
from router.serving.answers import Answers, Making, Times
from router.serving.flow import Flow
from router.serving.progress import Job
from router.text.prompting import Prompter
from router.workers.registry import Registry

log = get_logger(__name__)
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_REQUEST_ID_CHARS = 128


class Inference:
    """Answers asks. Owns nothing: its parts are made by `router.server`."""

    def __init__(
        self,
        prompter: Prompter,
        gate: Gate,
        flow: Flow,
        registry: Registry,
        clock: Clock,
        metrics: RouterMetrics,
    ) -> None:
        self.card = prompter.card
        self.prompter = prompter
        self._gate = gate
        self._making = Making(self.card.tokenizer, flow, clock, metrics)
        self._registry = registry
        self._clock = clock
        self._metrics = metrics
        self.listen: Listener = unheard  # hears what is asked and answered

    async def answer(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Piece, None]:
        """The answers in pieces, each answer's last with an ending. It may take `timeout_s`; the ask itself may say less."""
        times = Times(self._clock.now())
        answers: Answers | None = None
        outcome = "CANCELLED"
        try:
            self._validate(ask)
            deadline = times.arrived + (timeout_s if ask.timeout_s is None else min(timeout_s, ask.timeout_s))
            async with self._gate.enter(ask, deadline) as entry:
                times.admitted = self._clock.now()
                jobs = await self._tokenise(ask, deadline)
                times.tokenised = self._clock.now()
                answers = Answers(ask, jobs, times, self._making)
                quota = entry.quota
                try:
                    async with aclosing(self.listen(ask, answers.pieces())) as pieces:
                        async for piece in pieces:
                            if piece.usage is not None and piece.ending is not None:
                                outcome = piece.ending.reason.value
                            if quota is not None:  # with the first piece
                                piece, quota = replace(piece, quota=quota), None
                            yield piece
                finally:
                    entry.took(*answers.took)
        except DiptychError as error:
            outcome = error.code.value
            raise
        finally:
            sample = self._sample(outcome, answers, times)
            self._metrics.request_finished(sample)
            log.info(
                "request",
                **({"caller": ask.caller.name} if ask.caller.name else {}),
                request_id=ask.request_id,
                outcome=sample.outcome,
                route=sample.route,
                answers=ask.num_answers,
                prompt_tokens=sample.num_prompt_tokens,
                cached_tokens=sample.num_cached_tokens,
                output_tokens=sample.num_output_tokens,
                ttft_s=sample.ttft_s,
                e2e_s=sample.e2e_s,
                **_where(answers),
                **_way(answers),
            )

    @property
    def stopping(self) -> bool:
        """Whether new requests are refused because the router stops."""
        return self._gate.closed

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless this is the served model; an empty name is."""
        if name not in ("", self.card.name):
            raise ModelNotFound(name, (self.card.name,))

    def max_model_len(self) -> int:
        """The context in tokens: the model's, or what the largest of the workers set as theirs if that is less."""
        return fit.max_model_len(self.card.max_model_len, self._known())

    def _known(self) -> list[WorkerInfo]:
        return [worker.info for worker in self._registry.workers()]

    def _validate(self, ask: Ask) -> None:
        self.check_model(ask.model)
        if len(ask.request_id) > MAX_REQUEST_ID_CHARS or not ask.request_id.isprintable():
            said = f"must be printable and have at most {MAX_REQUEST_ID_CHARS} characters"
            raise InvalidRequest("request_id", ask.request_id, said)
        if not -(2**31) <= ask.priority < 2**31:
            raise InvalidRequest("priority", ask.priority, "must fit 32 bits")
        if len(ask.stop) > MAX_STOPS:
            raise InvalidRequest("stop", f"{len(ask.stop)} strings", f"at most {MAX_STOPS}")
        for stop in ask.stop:
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise InvalidRequest("stop", stop, f"each must have from 1 to {MAX_STOP_CHARS} characters")
        # Bounds that do not depend on the prompt, before any work is done for it.
        least = min(ask.sampling.min_tokens, MAX_MAX_TOKENS)
        replace(ask.sampling, max_tokens=max(ask.sampling.max_tokens, least, 1)).validate(self.card.vocab_size)

    async def _tokenise(self, ask: Ask, deadline: float) -> list[Job]:
        """Raises DeadlineExceeded as well: prompts before this one may be long, or a template have its bounds to run into."""
        jobs: list[Job] = []
        try:
            async with asyncio.timeout(deadline - self._clock.now()):
                for index, prompt in enumerate(ask.prompts):
                    jobs.append(await self._job(ask, prompt, index, deadline))
        except TimeoutError as error:
            raise DeadlineExceeded("the request's time ran out while its prompt was read") from error
        return jobs

    async def _job(self, ask: Ask, prompt: Prompt, index: int, deadline: float) -> Job:
        try:
            return await self._job_of(ask, prompt, deadline)
        except InvalidRequest as error:
            if error.field not in ("prompt", "prompt_token_ids"):
                raise
            raise error.at(f"prompt.{index}" if ask.more_prompts else "prompt") from error

    async def _job_of(self, ask: Ask, prompt: Prompt, deadline: float) -> Job:
        context = fit.max_model_len(self.card.max_model_len, self._known(), ask.route)
        token_ids = _truncated(ask, await self.prompter.token_ids(prompt), context)
        sampling = self._bounded(ask, len(token_ids), context)
        GenerationRequest(ask.request_id, token_ids, sampling).validate(self.card.vocab_size, context)
        return Job(
            request_id=ask.request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            deadline=deadline,
            route=ask.route,
            priority=ask.caller.allowed(ask.priority),
            session=ask.session_key,
            traceparent=ask.traceparent,
        )

    def _bounded(self, ask: Ask, num_prompt: int, context: int) -> SamplingParams:
        """The sampling with max_tokens set. Raises InvalidRequest when no decode worker's KV memory can ever hold it all."""
        known = self._known()
        sampling = ask.sampling
        if ask.fill_context:
            room = max(1, fit.most_tokens(context, known) - num_prompt)
            for bound in (ask.fill_at_most, self.card.max_new_tokens):
                if bound is not None:
                    room = min(room, max(bound, sampling.min_tokens))
            sampling = replace(sampling, max_tokens=room)
        needed = num_prompt + sampling.max_tokens - 1  # the last token's KV is never computed
        capacity = fit.kv_capacity(num_prompt + sampling.max_tokens, known)  # None: the context is what to name
        if capacity is not None and needed > capacity:
            fits = f"at most {capacity} fit the KV memory of the largest decode worker"
            raise InvalidRequest("prompt", f"{num_prompt} tokens and max_tokens {sampling.max_tokens}", fits)
        return sampling

    def _sample(self, outcome: str, answers: Answers | None, times: Times) -> RequestSample:
        now = self._clock.now()
        first = times.first_given if times.first_given is not None else times.first_heard
        if answers is None:
            return _nothing_ran(outcome, now - times.arrived)
        progress = answers.first.progress
        lengths = [len(answer.progress.token_ids) for answer in answers.all]
        return RequestSample(
            outcome=outcome,
            succeeded=outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value),
            route=progress.route.value,
            e2e_s=now - times.arrived,
            ttft_s=None if first is None else first - times.arrived,
            num_prompt_tokens=answers.usage.prompt_tokens,
            num_cached_tokens=answers.usage.cached_tokens,
            num_output_tokens=sum(lengths),
            num_longest_tokens=max(lengths),
            max_tokens=progress.job.sampling.max_tokens,
            stages=progress.stages,
            handoffs=tuple(c.progress.handoff for c in answers.all if c.progress.handoff is not None),
            num_failed_handoffs=sum(c.progress.num_handoff_failures for c in answers.all),
        )


def _truncated(ask: Ask, token_ids: tuple[int, ...], context: int) -> tuple[int, ...]:
    keep = ask.truncate_prompt
    if keep == -1:
        keep = max(1, context - (1 if ask.fill_context else ask.sampling.max_tokens))
    return token_ids if keep is None else token_ids[-keep:]


def _nothing_ran(outcome: str, e2e_s: float) -> RequestSample:
    return RequestSample(outcome, False, "none", e2e_s, None, 0, 0, 0, 0, 0, StageTimes(), ())


def _where(answers: Answers | None) -> dict[str, str]:
    """The workers that the first answer last ran on, for the log."""
    return {} if answers is None else {k.value: ref.worker_id for k, ref in answers.first.progress.at.items()}


def _way(answers: Answers | None) -> dict[str, str | float | None]:
    """Why the first answer went its way, and what the ways were predicted to cost and it did, for the log."""
    decision = None if answers is None else answers.first.progress.decision
    if decision is None:
        return {}
    return {
        "decision": decision.path.value,
        "reason": decision.reason.value,
        "predicted_remote_s": decision.predicted_remote_s,
        "predicted_local_s": decision.predicted_local_s,
        "measured_s": decision.measured_s,
        "regret_s": decision.regret_s,
    }
