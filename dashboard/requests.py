"""Which finished requests are shown: the last, the slowest of the last minutes, the failed.

    Finished ──row──▶ RequestRow ──▶ recent (all, up to a bound a second) · slowest (by TTFT) · failed

Pure; the boards are bounded whatever comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from contracts.errors import ErrorCode
from dashboard.frames import DecisionRow, HandoffRow, RequestRow
from observability.samples import RequestSample
from observability.slo import Limits

RECENT = 60
EACH_SECOND = 12
SLOWEST = 12
FAILED = 20
SLOW_FOR_S = 300.0
_LEFT = ErrorCode.CANCELLED.value


@dataclass(frozen=True, slots=True)
class Finished:
    """One request that is over, as the router says it. `at_s` is an instant of the router's clock; times are seconds."""

    request_id: str
    at_s: float
    sample: RequestSample
    prefill: str = ""
    decode: str = ""
    reason: str = ""
    remote_s: float | None = None
    local_s: float | None = None
    measured_s: float | None = None
    num_failures: int = 0
    num_moves: int = 0

    @property
    def failed(self) -> bool:
        """Neither answered nor left by its client."""
        return not self.sample.succeeded and self.sample.outcome != _LEFT

    @property
    def unexplained_s(self) -> float:
        """Of TTFT, beside all stages; below 0 where these say too much."""
        return self.sample.spent.ttft_unexplained_s or 0.0

    @property
    def gap_unexplained_s(self) -> float:
        """The same of the gap between its first and its second token."""
        return self.sample.spent.gap_unexplained_s or 0.0

    @property
    def handoff_s(self) -> float | None:
        """What its hand-off added before the second token; None without one."""
        if not self.sample.handoffs:
            return None
        stages = self.sample.stages
        return stages.transfer_s + stages.commit_s + stages.decode_queue_s


def row(finished: Finished, number: int, wall_s: float, limits: Limits) -> RequestRow:
    """It as watchers are told; `wall_s` is when it ended, of the Unix epoch."""
    sample = finished.sample
    handoff = sample.handoffs[0] if sample.handoffs else None
    decision = None
    if finished.reason:
        decision = DecisionRow(finished.reason, ms(finished.remote_s), ms(finished.local_s), ms(finished.measured_s))
    return RequestRow(
        n=number,
        id=finished.request_id,
        t=round(wall_s, 2),
        outcome=sample.outcome,
        route=sample.route,
        e2e=to_ms(sample.e2e_s),
        ok=sample.succeeded,
        good=not limits.missed(sample),
        ttft=ms(sample.ttft_s),
        gap=ms(sample.mean_gap_s),
        prompt_tokens=sample.num_prompt_tokens,
        cached_tokens=sample.num_cached_tokens,
        output_tokens=sample.num_output_tokens,
        stages={name: to_ms(s) for name, s in sample.stages.by_name() if s},
        unexplained=to_ms(finished.unexplained_s),
        second=ms(sample.gap_s),
        second_unexplained=to_ms(finished.gap_unexplained_s),
        handoff=None
        if handoff is None
        else HandoffRow(
            handoff.connector,
            handoff.kv_bytes,
            handoff.num_blocks,
            handoff.num_cached_blocks,
            to_ms(handoff.transfer_s),
            to_ms(handoff.exposed_s),
            round(handoff.gb_per_s, 3),
        ),
        prefill=finished.prefill,
        decode=finished.decode,
        decision=decision,
        failures=finished.num_failures,
        moves=finished.num_moves,
        failed_handoffs=sample.num_failed_handoffs,
    )


def ms(seconds: float | None) -> float | None:
    """Milliseconds, or None."""
    return None if seconds is None else to_ms(seconds)


def to_ms(seconds: float) -> float:
    """Milliseconds, to a microsecond."""
    return round(seconds * 1e3, 3)


class Boards:
    """The three lists, newest or slowest first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._number = 0
        self._recent: deque[RequestRow] = deque(maxlen=RECENT)
        self._failed: deque[RequestRow] = deque(maxlen=FAILED)
        self._slowest: list[RequestRow] = []

    @property
    def recent(self) -> tuple[RequestRow, ...]:
        """The last that were shown."""
        return tuple(self._recent)

    @property
    def slowest(self) -> tuple[RequestRow, ...]:
        """By their time to the first token."""
        return tuple(self._slowest)

    @property
    def failed(self) -> tuple[RequestRow, ...]:
        """The last that were."""
        return tuple(self._failed)

    def take(self, finished: Sequence[Finished], offset_s: float) -> tuple[RequestRow, ...]:
        """What ended in one second, in its order; `offset_s` makes its instants those of the Unix epoch. Returns the new of
        `recent`, newest first.
        """
        first, self._number = self._number, self._number + len(finished)
        shown = {id(f) for f in _chosen(finished)}
        made: list[RequestRow] = []
        for number, each in enumerate(finished, first + 1):
            if id(each) in shown:
                made.append(row(each, number, each.at_s + offset_s, self._limits))
        made.reverse()
        self._recent.extendleft(reversed(made[:EACH_SECOND]))
        self._failed.extendleft(reversed([r for r in made if _failed(r)]))
        return tuple(made[:EACH_SECOND])

    def redate(self, shift_s: float) -> None:
        """The time of day was set, and all of these ended so much later than they say."""
        self._recent = deque((_later(r, shift_s) for r in self._recent), maxlen=RECENT)
        self._failed = deque((_later(r, shift_s) for r in self._failed), maxlen=FAILED)
        self._slowest = [_later(r, shift_s) for r in self._slowest]

    def rank(self, new: Sequence[RequestRow], now_s: float) -> bool:
        """Let these into `slowest` where they belong, and the old ones out; whether it has changed."""
        kept = [r for r in (*self._slowest, *new) if r.ttft is not None and r.t >= now_s - SLOW_FOR_S]
        ranked = sorted(kept, key=lambda r: -(r.ttft or 0.0))[:SLOWEST]
        changed = [r.n for r in ranked] != [r.n for r in self._slowest]
        self._slowest = ranked
        return changed


def _later(shown: RequestRow, shift_s: float) -> RequestRow:
    return msgspec.structs.replace(shown, t=round(shown.t + shift_s, 2))


def _failed(shown: RequestRow) -> bool:
    return not shown.ok and shown.outcome != _LEFT


def _chosen(finished: Sequence[Finished]) -> list[Finished]:
    """Of a second with more than can be shown: the failed, the slowest, and the last."""
    if len(finished) <= EACH_SECOND:
        return list(finished)
    failed = [f for f in finished if f.failed][-EACH_SECOND // 3 :]
    slow = sorted(finished, key=lambda f: -(f.sample.ttft_s or 0.0))[: EACH_SECOND // 3]
    return list({id(f): f for f in (*failed, *slow, *finished[-EACH_SECOND // 3 :])}.values())[:EACH_SECOND]
