"""The router's onion, for every front alike: validate → gate (limits, permit) → tokenise once → choose and run → stream.

    Ask ──▶ answer ──▶ Piece, Piece, … , Piece(ending, usage)

The layers are the methods of `Inference`, in this order; the last two are in `router.serving.answers`. Errors are DiptychError,
raised before the first piece or between two; closing the generator cancels everything that the request holds. Does not know
HTTP or gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, DiptychError, InternalError, InvalidRequest, ModelNotFound
from contracts.request import GenerationRequest
from contracts.sampling import MAX_MAX_TOKENS, SamplingParams
from contracts.worker import WorkerInfo
from dashboard.requests import Finished
from observability.log import get_logger
from observability.metrics import RouterMetrics
from observability.stages import Spent
from router.admission.gate import Entry, Gate
from router.admission.rate_limits import prompt_tokens
from router.caller import Caller
from router.choosing import fit
from router.exchange import Ask, Piece, Prompt
from router.prompt_log import Listener, unheard
from router.reply_size import fitted
from router.serving.account import Account
from router.serving.answers import Answers, Making
from router.serving.flow import Flow
from router.serving.progress import Job
from router.serving.trace import Trace
from router.text.prompting import Prompter
from router.workers.registry import Registry

if TYPE_CHECKING:
    from observability.tracing.otel import Tracing

log = get_logger(__name__)
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_REQUEST_ID_CHARS = 128
_MANY_TOKENS = 4096  # to read so many is work that counts, also when nothing comes of it


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
        self.tracing: Tracing | None = None
        self.ended: Callable[[Finished], object] | None = None  # is told of each request that is over

    def began(self, age_s: float) -> float:
        """The instant of the router's clock that is so long ago."""
        return self._clock.now() - age_s

    async def answer(
        self, ask: Ask, timeout_s: float, tell: Callable[[Spent], object] | None = None
    ) -> AsyncGenerator[Piece, None]:
        """The answers in pieces, each answer's last with an ending. It may take `timeout_s`; the ask itself may say less.

        `tell` hears at the end, if there is one, where the time of the first answer went.
        """
        account = Account(ask, self._clock.now())
        times = account.times
        trace = None
        if self.tracing is not None:
            trace = Trace(self.tracing, ask, self.card.name, times.arrived, self._clock)
            ask = trace.ask
        try:
            self._validate(ask)
            deadline = times.arrived + (timeout_s if ask.timeout_s is None else min(timeout_s, ask.timeout_s))
            async with self._gate.enter(ask, deadline) as entry:
                times.admitted = self._clock.now()
                entry.was_read = prompt_tokens(ask) > _MANY_TOKENS
                jobs = await self._tokenise(ask, deadline)
                jobs = fitted(ask, jobs, self.card.tokenizer)
                entry.was_read = False
                times.tokenised = self._clock.now()
                answers = account.answers = Answers(ask, jobs, times, self._making)
                if trace is not None:
                    trace.follow(answers)
                quota = entry.quota
                try:
                    async with aclosing(self.listen(ask, answers.pieces())) as pieces:
                        async for piece in pieces:
                            if piece.usage is not None and piece.ending is not None:
                                account.ended(piece.ending.reason)
                            if quota is not None:  # with the first piece
                                piece, quota = replace(piece, quota=quota), None
                            yield piece
                finally:
                    entry.took(*answers.took)
        except DiptychError as error:
            account.failed(error)
            raise
        except Exception:
            account.failed(InternalError("a fault of ours"))  # else it would count as left by its client
            raise
        finally:
            now = self._clock.now()
            sample = account.write(now, self._metrics, log)
            if tell is not None:
                tell(sample.spent)
            if self.ended is not None:
                self.ended(account.told(now, sample))
            if trace is not None:
                trace.end(now, sample, account)

    @asynccontextmanager
    async def reading(self, caller: Caller, tokens: float, timeout_s: float) -> AsyncIterator[Entry]:
        """Be inside, for at most so long, to turn about so many tokens from text or into it; say how many it took. Raises
        RateLimited, Overloaded and DeadlineExceeded.
        """
        deadline = self._clock.now() + timeout_s
        async with self._gate.read(caller, tokens, deadline) as entry:
            try:
                async with asyncio.timeout(deadline - self._clock.now()):
                    yield entry
            except TimeoutError as error:
                raise DeadlineExceeded("the request's time ran out while its text was read") from error

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
        sampling, least = ask.sampling, max(1, min(ask.sampling.min_tokens, MAX_MAX_TOKENS))
        if sampling.max_tokens < least:
            sampling = replace(sampling, max_tokens=least)
        sampling.validate(self.card.vocab_size)

    async def _tokenise(self, ask: Ask, deadline: float) -> Sequence[Job]:
        """Raises DeadlineExceeded as well: prompts before this one may be long, or a template have its bounds to run into."""
        if all(map(self.prompter.reads_at_once, ask.prompts)):  # nothing is waited for
            return [await self._job(ask, prompt, index, deadline) for index, prompt in enumerate(ask.prompts)]
        try:
            async with asyncio.timeout(deadline - self._clock.now()):
                return [await self._job(ask, prompt, index, deadline) for index, prompt in enumerate(ask.prompts)]
        except TimeoutError as error:
            raise DeadlineExceeded("the request's time ran out while its prompt was read") from error

    async def _job(self, ask: Ask, prompt: Prompt, index: int, deadline: float) -> Job:
        try:
            return await self._job_of(ask, prompt, deadline)
        except InvalidRequest as error:
            if error.field not in ("prompt", "prompt_token_ids"):
                raise
            raise error.at(f"prompt.{index}" if ask.more_prompts else "prompt") from error

    async def _job_of(self, ask: Ask, prompt: Prompt, deadline: float) -> Job:
        known = self._known()
        context = fit.max_model_len(self.card.max_model_len, known, ask.route)
        token_ids = _truncated(ask, await self.prompter.token_ids(prompt), context)
        sampling = self._bounded(ask, len(token_ids), context, known)
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
            tracestate=ask.tracestate,
        )

    def _bounded(self, ask: Ask, num_prompt: int, context: int, known: Sequence[WorkerInfo]) -> SamplingParams:
        """The sampling with max_tokens set. Raises InvalidRequest when no decode worker's KV memory can ever hold it all."""
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


def _truncated(ask: Ask, token_ids: tuple[int, ...], context: int) -> tuple[int, ...]:
    keep = ask.truncate_prompt
    if keep == -1:
        keep = max(1, context - (1 if ask.fill_context else ask.sampling.max_tokens))
    return token_ids if keep is None else token_ids[-keep:]
