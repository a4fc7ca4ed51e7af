"""Where one request's time went: the stages whose sum is what the client saw.

    TTFT           = receive + admission + tokenise + route + retry + prefill_queue + prefill_compute + notify + emit + unexplained
    gap to token 2 = transfer (exposed) + commit + decode_queue + first_step + relay + recover + unexplained

Both spans end where the client has the token: when it is written to its connection. Workers report durations (seconds), never
wall-clock instants: the router's clock is the only clock that is compared. `notify` is what the router waited for a first token
beyond what its worker says that it took: the way there and back. `relay` is by how much longer the second token's way to the
client was than the first's. Where it was shorter, so much of the stages before went by while the first token was on its way:
nobody felt that, and it is in no gap (`StageTimes.felt`). No stage is below 0; where workers say that they took more than there
was, `unexplained` is. What they did not tell is in no stage either, and stays unexplained.
Does not know requests, workers or metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TTFT_STAGES = (
    "receive",
    "admission",
    "tokenise",
    "route",
    "retry",
    "prefill_queue",
    "prefill_compute",
    "notify",
    "emit",
)
GAP_STAGES = ("transfer", "commit", "decode_queue", "first_step", "relay", "recover")


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Durations in seconds of one request's stages; a stage that did not happen is 0."""

    admission_s: float = 0.0
    tokenise_s: float = 0.0
    route_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_compute_s: float = 0.0
    emit_s: float = 0.0
    transfer_s: float = 0.0
    commit_s: float = 0.0
    decode_queue_s: float = 0.0
    first_step_s: float = 0.0
    receive_s: float = 0.0  # a request's bytes, once they begin to come
    retry_s: float = 0.0  # attempts that failed before one made the first token
    notify_s: float = 0.0
    relay_s: float = 0.0
    recover_s: float = 0.0  # the gap, where another attempt than the first token's made the second: all of it

    def merged(self, other: StageTimes) -> StageTimes:
        """Both halves of a request's story as one: each stage's durations added."""
        return StageTimes(
            admission_s=self.admission_s + other.admission_s,
            tokenise_s=self.tokenise_s + other.tokenise_s,
            route_s=self.route_s + other.route_s,
            prefill_queue_s=self.prefill_queue_s + other.prefill_queue_s,
            prefill_compute_s=self.prefill_compute_s + other.prefill_compute_s,
            emit_s=self.emit_s + other.emit_s,
            transfer_s=self.transfer_s + other.transfer_s,
            commit_s=self.commit_s + other.commit_s,
            decode_queue_s=self.decode_queue_s + other.decode_queue_s,
            first_step_s=self.first_step_s + other.first_step_s,
            receive_s=self.receive_s + other.receive_s,
            retry_s=self.retry_s + other.retry_s,
            notify_s=self.notify_s + other.notify_s,
            relay_s=self.relay_s + other.relay_s,
            recover_s=self.recover_s + other.recover_s,
        )

    @property
    def ttft_s(self) -> float:
        """The part of TTFT that is accounted for."""
        return (
            self.receive_s
            + self.admission_s
            + self.tokenise_s
            + self.route_s
            + self.retry_s
            + self.prefill_queue_s
            + self.prefill_compute_s
            + self.notify_s
            + self.emit_s
        )

    @property
    def gap_s(self) -> float:
        """The part of the gap to the second token that is accounted for."""
        told_s = self.transfer_s + self.commit_s + self.decode_queue_s + self.first_step_s
        return told_s + self.relay_s + self.recover_s

    def felt(self, gap_s: float) -> StageTimes:
        """With the gap's stages, as workers told them, as they are in a gap of so many seconds. What it was longer is `relay`.

        What it was shorter went by before it began, which can be no more than the first token's ways to the router and the
        client took. If that is not all, the commit was shorter: half of what its round trip was nobody's work is a guess.
        """
        if self.recover_s:
            return replace(self, recover_s=gap_s)
        told_s = (self.transfer_s, self.commit_s, self.decode_queue_s, self.first_step_s)
        beyond_s = gap_s - sum(told_s)
        if beyond_s >= 0:
            return replace(self, relay_s=beyond_s)
        before_s, left_s = min(-beyond_s, self.notify_s + self.emit_s), []
        guessed_s = -beyond_s - before_s
        for stage_s in told_s:
            cut_s = min(stage_s, before_s)
            before_s -= cut_s
            left_s.append(stage_s - cut_s)
        transfer_s, commit_s, queue_s, step_s = left_s
        commit_s = max(0.0, commit_s - guessed_s)
        return replace(self, transfer_s=transfer_s, commit_s=commit_s, decode_queue_s=queue_s, first_step_s=step_s)

    def by_name(self) -> tuple[tuple[str, float], ...]:
        """All of them in their order, each with its name, which is that of its field without the unit."""
        return (
            ("receive", self.receive_s),
            ("admission", self.admission_s),
            ("tokenise", self.tokenise_s),
            ("route", self.route_s),
            ("retry", self.retry_s),
            ("prefill_queue", self.prefill_queue_s),
            ("prefill_compute", self.prefill_compute_s),
            ("notify", self.notify_s),
            ("emit", self.emit_s),
            ("transfer", self.transfer_s),
            ("commit", self.commit_s),
            ("decode_queue", self.decode_queue_s),
            ("first_step", self.first_step_s),
            ("relay", self.relay_s),
            ("recover", self.recover_s),
        )


@dataclass(frozen=True, slots=True)
class Spent:
    """One answer's stages, and what they are to add up to: its TTFT, and the gap between its first and its second token.

    Both were measured by the router, in seconds; None where there was no such token.
    """

    stages: StageTimes
    ttft_s: float | None = None
    gap_s: float | None = None

    @property
    def ttft_unexplained_s(self) -> float | None:
        """Of TTFT, beside all stages; negative where these say too much."""
        return None if self.ttft_s is None else self.ttft_s - self.stages.ttft_s

    @property
    def gap_unexplained_s(self) -> float | None:
        """The same of the gap."""
        return None if self.gap_s is None else self.gap_s - self.stages.gap_s

    def by_field(self) -> dict[str, float]:
        """The stages as users get them: seconds, each under its field's name."""
        return {f"{name}_s": duration_s for name, duration_s in self.stages.by_name()}


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """What one hand-off moved and how long it took.

    `transfer_s` is the busy time of the connector's writes; `exposed_s` is the part of it after the last chunk was
    computed, which is what the client can feel.
    """

    connector: str = ""
    kv_bytes: int = 0
    num_writes: int = 0
    num_blocks: int = 0
    num_cached_blocks: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Bytes moved over busy time, in 10^9 bytes per second; 0 when nothing was moved."""
        return self.kv_bytes / self.transfer_s / 1e9 if self.transfer_s > 0 else 0.0
