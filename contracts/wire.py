"""Wire ↔ domain for the messages of requests and answers: one pair of functions per message, nothing else knows both.

`contracts.wire_handoff` has the messages of the hand-off and the registry. Reading is strict where a missing part would be
a lie (a request without sampling parameters) and raises InvalidRequest naming the field. Does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from contracts.errors import DiptychError, Draining, ErrorCode, InternalError, InvalidRequest, NoRoom, Overloaded
from contracts.pb.diptych.v1 import types_pb2 as pb
from contracts.request import ErrorInfo, FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from contracts.sampling import MAX_LOGIT_BIAS, SamplingParams
from observability.stages import HandoffStats, StageTimes

_FINISH_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_LEAST_S, _MOST_S = 1e-9, 1e6  # of a duration that is told: a nanosecond, eleven days
_READ_AT_ONCE = 256  # log-probabilities: about 5 ms
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}


def sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    """All fields present."""
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_pb(message: pb.SamplingParams, defaults: SamplingParams, seed: int | None = None) -> SamplingParams:
    """Fields that are absent are taken from `defaults`, and the seed is `seed` where that is given. Raises InvalidRequest for more
    biases than are ever taken: the rest is `SamplingParams.validate`'s.
    """

    def present(field: str) -> bool:
        return message.HasField(field)  # type: ignore[arg-type]

    if len(message.logit_bias) > MAX_LOGIT_BIAS:  # before they are sorted
        raise InvalidRequest("sampling.logit_bias", len(message.logit_bias), f"at most {MAX_LOGIT_BIAS} entries")
    return SamplingParams(
        temperature=message.temperature if present("temperature") else defaults.temperature,
        top_k=message.top_k if present("top_k") else defaults.top_k,
        top_p=message.top_p if present("top_p") else defaults.top_p,
        min_p=message.min_p if present("min_p") else defaults.min_p,
        repetition_penalty=(
            message.repetition_penalty if present("repetition_penalty") else defaults.repetition_penalty
        ),
        presence_penalty=message.presence_penalty if present("presence_penalty") else defaults.presence_penalty,
        frequency_penalty=message.frequency_penalty if present("frequency_penalty") else defaults.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())) or defaults.logit_bias,
        seed=message.seed if present("seed") else defaults.seed if seed is None else seed,
        max_tokens=message.max_tokens if present("max_tokens") else defaults.max_tokens,
        min_tokens=message.min_tokens if present("min_tokens") else defaults.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids) or defaults.stop_token_ids,
        ignore_eos=message.ignore_eos if present("ignore_eos") else defaults.ignore_eos,
        logprobs=message.logprobs if present("logprobs") else defaults.logprobs,
        prompt_logprobs=message.prompt_logprobs if present("prompt_logprobs") else defaults.prompt_logprobs,
    )


def request_to_pb(request: GenerationRequest) -> pb.Request:
    """One attempt as it travels between our own processes."""
    return pb.Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling=sampling_to_pb(request.sampling),
        priority=request.priority,
        deadline_s=request.deadline_s,
        traceparent=request.traceparent,
        tracestate=request.tracestate,
    )


def request_from_pb(message: pb.Request) -> GenerationRequest:
    """Raises InvalidRequest when the id or the sampling parameters are missing, or the deadline is no number."""
    if not message.request_id:
        raise InvalidRequest("request_id", "", "must not be empty")
    if not message.HasField("sampling"):
        raise InvalidRequest("sampling", None, "must be present")
    if math.isnan(message.deadline_s):  # it would be neither before nor after any instant
        raise InvalidRequest("deadline_s", message.deadline_s, "must be a number of seconds")
    return GenerationRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        sampling=sampling_from_pb(message.sampling, SamplingParams()),
        priority=message.priority,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
        traceparent=message.traceparent,
        tracestate=message.tracestate,
    )


def logprob_to_pb(logprob: TokenLogprob | None) -> pb.TokenLogprob:
    """None (the first prompt token) becomes a message of rank 0."""
    if logprob is None:
        return pb.TokenLogprob()
    top = [pb.TokenProbability(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank, top=top)


def logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob | None:
    """A message of rank 0 becomes None."""
    if message.rank == 0:
        return None
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(message.token_id, message.logprob, message.rank, top)


class LogprobsAsSent(Sequence[TokenLogprob | None]):
    """A long prompt's log-probabilities in the message that brought them, read out of it by whoever goes through them.

    All at once, those of 32,000 tokens are two thirds of a second of a loop on which everybody waits, and ten times the memory.
    `messages` belong to the message that they came in, which nobody may change any more.
    """

    def __init__(self, messages: Sequence[pb.TokenLogprob]) -> None:
        self.messages = messages

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        return map(logprob_from_pb, self.messages)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprob | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | Sequence[TokenLogprob | None] | None:
        if isinstance(index, slice):
            return LogprobsAsSent(self.messages[index])
        return logprob_from_pb(self.messages[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as a list's


def prompt_logprobs_to_pb(entries: Sequence[TokenLogprob | None]) -> Iterable[pb.TokenLogprob]:
    """As they came, where they came in a message."""
    return entries.messages if isinstance(entries, LogprobsAsSent) else map(logprob_to_pb, entries)


def _prompt_logprobs_from_pb(messages: Sequence[pb.TokenLogprob]) -> Sequence[TokenLogprob | None]:
    return LogprobsAsSent(messages) if len(messages) > _READ_AT_ONCE else tuple(map(logprob_from_pb, messages))


def finish_to_pb(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """None becomes UNSPECIFIED."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PB[reason]


