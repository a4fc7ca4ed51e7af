"""Where one request's time went: the stages whose sum is what the client saw.

    TTFT           = admission + tokenise + route + prefill_queue + prefill_compute + emit + unexplained
    gap to token 2 = transfer (exposed) + commit + decode_queue + first_step + unexplained

Workers report durations (seconds), never wall-clock instants: the router's clock is the only clock that is compared.
Does not know requests, workers or metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


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
        return replace(self, **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


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
