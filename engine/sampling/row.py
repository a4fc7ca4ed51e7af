"""What the sampler is told about one row of a batch, and what it answers. Torch-free.

`SamplingRow` is the part of `engine.execution.interface.ScheduledRequest` that sampling may look at; the sampler does not
know blocks, schedules or what the other rows are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.request import TokenLogprob
from contracts.sampling import SamplingParams


class SamplingRow(Protocol):
    """One request that wants its next token; `token_ids` is prompt then output, all known."""

    @property
    def request_id(self) -> str:
        """Only for messages."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt then output; its length is the position of the token to sample."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Where the output begins in `token_ids`."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """How to choose."""
        ...


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What a request got out of a step.

    `token_id` is None when the request's prompt is not finished yet, or when no token can be taken from its logits: then
    `fault` says why, and the request must end. `prompt_logprobs` has one entry per prompt position
    that this step made known (positions num_computed + 1 … of the prompt), when asked for.
    """

    token_id: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    fault: str | None = None
