"""One request as a tree of spans: the request, and under it its stages, beside each other.

    chat MODEL ─┬─ admission ─ tokenise ─ route
                ├─ prefill ─ transfer ─ decode            of each attempt at each answer
                └─ prefill …

The router draws all of it, from instants of its own clock, and puts the durations that workers told into attributes: no clocks
of two machines are compared (ADR 0035). Decode is never under prefill, whose span would be shorter than its child. The names of
attributes are OpenTelemetry's gen_ai.*, vLLM's gen_ai.latency.* and, for what neither has, diptych.*. Does not know OTLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from contracts.clock import Clock
from contracts.worker import WorkerKind
from observability.metrics import RequestSample
from router.choosing.route import Route
from router.exchange import Ask, ChatPrompt
from router.serving.account import Account
from router.serving.answers import Answer, Answers
from router.serving.story import Attempt, Story

if TYPE_CHECKING:
    from observability.tracing.otel import RequestSpan, Tracing

Values = dict[str, str | bool | int | float | tuple[str, ...]]


class Trace:
    """Of one request, from its arrival on. Costs a span where nobody looks: what the caller sampled, or did not, is honoured."""

    def __init__(self, tracing: Tracing, ask: Ask, model: str, arrived: float, clock: Clock) -> None:
        """`ask` as it came."""
        self._operation = "chat" if isinstance(ask.prompt, ChatPrompt) else "text_completion"
        self._model = model
        self._clock = clock
        name = f"{self._operation} {model}"
        self._span = tracing.request(name, ask.traceparent, ask.tracestate, arrived, clock.now())
        # Whoever works for it is told of this span, not of its caller's.
        self.ask = replace(ask, traceparent=self._span.traceparent, tracestate=self._span.tracestate)

    def follow(self, answers: Answers) -> None:
        """They are about to begin."""
        if self._span.recording:
            for answer in answers.all:
                answer.progress.story = Story(self._clock)

    def end(self, ended: float, sample: RequestSample, account: Account) -> None:
        """The request is over, and so is all that was done for it."""
        span = self._span
        if not span.recording:
            return
        error = "" if sample.succeeded else sample.outcome
        times = account.times
        admitted = ended if times.admitted is None else times.admitted
        span.stage("admission", times.received, admitted, {}, "" if times.admitted is not None else error)
        if times.admitted is not None:
            tokenised = ended if times.tokenised is None else times.tokenised
            span.stage("tokenise", times.admitted, tokenised, {}, "" if times.tokenised is not None else error)
        if account.answers is not None:
            for answer in account.answers.all:
                _tell_answer(span, answer, ended, error)
        span.end(ended, {**self._asked(), **_came_to(sample, account)}, error)

    def _asked(self) -> Values:
        ask, sampling = self.ask, self.ask.sampling
        values: Values = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "diptych",
            "gen_ai.request.model": ask.model or self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": ask.request_id,
            "gen_ai.request.n": ask.num_answers,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
        }
        if not ask.fill_context:
            values["gen_ai.request.max_tokens"] = sampling.max_tokens
        if ask.num_answers > 1:
            values["gen_ai.request.choice.count"] = ask.num_answers
        return values


def _came_to(sample: RequestSample, account: Account) -> Values:
    stages = sample.stages
    queued_s = stages.admission_s + stages.prefill_queue_s
    values: Values = {
        "gen_ai.usage.input_tokens": sample.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sample.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": sample.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": sample.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": sample.num_output_tokens,
        "gen_ai.latency.e2e": sample.e2e_s,
        "gen_ai.latency.time_in_queue": queued_s,
        "diptych.route": sample.route,
    }
    if sample.ttft_s is not None:
        values["gen_ai.latency.time_to_first_token"] = sample.ttft_s
        values["gen_ai.latency.time_in_model_prefill"] = stages.prefill_compute_s
        values["gen_ai.latency.time_in_model_decode"] = max(0.0, sample.e2e_s - sample.ttft_s)
        values["gen_ai.latency.time_in_model_inference"] = max(0.0, sample.e2e_s - queued_s)
    if sample.succeeded and account.answers is not None:
        values["gen_ai.response.finish_reasons"] = (sample.outcome,)
    decision = None if account.answers is None else account.answers.first.progress.decision
    if decision is not None:
        values["diptych.decision.reason"] = decision.reason.value
    return values


def _tell_answer(span: RequestSpan, answer: Answer, ended: float, error: str) -> None:
    story, times = answer.progress.story, answer.times
    if story is None:
        return
    attempts = story.attempts
    if answer.index == 0 and times.tokenised is not None:
        lost = "" if attempts else error
        span.stage("route", times.tokenised, attempts[0].begun if attempts else ended, {}, lost)
    for number, attempt in enumerate(attempts, 1):
        of_it: Values = {"diptych.answer.index": answer.index, "diptych.attempt": number}
        _tell_attempt(span, attempt, of_it, ended, error)


def _tell_attempt(span: RequestSpan, attempt: Attempt, of_it: Values, ended: float, outcome: str) -> None:
    """Its stages in their order; the one in which it stopped has the error."""
    end = ended if attempt.ended is None else attempt.ended
    error = attempt.error or ("" if attempt.finished else outcome)
    two_pools = attempt.route is Route.DISAGGREGATED
    reader = _worker(attempt, WorkerKind.PREFILL if two_pools else WorkerKind.DECODE)
    before, after = attempt.before, attempt.after
    read: Values = {
        **of_it,
        **reader,
        "diptych.prefill.queue_s": after.prefill_queue_s - before.prefill_queue_s,
        "diptych.prefill.compute_s": after.prefill_compute_s - before.prefill_compute_s,
    }
    first = attempt.first
    if first is None:
        span.stage("prefill", attempt.begun, end, read, error)
        return
    span.stage("prefill", attempt.begun, first, read)
    over = attempt.finished and attempt.num_tokens <= 1  # its first token was its last
    writing_from = first
    if two_pools:
        if over and attempt.committed is None:
            return
        stopped = attempt.committed is None
        _tell_transfer(span, attempt, of_it, end, error if stopped else "")
        if attempt.committed is None:
            return
        writing_from = max(first, attempt.committed)
    if over:
        return
    wrote: Values = {
        **of_it,
        **_worker(attempt, WorkerKind.DECODE),
        "diptych.decode.queue_s": after.decode_queue_s - before.decode_queue_s,
        "diptych.decode.first_step_s": after.first_step_s - before.first_step_s,
        "diptych.output_tokens": attempt.num_tokens - 1,
    }
    span.stage("decode", min(writing_from, end), end, wrote, error)


def _tell_transfer(span: RequestSpan, attempt: Attempt, of_it: Values, end: float, error: str) -> None:
    """What of it a client can feel: from the first token to the commit; or, where that was heard first, up to it."""
    assert attempt.first is not None
    begun, stats = attempt.first, attempt.handoff
    if attempt.committed is not None:
        end = attempt.committed
        if end < begun:
            begun = max(attempt.begun, end - (0.0 if stats is None else stats.exposed_s))
    values: Values = {**of_it, **_worker(attempt, WorkerKind.DECODE)}
    values["diptych.transfer.failures"] = attempt.num_handoff_failures
    if stats is not None:
        values["diptych.transfer.connector"] = stats.connector
        values["diptych.transfer.bytes"] = stats.kv_bytes
        values["diptych.transfer.busy_s"] = stats.transfer_s
        values["diptych.transfer.exposed_s"] = stats.exposed_s
    span.stage("transfer", begun, end, values, error)


def _worker(attempt: Attempt, kind: WorkerKind) -> Values:
    ref = attempt.at.get(kind)
    return {} if ref is None else {"diptych.worker.id": ref.worker_id, "diptych.worker.epoch": ref.epoch}
