"""What is known of each pair of lives, a prefill worker's and a decode worker's: whether KV gets from the one to the other.

    UNKNOWN ──a hand-off was committed──▶ OK ◀──────────┐
       │                                  │             │ a canary's hand-off was committed
       └──── canary_failures canaries, or ┴──▶ BAD ─────┘
             handoff_failures hand-offs, failed running

Hand-offs of users and of canaries are written into the same book, so a pair that has traffic needs no canary. Only what may
be the way's fault counts: a full pool, a worker that drains and a client that leaves do not. A bad pair gets canaries only,
at growing pauses; how a worker is chosen with that in mind is `choice`'s. With canaries off nothing is ever called bad,
because nothing would ever find out that it is good again. Does not know workers' loads or connections.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from contracts.clock import Clock
from contracts.errors import DiptychError, HandoffError, InternalError, NoRoom, Unavailable
from contracts.worker import WorkerKind, WorkerRef
from observability.log import get_logger
from router.config import CanaryConfig
from router.workers.registry import Change, ChangeKind

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """One life of a prefill worker and one of a decode worker."""

    prefill: WorkerRef
    decode: WorkerRef

    def __str__(self) -> str:
        return f"{self.prefill.worker_id} to {self.decode.worker_id}"


class PairState(StrEnum):
    """Drawn above."""

    UNKNOWN = "unknown"
    OK = "ok"
    BAD = "bad"


class Verdicts(Protocol):
    """Who hears how hand-offs end."""

    def worked(self, pair: Pair) -> None:
        """A hand-off was committed."""
        ...

    def failed(self, pair: Pair, error: DiptychError) -> None:
        """A hand-off was given up."""
        ...


def may_be_the_way(error: DiptychError) -> bool:
    """Whether a failed hand-off says anything of the pair: room, drain, cancel, a bad request and its own deadline do not."""
    return isinstance(error, Unavailable | HandoffError | InternalError) and not isinstance(error, NoRoom)


@dataclass(slots=True)
class _Entry:
    probe_at: float  # when a canary is due
    state: PairState = PairState.UNKNOWN
    num_failed_canaries: int = 0  # running, as the next
    num_failed_handoffs: int = 0
    reason: str = ""  # of the last failure


class PairBook:
    """Owns the entries of all pairs, until one of their workers leaves or is lost. Used on the event loop.

    Hears who is there by `on_change`. A hand-off may end after its worker has left: then nothing is written down.
    """

    def __init__(self, config: CanaryConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._entries: dict[Pair, _Entry] = {}
        self._here: set[WorkerRef] = set()
        self._bad: set[Pair] = (
            set()
        )  # nearly always empty: then each choice asks about every pair of workers for nothing

    def state(self, pair: Pair) -> PairState:
        """What is known of it."""
        entry = self._entries.get(pair)
        return PairState.UNKNOWN if entry is None else entry.state

    def is_bad(self, prefill: WorkerRef, decode: WorkerRef) -> bool:
        """Whether these two must not be combined."""
        return bool(self._bad) and Pair(prefill, decode) in self._bad

    @property
    def bad(self) -> frozenset[Pair]:
        """All that must not be combined."""
        return frozenset(self._bad)

    def shares(self) -> list[tuple[str, str, float]]:
        """For each worker of a pair that was tried: its id, its pool, and the share of those pairs that works."""
        tried: dict[tuple[str, str], list[bool]] = {}
        for pair, entry in self._entries.items():
            if entry.state is not PairState.UNKNOWN:
                works = entry.state is PairState.OK
                tried.setdefault((pair.prefill.worker_id, WorkerKind.PREFILL.value), []).append(works)
                tried.setdefault((pair.decode.worker_id, WorkerKind.DECODE.value), []).append(works)
        return [(*worker, sum(works) / len(works)) for worker, works in tried.items()]

    def reason(self, pair: Pair) -> str:
        """What its last failure was; empty when the last hand-off worked."""
        entry = self._entries.get(pair)
        return "" if entry is None else entry.reason

    def worked(self, pair: Pair) -> None:
        """See Verdicts. It is good from now on, whatever was."""
        if self.state(pair) is PairState.BAD:
            log.info("pair works again", prefill=pair.prefill.worker_id, decode=pair.decode.worker_id)
        if self._is_here(pair):
            self._entries[pair] = _Entry(self._clock.now() + self._config.interval_s, PairState.OK)
            self._bad.discard(pair)

    def failed(self, pair: Pair, error: DiptychError) -> None:
        """See Verdicts: of a user's request."""
        if may_be_the_way(error) and self._config.enabled and self._is_here(pair):
            entry = self._entry(pair)
            entry.num_failed_handoffs += 1
            entry.probe_at = min(entry.probe_at, self._clock.now() + self._config.retry_s)
            self._judge(pair, entry, error.message)

    def canary_failed(self, pair: Pair, error: DiptychError) -> None:
        """The same of a canary whose way was to blame; the next one is due after a pause that grows."""
        if not self._is_here(pair):
            return
        entry, config = self._entry(pair), self._config
        entry.num_failed_canaries += 1
        pause_s = config.retry_s * 2 ** min(entry.num_failed_canaries - 1, 20)
        entry.probe_at = self._clock.now() + min(pause_s, config.max_backoff_s)
        self._judge(pair, entry, error.message)

    def canary_said_nothing(self, pair: Pair) -> None:
        """A canary ended for a reason that is not the pair's: another may be sent at the usual time."""
        if self._is_here(pair):
            self._entry(pair).probe_at = self._clock.now() + self._config.interval_s

    def due(self, pairs: Iterable[Pair]) -> Pair | None:
        """The pair among these that has waited longest for a canary which is due; None when none is."""
        now = self._clock.now()
        waiting = [(self._entry(pair).probe_at, str(pair), pair) for pair in pairs]
        overdue = [entry for entry in waiting if entry[0] <= now]
        return min(overdue, key=lambda entry: entry[:2])[2] if overdue else None

    def on_change(self, change: Change) -> None:
        """Forget the pairs of a life that is over."""
        ref = change.info.ref
        if change.kind is ChangeKind.JOINED:
            self._here.add(ref)
            return
        self._here.discard(ref)
        for pair in [p for p in self._entries if ref in (p.prefill, p.decode)]:
            del self._entries[pair]
            self._bad.discard(pair)

    def _is_here(self, pair: Pair) -> bool:
        return pair.prefill in self._here and pair.decode in self._here

    def _entry(self, pair: Pair) -> _Entry:
        return self._entries.setdefault(pair, _Entry(self._clock.now()))

    def _judge(self, pair: Pair, entry: _Entry, reason: str) -> None:
        entry.reason = reason
        config = self._config
        failed = (
            entry.num_failed_canaries >= config.canary_failures or entry.num_failed_handoffs >= config.handoff_failures
        )
        if failed and entry.state is not PairState.BAD:
            entry.state = PairState.BAD
            self._bad.add(pair)
            log.warning(
                "pair is bad: no hand-offs until a canary gets through",
                prefill=pair.prefill.worker_id,
                decode=pair.decode.worker_id,
                reason=reason,
            )