def finish_from_pb(value: pb.FinishReason.ValueType) -> FinishReason | None:
    """UNSPECIFIED becomes None."""
    return _FINISH_FROM_PB.get(value)


def error_info(error: DiptychError) -> ErrorInfo:
    """An exception as a value."""
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded | NoRoom) else 0.0
    return ErrorInfo(error.code, error.message, error.retryable, isinstance(error, Draining), retry_after_s)


def error_info_to_pb(error: ErrorInfo) -> pb.Error:
    """For streams that carry many requests."""
    return pb.Error(
        code=error.code.value,
        message=error.message,
        retryable=error.retryable,
        draining=error.draining,
        retry_after_s=error.retry_after_s,
    )


def error_info_from_pb(message: pb.Error) -> ErrorInfo:
    """Raises InternalError for a code that is not ours."""
    try:
        code = ErrorCode(message.code)
    except ValueError as unknown:
        raise InternalError(f"error.code: got {message.code!r}, not one of ours") from unknown
    retry_after_s = max(0.0, message.retry_after_s)  # what is no number is none
    return ErrorInfo(code, message.message, message.retryable, message.draining, retry_after_s)


def stages_to_pb(stages: StageTimes) -> pb.StageTimes:
    """Field by field."""
    return pb.StageTimes(
        admission_s=stages.admission_s,
        tokenise_s=stages.tokenise_s,
        route_s=stages.route_s,
        prefill_queue_s=stages.prefill_queue_s,
        prefill_compute_s=stages.prefill_compute_s,
        emit_s=stages.emit_s,
        transfer_s=stages.transfer_s,
        commit_s=stages.commit_s,
        decode_queue_s=stages.decode_queue_s,
        first_step_s=stages.first_step_s,
        receive_s=stages.receive_s,
        retry_s=stages.retry_s,
        notify_s=stages.notify_s,
        relay_s=stages.relay_s,
        recover_s=stages.recover_s,
    )


def _seconds(told: float) -> float:
    """A duration as another process tells it: what no request can have lasted, and what is no number, would spoil every sum."""
    return told if _LEAST_S < abs(told) < _MOST_S else 0.0


def stages_from_pb(message: pb.StageTimes) -> StageTimes:
    """Field by field; what is no time is none."""
    return StageTimes(
        admission_s=_seconds(message.admission_s),
        tokenise_s=_seconds(message.tokenise_s),
        route_s=_seconds(message.route_s),
        prefill_queue_s=_seconds(message.prefill_queue_s),
        prefill_compute_s=_seconds(message.prefill_compute_s),
        emit_s=_seconds(message.emit_s),
        transfer_s=_seconds(message.transfer_s),
        commit_s=_seconds(message.commit_s),
        decode_queue_s=_seconds(message.decode_queue_s),
        first_step_s=_seconds(message.first_step_s),
        receive_s=_seconds(message.receive_s),
        retry_s=_seconds(message.retry_s),
        notify_s=_seconds(message.notify_s),
        relay_s=_seconds(message.relay_s),
        recover_s=_seconds(message.recover_s),
    )


def handoff_stats_to_pb(stats: HandoffStats) -> pb.HandoffStats:
    """Field by field."""
    return pb.HandoffStats(
        connector=stats.connector,
        kv_bytes=stats.kv_bytes,
        num_writes=stats.num_writes,
        num_blocks=stats.num_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        transfer_s=stats.transfer_s,
        exposed_s=stats.exposed_s,
    )


def handoff_stats_from_pb(message: pb.HandoffStats) -> HandoffStats:
    """Field by field; what is no time is none."""
    return HandoffStats(
        connector=message.connector,
        kv_bytes=message.kv_bytes,
        num_writes=message.num_writes,
        num_blocks=message.num_blocks,
        num_cached_blocks=message.num_cached_blocks,
        transfer_s=_seconds(message.transfer_s),
        exposed_s=_seconds(message.exposed_s),
    )


def delta_to_pb(delta: TokenDelta) -> pb.TokenDelta:
    """One request's share of a step."""
    return pb.TokenDelta(
        request_id=delta.request_id,
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        logprobs=[logprob_to_pb(entry) for entry in delta.logprobs],
        prompt_logprobs=prompt_logprobs_to_pb(delta.prompt_logprobs),
        finish_reason=finish_to_pb(delta.finish_reason),
        stop_token_id=delta.stop_token_id,
        num_cached_tokens=delta.num_cached_tokens,
        error=None if delta.error is None else error_info_to_pb(delta.error),
        stages=None if delta.stages is None else stages_to_pb(delta.stages),
    )


def delta_from_pb(message: pb.TokenDelta) -> TokenDelta:
    """Raises InvalidRequest when a generated token has a log-probability without a rank.

    A router reads one of these per token, and nearly all have nothing but tokens: what is not there is asked for once.
    """
    logprobs, prompt_logprobs, reason = message.logprobs, message.prompt_logprobs, message.finish_reason
    return TokenDelta(
        request_id=message.request_id,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(_generated_from_pb, logprobs)) if logprobs else (),
        prompt_logprobs=_prompt_logprobs_from_pb(prompt_logprobs) if prompt_logprobs else (),
        finish_reason=_FINISH_FROM_PB.get(reason) if reason else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        num_cached_tokens=message.num_cached_tokens,
        error=error_info_from_pb(message.error) if message.HasField("error") else None,
        stages=stages_from_pb(message.stages) if message.HasField("stages") else None,
    )


def _generated_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    logprob = logprob_from_pb(message)
    if logprob is None:
        raise InvalidRequest("logprobs.rank", 0, "must be at least 1 for a generated token")
    return logprob
