"""One request inside the engine: its tokens, how far its KV is computed, and the blocks that it holds.

    WAITING ──start──▶ RUNNING ──last token, error, abort, goes on elsewhere──▶ FINISHED
       ▲                 │  ▲
       └── preempted ────┘  └── adopted: begins here, with its KV

WAITING holds no blocks, RUNNING holds a lease. A preempted request waits again with `num_computed_tokens` 0: prompt and
output so far are what it computes next, so its answer does not change. Does not know scheduling, runners or streams.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from contracts.request import FinishReason, GenerationRequest, TokenLogprob
from engine.kv.lease import KVLease
from observability.samples import EngineSample
from observability.stages import StageTimes


class RequestStatus(StrEnum):
    """Where a request is; drawn above."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """The engine's own record of a GenerationRequest. Owns its lease while it runs; instants are seconds of the engine's clock.

    `retain_kv`: leaves after one token with its lease, and is never preempted, since others read its blocks as it computes.
    `order` sorts requests: the smaller runs first and is preempted last.
    """

    def __init__(
        self, facts: GenerationRequest, arrived_s: float, order: tuple[int, int], *, retain_kv: bool = False
    ) -> None:
        self.facts = facts
        self.request_id = facts.request_id
        self.order = order
        self.retain_kv = retain_kv
        self.adopted = False
        self._has_second = False  # token, of those made here
        self.token_ids = [*facts.prompt_token_ids, *facts.output_token_ids]
        self.num_prompt_tokens = len(facts.prompt_token_ids)
        self.sampling = replace(facts.sampling, prompt_logprobs=None) if facts.output_token_ids else facts.sampling
        self.status = RequestStatus.WAITING
        self.block_hashes: list[bytes] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.arrived_s = arrived_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.deadline_at_s = None if facts.deadline_s is None else arrived_s + facts.deadline_s
        self._lease: KVLease | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output, those made elsewhere included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not there yet; 1 for a decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_cached_tokens(self) -> int:
        """How many tokens may come from the prefix cache: the last must be computed, and all whose log-probabilities are due."""
        return 0 if self.sampling.prompt_logprobs is not None else self.num_tokens - 1

    @property
    def lease(self) -> KVLease:
        """Its blocks. Only a running request has them."""
        if self._lease is None:
            raise RuntimeError(f"{self.request_id} is {self.status} and holds no blocks")
        return self._lease

    def start(self, lease: KVLease, num_computed_tokens: int) -> None:
        """WAITING to RUNNING: owns `lease` from here on, whose first `num_computed_tokens` tokens are computed."""
        self._lease = lease
        self.num_computed_tokens = num_computed_tokens
        self.status = RequestStatus.RUNNING

    def begin(self, now_s: float) -> None:
        """Its first step here starts. What the prefix cache had is told once, as the client understands it: prompt tokens."""
        self.started_s = now_s
        if not self.adopted:
            self.num_cached_tokens = min(self.lease.num_cached_tokens, self.num_prompt_tokens)

    def give_up_lease(self, status: RequestStatus) -> KVLease:
        """RUNNING to `status`: its lease, now the caller's to release or pass on. Nothing is computed any more."""
        lease, self._lease = self.lease, None
        self.status = status
        self.num_computed_tokens = 0
        self.prompt_logprobs.clear()
        return lease

    def append(self, token_id: int, began_s: float, now_s: float) -> StageTimes | None:
        """Take a sampled token of a step that began at that instant. The stages that are known with it: each is told once, those
        of an answer's first token with that, those of its second with that. Prompt log-probabilities are due only until then.
        """
        self.token_ids.append(token_id)
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.sampling = replace(self.sampling, prompt_logprobs=None)
            return self.stages(now_s)
        if self.adopted or self._has_second:
            return None
        self._has_second = True
        return StageTimes(decode_queue_s=began_s - self.first_token_s, first_step_s=now_s - began_s)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Whether the last token ends the answer. Ends by a stop token only after min_tokens tokens before it.

        The context never ends an answer: GenerationRequest.validate refuses max_tokens that it could not hold.
        """
        token_id = self.token_ids[-1]
        may_stop = self.num_output_tokens > self.sampling.min_tokens
        is_eos = token_id in eos_token_ids and not self.sampling.ignore_eos
        if may_stop and (is_eos or token_id in self.sampling.stop_token_ids):
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def stages(self, now_s: float) -> StageTimes:
        """Where its time went: waiting to run, since it came, then from its first step to its first token here."""
        started_s = now_s if self.started_s is None else self.started_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        queue_s, compute_s = started_s - self.arrived_s, first_token_s - started_s
        if self.adopted:
            return StageTimes(decode_queue_s=queue_s, first_step_s=compute_s)
        return StageTimes(prefill_queue_s=queue_s, prefill_compute_s=compute_s)

    def sample(self, reason: FinishReason, now_s: float) -> EngineSample:
        """What it came to in this engine, which it leaves by `reason`."""
        started_s = now_s if self.started_s is None else self.started_s
        first_s = now_s if self.first_token_s is None else self.first_token_s
        decoded = self.adopted or now_s > first_s
        return EngineSample(
            reason=reason.value,
            external=self.adopted,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens - len(self.facts.output_token_ids),
            max_tokens=self.facts.sampling.max_tokens,
            queue_s=started_s - self.arrived_s,
            prefill_s=None if self.adopted else first_s - started_s,
            decode_s=now_s - (started_s if self.adopted else first_s) if decoded else None,
        )

    def continuation(self, now_s: float) -> GenerationRequest:
        """What a later engine needs to go on: the tokens so far and the time that is left."""
        left_s = None if self.deadline_at_s is None else self.deadline_at_s - now_s
        output = tuple(self.token_ids[self.num_prompt_tokens :])
        return replace(self.facts, output_token_ids=output, deadline_s=left_s)
