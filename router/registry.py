"""Who is there: the workers that announced themselves, each in its newest life, while their word is fresh.

    announce ──▶ known ──announce within ttl_s──▶ known
                   ├── quiet_s without a word ──▶ known, but not offered, until it announces again
                   ├── ttl_s without a word ──▶ LOST
                   ├── leave ──▶ LEFT           finishes what it has, takes nothing new
                   ├── newer epoch ──▶ LOST (the old life), JOINED (the new one)
                   ├── another address ──▶ refused while this one's word is fresh, unless it is suspect: two have one name
                   └── suspect ──▶ known, but not offered, until it announces again

All workers of a router serve one model with one KV layout; the first sets it, others are refused with the field named.
Does not know how a worker is reached or chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from contracts.clock import Clock
from contracts.errors import LayoutMismatch, StaleEpoch, WorkerIdTaken
from contracts.kv_layout import check_same_layout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef, WorkerState
from observability.log import get_logger
from router.config import RegistryConfig

log = get_logger(__name__)
# How many ttl_s a departed worker's epoch is remembered, so that a late announcement does not revive it.
_TOMBSTONE_TTLS = 60


class ChangeKind(StrEnum):
    """What happened to a worker."""

    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Change:
    """One event in the life of one worker."""

    kind: ChangeKind
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class Worker:
    """A known worker, and when (on the router's clock) it last said so."""

    info: WorkerInfo
    load: WorkerLoad
    heard_at: float
    suspect: bool = False


class Registry(Protocol):
    """What the router needs from any registry, embedded or shared."""

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        """Take a sign of life; return for how many seconds it is believed.

        Raises StaleEpoch, LayoutMismatch, or WorkerIdTaken when another worker that is alive goes by this id.
        """
        ...

    async def leave(self, ref: WorkerRef) -> None:
        """A worker takes no new work from now on. Unknown or older lives are ignored."""
        ...

    def workers(self, kind: WorkerKind | None = None) -> tuple[Worker, ...]:
        """All known workers whose word is fresh, whatever their state."""
        ...

    def ready(self, kind: WorkerKind) -> tuple[Worker, ...]:
        """Those that take work."""
        ...

    def absent_s(self, kind: WorkerKind) -> float:
        """For how many seconds no worker of this pool has been known: 0 while one is, infinite if none ever was."""
        ...

    def suspect(self, ref: WorkerRef) -> None:
        """A connection to this worker broke, or it refuses work: do not offer it until it announces again."""
        ...

    def expire(self) -> None:
        """Forget those whose word is no longer fresh."""
        ...

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` on the event loop for every change from now on."""
        ...


class EmbeddedRegistry:
    """The registry that lives in a router's own process. Owns its table; called on the event loop only."""

    def __init__(self, config: RegistryConfig, model_name: str, clock: Clock) -> None:
        self._config = config
        self._model_name = model_name
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._departed: dict[str, tuple[int, float]] = {}  # worker id → (epoch, when)
        self._last_known: dict[WorkerKind, float] = {}  # when a worker of the pool went away
        self._listeners: list[Callable[[Change], None]] = []

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        """See Registry."""
        self.expire()
        worker_id, epoch = info.ref.worker_id, info.ref.epoch
        self._check_name(info)
        self._check_epoch(worker_id, epoch)
        self._check_fits(info)
        known = self._workers.get(worker_id)
        self._workers[worker_id] = Worker(info, load, self._clock.now())
        if known is not None and known.info != info:
            self._tell(ChangeKind.LOST, known.info)
        if known is None or known.info != info:
            self._departed.pop(worker_id, None)
            self._tell(ChangeKind.JOINED, info)
        return self._config.ttl_s

    async def leave(self, ref: WorkerRef) -> None:
        """See Registry."""
        known = self._workers.get(ref.worker_id)
        if known is not None and known.info.ref == ref:
            self._forget(known, ChangeKind.LEFT)

    def workers(self, kind: WorkerKind | None = None) -> tuple[Worker, ...]:
        """See Registry."""
        oldest = self._clock.now() - self._config.ttl_s
        return tuple(
            w for w in self._workers.values() if w.heard_at >= oldest and (kind is None or w.info.kind is kind)
        )

    def ready(self, kind: WorkerKind) -> tuple[Worker, ...]:
        """See Registry."""
        oldest = self._clock.now() - self._config.quiet_s
        return tuple(
            w
            for w in self.workers(kind)
            if w.load.state is WorkerState.READY and w.heard_at >= oldest and not w.suspect
        )

    def absent_s(self, kind: WorkerKind) -> float:
        """See Registry."""
        if self.workers(kind):
            return 0.0
        silent = [w.heard_at for w in self._workers.values() if w.info.kind is kind]
        return self._clock.now() - max(self._last_known.get(kind, -math.inf), *silent, -math.inf)

    def suspect(self, ref: WorkerRef) -> None:
        """See Registry."""
        known = self._workers.get(ref.worker_id)
        if known is not None and known.info.ref == ref:
            self._workers[ref.worker_id] = replace(known, suspect=True)

    def expire(self) -> None:
        """See Registry."""
        now = self._clock.now()
        for worker in list(self._workers.values()):
            if worker.heard_at < now - self._config.ttl_s:
                self._forget(worker, ChangeKind.LOST)
        forgotten = now - _TOMBSTONE_TTLS * self._config.ttl_s
        for worker_id in [w for w, (_, when) in self._departed.items() if when < forgotten]:
            del self._departed[worker_id]

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """See Registry."""
        self._listeners.append(listener)

    def _check_name(self, info: WorkerInfo) -> None:
        """A restart where it was, or elsewhere after the old life fell silent, takes the name over; a living namesake does not."""
        known = self._workers.get(info.ref.worker_id)
        if known is not None and known.info.address != info.address and not known.suspect:
            raise WorkerIdTaken(info.ref.worker_id, known.info.address, info.address)

    def _check_epoch(self, worker_id: str, epoch: int) -> None:
        known = self._workers.get(worker_id)
        if known is not None and epoch < known.info.ref.epoch:
            raise StaleEpoch(worker_id, known.info.ref.epoch, epoch)
        departed, _ = self._departed.get(worker_id, (-1, 0.0))
        if epoch <= departed:
            raise StaleEpoch(worker_id, departed + 1, epoch)

    def _check_fits(self, info: WorkerInfo) -> None:
        if info.model_name != self._model_name:
            raise LayoutMismatch("model_name", self._model_name, info.model_name)
        for other in self._workers.values():
            if other.info.ref.worker_id != info.ref.worker_id:
                check_same_layout(other.info.layout, info.layout)

    def _forget(self, worker: Worker, kind: ChangeKind) -> None:
        ref = worker.info.ref
        del self._workers[ref.worker_id]
        self._last_known[worker.info.kind] = self._clock.now()
        if kind is ChangeKind.LEFT:
            self._departed[ref.worker_id] = (ref.epoch, self._clock.now())
        self._tell(kind, worker.info)

    def _tell(self, kind: ChangeKind, info: WorkerInfo) -> None:
        log.info(
            f"worker {kind}",
            worker_id=info.ref.worker_id,
            epoch=info.ref.epoch,
            pool=info.kind.value,
            address=info.address,
        )
        for listener in self._listeners:
            listener(Change(kind, info))
