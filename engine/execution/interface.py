"""What the engine asks of a model runner: run this batch, give back one token for each request that wants one.

Torch-free, so that the engine and its tests run with `engine.execution.fake` where no torch is installed.
Does not know scheduling policy, leases or who waits for the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from contracts.kv_layout import KVLayout
from contracts.sampling import SamplingParams
from engine.sampling.row import SampledToken as SampledToken


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

    Computes the tokens token_ids[num_computed_tokens : num_computed_tokens + num_scheduled_tokens], whose KV goes to those
    positions of `block_ids`; every earlier position's KV is there. `token_ids` is prompt then output and is not copied.
    A token is sampled when the last known token is computed in this step (`samples`); its index in the output is
    len(token_ids) - num_prompt_tokens, its position (for the seeded noise) is len(token_ids).
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: list[int]
    sampling: SamplingParams

    @property
    def samples(self) -> bool:
        """Whether this step reaches the end of the known tokens."""
        return self.num_computed_tokens + self.num_scheduled_tokens == len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens made before this step."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """All that one step computes, decodes first. Never empty."""

    requests: tuple[ScheduledRequest, ...]

    @property
    def num_scheduled_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(r.num_scheduled_tokens for r in self.requests)


class ModelRunner(Protocol):
    """Runs batches on KV memory of `num_blocks` blocks of `layout`."""

    @property
    def layout(self) -> KVLayout:
        """What its KV memory looks like."""
        ...

    @property
    def num_blocks(self) -> int:
        """Size of its KV memory in blocks."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def max_model_len(self) -> int:
        """The model's context in tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless it ignores them."""
        ...

    def execute(self, batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        """Forward and sample; one result per request of the batch, in its order."""
        ...
