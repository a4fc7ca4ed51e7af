"""What `LLM` gives back, in vLLM's shape: one RequestOutput a prompt, in their order. Does not know the engine."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `text` ends before a stop text; `token_ids` has all that were made.

    `finish_reason` is "stop" or "length". `logprobs` has one entry a token where they were asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its answers, which are one. `prompt` is None where it came as token ids.

    `prompt_logprobs` has one entry a prompt token where they were asked for, None for the first.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    num_cached_tokens: int = 0
