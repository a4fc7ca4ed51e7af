"""Where one request's time went: the stages whose sum is what the client saw.

    TTFT           = admission + tokenise + route + prefill_queue + prefill_compute + emit + unexplained
    gap to token 2 = transfer (exposed) + commit + decode_queue + first_step + unexplained

Workers report durations (seconds), never wall-clock instants: the router's clock is the only clock that is compared.
Does not know requests, workers or metrics.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    def merged(self, other: StageTimes) -> StageTimes:
        """Both halves of a request's story as one: each stage's durations added."""
        return StageTimes(
            self.admission_s + other.admission_s,
            self.tokenise_s + other.tokenise_s,
            self.route_s + other.route_s,
            self.prefill_queue_s + other.prefill_queue_s,
            self.prefill_compute_s + other.prefill_compute_s,
            self.emit_s + other.emit_s,
            self.transfer_s + other.transfer_s,
            self.commit_s + other.commit_s,
            self.decode_queue_s + other.decode_queue_s,
            self.first_step_s + other.first_step_s,
        )

    @property
    def ttft_s(self) -> float:
        """The part of TTFT that is accounted for."""
        return (
            self.admission_s
            + self.tokenise_s
            + self.route_s
            + self.prefill_queue_s
            + self.prefill_compute_s
            + self.emit_s
        )

    def by_name(self) -> tuple[tuple[str, float], ...]:
        """All of them, each with its name, which is that of its field without the unit."""
        return (
            ("admission", self.admission_s),
            ("tokenise", self.tokenise_s),
            ("route", self.route_s),
            ("prefill_queue", self.prefill_queue_s),
            ("prefill_compute", self.prefill_compute_s),
            ("emit", self.emit_s),
            ("transfer", self.transfer_s),
            ("commit", self.commit_s),
            ("decode_queue", self.decode_queue_s),
            ("first_step", self.first_step_s),
        )


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
