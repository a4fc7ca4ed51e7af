"""One request and what comes back: the domain types that the router, the workers and the engine share.

    GenerationRequest ──▶ engine ──▶ TokenDelta, TokenDelta, … , TokenDelta(finish_reason=…)

`request_id` names one attempt on one worker, not the user's request: a retry or a re-target gets a new one.
Does not know text (the router detokenises), transports or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from contracts.errors import ErrorCode, InvalidRequest, counted
from contracts.sampling import SamplingParams
from observability.stages import StageTimes


class FinishReason(StrEnum):
    """Why a request ended. STOP and LENGTH are OpenAI's words; the other two never reach a client as a success."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt, the tokens made so far, and how to go on.

    `output_token_ids` is not empty when an answer goes on elsewhere (hand-off, migration, preemption replay); the next
    token's index in the output is `len(output_token_ids)`. Lower `priority` runs first. `deadline_s` is the time left in
    seconds when this object was made, None for no limit.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    deadline_s: float | None = None
    traceparent: str = ""
    tracestate: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def validate(self, vocab_size: int, max_model_len: int) -> None:
        """Raise InvalidRequest when the prompt is empty, too long, or has ids the model does not know.

        A prompt must leave room for one token: len(prompt) + 1 <= max_model_len. `max_tokens` beyond the context is
        refused too, so that a caller learns both numbers instead of getting a shorter answer silently.
        """
        num_prompt = len(self.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequest("prompt", 0, "must have at least 1 token")
        if num_prompt + 1 > max_model_len:
            raise InvalidRequest(
                "prompt",
                counted(num_prompt, "token"),
                f"at most {max_model_len - 1} fit the context of {max_model_len}",
            )
        ids = self.prompt_token_ids
        if min(ids) < 0 or max(ids) >= vocab_size:  # a tenth of what it takes to look at each
            wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            raise InvalidRequest("prompt_token_ids", wrong, f"must be from 0 to {vocab_size - 1}")
        self.sampling.validate(vocab_size)
        if num_prompt + self.sampling.max_tokens > max_model_len:
            raise InvalidRequest(
                "max_tokens",
                self.sampling.max_tokens,
                f"at most {max_model_len - num_prompt} after a prompt of {num_prompt} in a context of {max_model_len}",
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token and of the likeliest alternatives at its position.

    From the model's raw logits (before temperature and penalties), natural log, as vLLM and OpenAI report them.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as a value, for streams that carry many requests. `draining`: it is a `Draining`, which is no failure.
    `retry_after_s`: when to ask again where something is full; 0 where that is not said.
    """

    code: ErrorCode
    message: str
    retryable: bool
    draining: bool = False
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step made for one request.

    `first_index` is the index in the output of `token_ids[0]`, so that a reader can prove that nothing is lost or double.
    `logprobs` is empty or as long as `token_ids`. `prompt_logprobs` comes once, with the first delta, one entry per prompt
    token, None for the first. `num_cached_tokens` counts prompt tokens found in a prefix cache (what OpenAI's
    `cached_tokens` means), set on the first delta. `stages` is set when the request leaves this worker.
    """

    request_id: str
    first_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None
    stages: StageTimes | None = field(default=None)
