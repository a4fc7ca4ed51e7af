"""What metrics are told: one finished request of a router or of an engine, and one worker, in numbers. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from observability.stages import HandoffStats, Spent, StageTimes


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker as the router last heard of it."""

    worker_id: str
    pool: str
    state: str
    epoch: int
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One finished request in numbers. `ttft_s` None when no token came, `gap_s` when no second one did."""

    outcome: str  # a finish reason, or the code of the error
    succeeded: bool
    route: str
    e2e_s: float
    ttft_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # of all its answers
    num_longest_tokens: int  # of the answer with the most
    max_tokens: int
    stages: StageTimes  # of its first answer
    handoffs: tuple[HandoffStats, ...]  # at most one per answer
    num_failed_handoffs: int = 0  # whose blocks were pushed again, or whose prompt was computed again
    gap_s: float | None = None  # between the first and the second token of its first answer
    num_answers: int = 1  # to each prompt
    excused: bool = False  # left by its client, or refused for what it asked or had used up

    @property
    def mean_gap_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1) in seconds, of its longest answer; None where there is no gap."""
        if self.ttft_s is None or self.num_longest_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_longest_tokens - 1)

    @property
    def spent(self) -> Spent:
        """Where the time of its first answer went."""
        return Spent(self.stages, self.ttft_s, self.gap_s)


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One request that has left an engine with its work done, or with an error. `queue_s`, `prefill_s` and `decode_s` are its times
    there: until its first step; from that to its first token, None where its KV came from elsewhere; from then on, None where it
    left at once.
    """

    reason: str
    external: bool  # its KV came from elsewhere
    num_prompt_tokens: int
    num_cached_tokens: int  # of them, found in the prefix cache here
    num_output_tokens: int  # made here
    max_tokens: int
    queue_s: float
    prefill_s: float | None
    decode_s: float | None
