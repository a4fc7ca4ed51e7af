"""What one step of the engine tells the outside. Values only; does not know how they came about."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.request import GenerationRequest, TokenDelta, TokenLogprob
from engine.kv.lease import KVLease
from observability.samples import EngineSample
from observability.stages import StageTimes


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request that retains its KV has come: the KV of its first `num_computed_tokens` tokens is in `block_ids`.

    `scheduled_first` marks its first step. The blocks stay its own until it leaves, so full ones may be read from now on.
    """

    request_id: str
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    scheduled_first: bool


@dataclass(frozen=True, slots=True)
class Retained:
    """A request that goes on elsewhere. Its lease now belongs to the receiver of this, who gives it to Engine.release.

    `request.output_token_ids` ends with the token made here; that token's KV is not computed, so
    `num_computed_tokens == request.num_tokens - 1`. `request.deadline_s` is what is left of it.
    """

    request: GenerationRequest
    lease: KVLease
    num_computed_tokens: int
    num_cached_tokens: int  # prompt tokens that were prefix hits here
    block_hashes: tuple[bytes, ...]  # of the full computed blocks
    first_token_logprob: TokenLogprob | None
    stages: StageTimes

    @property
    def request_id(self) -> str:
        """The id it was admitted under."""
        return self.request.request_id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt, then output up to and including the token made here."""
        return self.request.prompt_token_ids + self.request.output_token_ids


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One step's news: at most one delta per request. `runner_s` is the part of `step_s` spent in the model runner."""

    deltas: tuple[TokenDelta, ...] = ()
    progress: tuple[Progress, ...] = ()
    retained: tuple[Retained, ...] = ()
    num_scheduled_requests: int = 0
    num_scheduled_tokens: int = 0
    num_preempted: int = 0
    ended: tuple[EngineSample, ...] = ()  # what left with its work done, or with an error
    num_made: int = 0  # tokens sampled
    step_s: float = 0.0
    runner_s: float = 0.0

    @property
    def made_progress(self) -> bool:
        """Whether stepping again at once makes sense; else all that is left waits for blocks held outside."""
        return bool(self.num_scheduled_tokens or self.num_preempted or self.deltas)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine's start."""

    num_steps: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
