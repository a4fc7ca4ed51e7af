"""Where one request's time went: the stages whose sum is what the client saw.

    TTFT           = receive + admission + tokenise + route + retry + prefill_queue + prefill_compute + notify + emit + unexplained
    gap to token 2 = transfer (exposed) + commit + decode_queue + first_step + relay + recover + unexplained

Both spans end where the client has the token: when it is written to its connection. Workers report durations (seconds), never
wall-clock instants: the router's clock is the only clock that is compared. `notify` is what the router waited for a first token
beyond what its worker says that it took: the way there and back. `relay` is by how much longer the second token's way to the
router was than the first's, and writing it to the client. What of the stages before went by while the first token was on its way
to the client nobody felt, and it is in no gap (`StageTimes.felt`). No stage is below 0; where workers say that they took more
than there was, `unexplained` is. What they did not tell is in no stage either, and stays unexplained.
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

    def felt(self, heard_s: float, gap_s: float) -> StageTimes:
        """With the gap's stages, as workers told them, as they were felt: the router heard the second token `heard_s` after the
        first, and its client had it `gap_s` after that.

        What was longer than the told is `relay`. What was shorter went by while the first token was on its way to the router,
        which can be no more than `notify`; if that is not all, the commit was shorter: half of what its round trip was nobody's
        work is a guess. What came while the client was being given the first token, it did not feel.
        """
        if self.recover_s:
            return replace(self, recover_s=gap_s)
        stages_s = [self.transfer_s, self.commit_s, self.decode_queue_s, self.first_step_s]
        beyond_s = heard_s - sum(stages_s)
        ahead_s = min(max(0.0, -beyond_s), self.notify_s)
        _cut(stages_s, ahead_s)
        stages_s[1] -= min(stages_s[1], max(0.0, -beyond_s) - ahead_s)
        stages_s.append(max(0.0, beyond_s))
        _cut(stages_s, self.emit_s)
        return replace(
            self,
            transfer_s=stages_s[0],
            commit_s=stages_s[1],
            decode_queue_s=stages_s[2],
            first_step_s=stages_s[3],
            relay_s=stages_s[4] + max(0.0, gap_s - (heard_s - self.emit_s)),
        )

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


def _cut(stages_s: list[float], most_s: float) -> None:
    """Take that much from the first of them, what is left of it from the next, and so on."""
    for place, stage_s in enumerate(stages_s):
        cut_s = min(stage_s, most_s)
        stages_s[place] -= cut_s
        most_s -= cut_s


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
