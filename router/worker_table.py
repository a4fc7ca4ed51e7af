"""Who is there, as one router knows it: each worker in its newest life, while its word is fresh. The same for every registry.

    announce ──▶ known ──announce within ttl_s──▶ known
                   ├── quiet_s without a word ──▶ known, but not offered, until it announces again
                   ├── ttl_s without a word ──▶ LOST
                   ├── leave ──▶ LEFT           finishes what it has, takes nothing new
                   ├── newer epoch ──▶ LOST (the old life), JOINED (the new one)
                   ├── another address ──▶ refused while this one's word is fresh, unless it is suspect: two have one name
                   └── suspect ──▶ known, but not offered, until it announces again

    hold ──▶ held: nobody can be heard, so silence means nothing; a suspect whose connection stands again is acquitted
                   after probation_s ──resume──▶ who was heard until then is as fresh as if it had spoken now

All workers of a router serve one model with one KV layout; the first sets it, others are refused with the field named.

What a peer that lies can do, without authentication (with mTLS, see docs/adr/0020-a-shared-registry.md, only members of the
deployment can speak): a farewell is believed of the very life that is known, and keeps it out for `_TOMBSTONE_TTLS` ttl_s; a
forged newer life at the worker's own address keeps it out while the forger goes on, and for ttl_s after that. A living worker
announces itself all the while, and is back with its first word after that.

Does not know how words arrive, nor how a worker is reached or chosen. Pure over the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from contracts.clock import Clock
from contracts.errors import LayoutMismatch, StaleEpoch, WorkerIdTaken
from contracts.kv_layout import check_same_layout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef, WorkerState
from observability.log import get_logger
from router.config import RegistryConfig
from router.registry import Change, ChangeKind, Worker

log = get_logger(__name__)
# How many ttl_s a departed worker's epoch is remembered: longer than an announcement can be on its way (its timeout), and no
# longer than a living worker whose farewell was forged should be kept out.
_TOMBSTONE_TTLS = 2
_PROBATION_S = 1.0


@dataclass(frozen=True, slots=True)
class _Departed:
    epoch: int
    at: float


class WorkerTable:
    """One router's knowledge of the workers. Called on the event loop only."""

    def __init__(self, config: RegistryConfig, model_name: str, clock: Clock) -> None:
        self._config = config
        self._model_name = model_name
        self._clock = clock
        self._held_at: float | None = None
        self._workers: dict[str, Worker] = {}
        self._departed: dict[str, _Departed] = {}
        self._suspected_at: dict[WorkerRef, float] = {}
        self._last_known: dict[WorkerKind, float] = {}  # when a worker of the pool went away
        self._listeners: list[Callable[[Change], None]] = []

    def announce(self, info: WorkerInfo, load: WorkerLoad, age_s: float | None = None, *, judged: bool = False) -> None:
        """Take a word that was heard now, or looked up and `age_s` old: that acquits no suspect, who may have died since.

        `judged`: the registry itself has said whose the id is.

        Raises StaleEpoch, LayoutMismatch, or WorkerIdTaken when another worker that is alive goes by this id.
        """
        self.expire()
        if not judged:
            self._check_name(info)
        self._check_epoch(info.ref)
        self._check_fits(info)
        known = self._workers.get(info.ref.worker_id)
        heard_at = self._now() - (age_s or 0.0)
        if known is not None and known.info == info and heard_at < known.heard_at:
            return  # an older word than the last: it says nothing
        if known is not None and known.info != info:
            self._suspected_at.pop(known.info.ref, None)
        suspect = age_s is not None and info.ref in self._suspected_at
        if not suspect:
            self._suspected_at.pop(info.ref, None)
        self._workers[info.ref.worker_id] = Worker(info, load, heard_at, suspect)
        if known is not None and known.info != info:
            self._tell(ChangeKind.LOST, known.info)
        if known is None or known.info != info:
            self._departed.pop(info.ref.worker_id, None)
            self._tell(ChangeKind.JOINED, info)

    def leave(self, ref: WorkerRef) -> None:
        """Take a farewell; unknown or other lives are ignored."""
        known = self._workers.get(ref.worker_id)
        if known is not None and known.info.ref == ref:
            self._forget(known, ChangeKind.LEFT)

    def workers(self, kind: WorkerKind | None = None) -> tuple[Worker, ...]:
        """All whose word is fresh, whatever their state."""
        oldest = self._now() - self._config.ttl_s
        return tuple(
            w for w in self._workers.values() if w.heard_at >= oldest and (kind is None or w.info.kind is kind)
        )

    def ready(self, kind: WorkerKind) -> tuple[Worker, ...]:
        """Those that take work."""
        oldest = self._now() - self._config.quiet_s
        return tuple(
            w
            for w in self.workers(kind)
            if w.load.state is WorkerState.READY and w.heard_at >= oldest and not w.suspect
        )

    def absent_s(self, kind: WorkerKind) -> float:
        """For how many seconds no worker of this pool has been known: 0 while one is, infinite if none ever was."""
        if self.workers(kind):
            return 0.0
        silent = [w.heard_at for w in self._workers.values() if w.info.kind is kind]
        return self._clock.now() - max(self._last_known.get(kind, -math.inf), *silent, -math.inf)

    def suspect(self, ref: WorkerRef) -> None:
        """Do not offer this life until it announces itself again."""
        known = self._workers.get(ref.worker_id)
        if known is not None and known.info.ref == ref:
            self._workers[ref.worker_id] = replace(known, suspect=True)
            self._suspected_at[ref] = self._clock.now()

    def acquit(self, ref: WorkerRef) -> None:
        """While held, offer a suspect again whose connection stands, if it has been one for a while; see the drawing."""
        known = self._workers.get(ref.worker_id)
        since = self._suspected_at.get(ref)
        if self._held_at is None or known is None or since is None or self._clock.now() - since < _PROBATION_S:
            return
        log.info("a suspect's connection stands again", worker_id=ref.worker_id, epoch=ref.epoch)
        self._workers[ref.worker_id] = replace(known, suspect=False)
        del self._suspected_at[ref]

    def expire(self) -> None:
        """Forget those whose word is no longer fresh."""
        now = self._now()
        for worker in list(self._workers.values()):
            if worker.heard_at < now - self._config.ttl_s:
                self._forget(worker, ChangeKind.LOST)
        forgotten = self._clock.now() - _TOMBSTONE_TTLS * self._config.ttl_s
        for worker_id in [w for w, departed in self._departed.items() if departed.at < forgotten]:
            del self._departed[worker_id]

    def hold(self) -> None:
        """Nobody can be heard from now on: time does not count against anybody. Idempotent."""
        if self._held_at is None:
            self._held_at = self._clock.now()

    def resume(self) -> None:
        """Words can be heard again: who was heard until `hold` has as long to speak as after a word. Idempotent."""
        if self._held_at is None:
            return
        held_at, self._held_at = self._held_at, None
        now = self._clock.now()
        for worker_id, worker in self._workers.items():
            was_quiet = worker.heard_at < held_at - self._config.quiet_s
            heard_at = worker.heard_at + now - held_at if was_quiet else now
            self._workers[worker_id] = replace(worker, heard_at=heard_at)

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call `listener` on the event loop for every change from now on."""
        self._listeners.append(listener)

    def _now(self) -> float:
        """The instant at which words are judged: while held, the last one at which they could be heard."""
        return self._clock.now() if self._held_at is None else self._held_at

    def _check_name(self, info: WorkerInfo) -> None:
        """A restart where it was, or elsewhere after the old life fell silent, takes the name over; a living namesake does not."""
        known = self._workers.get(info.ref.worker_id)
        if known is not None and known.info.address != info.address and not known.suspect:
            raise WorkerIdTaken(info.ref.worker_id, known.info.address, info.address)

    def _check_epoch(self, ref: WorkerRef) -> None:
        known = self._workers.get(ref.worker_id)
        if known is not None and ref.epoch < known.info.ref.epoch:
            raise StaleEpoch(ref.worker_id, known.info.ref.epoch, ref.epoch)
        departed = self._departed.get(ref.worker_id)
        if departed is not None and ref.epoch <= departed.epoch:
            raise StaleEpoch(ref.worker_id, departed.epoch + 1, ref.epoch)

    def _check_fits(self, info: WorkerInfo) -> None:
        if info.model_name != self._model_name:
            raise LayoutMismatch("model_name", self._model_name, info.model_name)
        for other in self._workers.values():
            if other.info.ref.worker_id != info.ref.worker_id:
                check_same_layout(other.info.layout, info.layout)

    def _forget(self, worker: Worker, kind: ChangeKind) -> None:
        ref = worker.info.ref
        del self._workers[ref.worker_id]
        self._suspected_at.pop(ref, None)
        self._last_known[worker.info.kind] = self._clock.now()
        if kind is ChangeKind.LEFT:
            self._departed[ref.worker_id] = _Departed(ref.epoch, self._clock.now())
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
