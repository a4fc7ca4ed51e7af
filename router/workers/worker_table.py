"""Who is there, as one router knows it: each worker in its newest life, while its word is fresh. The same for every registry.

    announce ──▶ known ──announce within ttl_s──▶ known
                   ├── quiet_s without a word ──▶ known, but not offered, until it announces again
                   ├── ttl_s without a word ──▶ LOST
                   ├── leave ──▶ LEFT           finishes what it has, takes nothing new
                   ├── newer epoch ──▶ LOST (the old life), JOINED (the new one)
                   ├── another address ──▶ refused while this one's word is fresh, unless it is suspect: two have one name
                   ├── suspect ──▶ known, but not offered, until it announces again
                   └── suspect for good ──▶ known, but not offered in this life: it is not of this cluster

    hold ──▶ held: nobody can be heard, so silence means nothing; a suspect whose connection stands again is acquitted
                   after probation_s ──resume──▶ who was heard until then is as fresh as if it had spoken now

All workers of a router serve one model with one KV layout; the first sets it, others are refused with the field named.

What a peer that lies can do, without authentication (with mTLS, see docs/adr/0020-a-shared-registry.md, only members of the
deployment can speak): a farewell is believed of the very life that is known, and keeps it out for `_TOMBSTONE_TTLS` ttl_s; a
forged newer life at the worker's own address keeps it out while the forger goes on, and for ttl_s after that. A living worker
announces itself all the while, and is back with its first word after that.

Does not know how words arrive, nor how a worker is reached or chosen. Pure over the time that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from contracts.errors import LayoutMismatch, Overloaded, StaleEpoch, WorkerIdTaken
from contracts.kv_layout import check_same_layout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef, WorkerState
from observability.log import get_logger
from router.config import RegistryConfig
from router.workers.awake import Time
from router.workers.registry import Change, ChangeKind, Worker

log = get_logger(__name__)
# How many ttl_s a departed worker's epoch is remembered: longer than an announcement can be on its way (its timeout), and no
# longer than a living worker whose farewell was forged should be kept out.
_TOMBSTONE_TTLS = 2
_PROBATION_S = 1.0
# Each has a connection. Far more than one router can drive; what lies about more of them shall not take its sockets.
MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class _Departed:
    epoch: int
    at: float


class _Tombstones:
    """Lives that said farewell lately: no late word of theirs is taken."""

    def __init__(self, remembered_s: float, clock: Time) -> None:
        self._remembered_s = remembered_s
        self._clock = clock
        self._departed: dict[str, _Departed] = {}

    def put(self, ref: WorkerRef) -> None:
        """This life has gone."""
        self._departed[ref.worker_id] = _Departed(ref.epoch, self._clock.now())

    def remove(self, worker_id: str) -> None:
        """A newer life is there."""
        self._departed.pop(worker_id, None)

    def check(self, ref: WorkerRef) -> None:
        """Raise StaleEpoch for a life that has gone, and for older ones."""
        departed = self._departed.get(ref.worker_id)
        if departed is not None and ref.epoch <= departed.epoch and departed.at >= self._oldest():
            raise StaleEpoch(ref.worker_id, departed.epoch + 1, ref.epoch)

    def expire(self) -> None:
        """Forget those that are too old."""
        oldest = self._oldest()
        for worker_id in [w for w, departed in self._departed.items() if departed.at < oldest]:
            del self._departed[worker_id]

    def _oldest(self) -> float:
        return self._clock.now() - self._remembered_s


class _Standstill:
    """A clock that stands still from `hold` to `resume`; then it is as late as the other again."""

    def __init__(self, clock: Time) -> None:
        self._clock = clock
        self.held_at: float | None = None

    def now(self) -> float:
        """The instant at which words are judged: while held, the last one at which they could be heard."""
        return self._clock.now() if self.held_at is None else self.held_at


class WorkerTable:
    """One router's knowledge of the workers. Called on the event loop only."""

    def __init__(self, config: RegistryConfig, model_name: str, clock: Time) -> None:
        self._config = config
        self._model_name = model_name
        self._clock = clock
        self._time = _Standstill(clock)
        self._workers: dict[str, Worker] = {}
        self._tombstones = _Tombstones(_TOMBSTONE_TTLS * config.ttl_s, clock)
        self._suspected_at: dict[WorkerRef, float] = {}
        self._strangers: set[WorkerRef] = set()  # suspects for good
        self._last_known: dict[WorkerKind, float] = {}  # when a worker of the pool went away
        self._listeners: list[Callable[[Change], None]] = []
        self._ears: list[Callable[[WorkerRef, WorkerLoad], None]] = []

    def announce(
        self,
        info: WorkerInfo,
        load: WorkerLoad,
        age_s: float | None = None,
        *,
        judged: bool = False,
        ttl_s: float | None = None,
    ) -> None:
        """Take a word that was heard now, or looked up and `age_s` old: that acquits no suspect, who may have died since.

        `judged`: the registry itself has said whose the id is. `ttl_s`: for how long its lease says that it is believed; None
        is what was known of this life, or the configuration's.

        Raises StaleEpoch, LayoutMismatch, WorkerIdTaken when another worker that is alive goes by this id, or Overloaded when
        there are too many.
        """
        known = self._fresh(info.ref.worker_id)
        if known is None and len(self._workers) >= MAX_WORKERS:
            raise Overloaded(f"{MAX_WORKERS} workers are known, and no more than that", self._config.ttl_s)
        if known is None or known.info != info:
            if known is not None:
                _check_known(known, info, judged=judged)
            self._tombstones.check(info.ref)
            others = (w for w in list(self._workers) if w != info.ref.worker_id)
            other = next((fresh for w in others if (fresh := self._fresh(w)) is not None), None)
            _check_fits(self._model_name, other, info)
        heard_at = self._time.now() - (age_s or 0.0)
        if known is not None and known.info == info and heard_at < known.heard_at:
            return  # an older word than the last: it says nothing
        if known is not None and known.info != info:
            self._suspected_at.pop(known.info.ref, None)
            self._strangers.discard(known.info.ref)
        suspect = info.ref in self._strangers or (age_s is not None and info.ref in self._suspected_at)
        if not suspect:
            self._suspected_at.pop(info.ref, None)
        if ttl_s is None and known is not None and known.info == info:
            ttl_s = known.ttl_s
        self._workers[info.ref.worker_id] = Worker(info, load, heard_at, suspect, ttl_s)
        if known is not None and known.info != info:
            _tell(self._listeners, ChangeKind.LOST, known.info)
        if known is None or known.info != info:
            self._tombstones.remove(info.ref.worker_id)
            _tell(self._listeners, ChangeKind.JOINED, info)
        for heard in self._ears:
            heard(info.ref, load)

    def touch(self, ref: WorkerRef, age_s: float, ttl_s: float | None = None) -> bool:
        """Whether this life is known; then its word was looked up, is `age_s` old of `ttl_s`, and needs not be read."""
        known = self._fresh(ref.worker_id)
        if known is None or known.info.ref != ref:
            return False
        heard_at = max(known.heard_at, self._time.now() - age_s)
        if (heard_at, ttl_s) != (known.heard_at, known.ttl_s):
            self._workers[ref.worker_id] = replace(known, heard_at=heard_at, ttl_s=ttl_s)
        return True

    def leave(self, ref: WorkerRef, kind: ChangeKind = ChangeKind.LEFT) -> None:
        """Take a farewell, or (LOST) hear that it has no right to its name; unknown or other lives are ignored."""
        known = self._workers.get(ref.worker_id)
        if known is not None and known.info.ref == ref:
            self._forget(known, kind)

    def workers(self, kind: WorkerKind | None = None) -> tuple[Worker, ...]:
        """All whose word is fresh, whatever their state."""
        now, config = self._time.now(), self._config
        return tuple(
            w
            for w in self._workers.values()
            if w.heard_at >= now - _ttl_s(w, config) and (kind is None or w.info.kind is kind)
        )

    def ready(self, kind: WorkerKind) -> tuple[Worker, ...]:
        """Those that take work."""
        now, config = self._time.now(), self._config
        return tuple(
            w
            for w in self.workers(kind)
            if w.load.state is WorkerState.READY
            and w.heard_at >= now - config.quiet * _ttl_s(w, config)
            and not w.suspect
        )

    def absent_s(self, kind: WorkerKind) -> float:
        """For how many seconds no worker of this pool has been known: 0 while one is, infinite if none ever was."""
        if self.workers(kind):
            return 0.0
        silent = [w.heard_at for w in self._workers.values() if w.info.kind is kind]
        return self._clock.now() - max(self._last_known.get(kind, -math.inf), *silent, -math.inf)

    def suspect(self, ref: WorkerRef, *, for_good: bool = False) -> None:
        """Do not offer this life until it announces itself again, or never."""
        known = self._workers.get(ref.worker_id)
        if known is not None and known.info.ref == ref:
            if for_good:
                self._strangers.add(ref)
            self._workers[ref.worker_id] = replace(known, suspect=True)
            self._suspected_at[ref] = self._clock.now()

    def acquit(self, ref: WorkerRef) -> None:
        """While held, offer a suspect again whose connection stands, if it has been one for a while; see the drawing."""
        known = self._workers.get(ref.worker_id)
        since = self._suspected_at.get(ref)
        if self._time.held_at is None or known is None or since is None or ref in self._strangers:
            return
        if self._clock.now() - since < _PROBATION_S:
            return
        log.info("a suspect's connection stands again", worker_id=ref.worker_id, epoch=ref.epoch)
        self._workers[ref.worker_id] = replace(known, suspect=False)
        del self._suspected_at[ref]

    def expire(self) -> None:
        """Forget those whose word is no longer fresh."""
        now = self._time.now()
        for worker in list(self._workers.values()):
            if worker.heard_at < now - _ttl_s(worker, self._config):
                self._forget(worker, ChangeKind.LOST)
        self._tombstones.expire()

    def hold(self) -> None:
        """Nobody can be heard from now on: time does not count against anybody. Idempotent."""
        if self._time.held_at is None:
            self._time.held_at = self._clock.now()

    def resume(self) -> None:
        """Words can be heard again: who was heard until `hold` has as long to speak as after a word. Idempotent."""
        held_at, self._time.held_at = self._time.held_at, None
        if held_at is None:
            return
        now = self._clock.now()
        for worker_id, worker in self._workers.items():
            was_quiet = worker.heard_at < held_at - self._config.quiet * _ttl_s(worker, self._config)
            heard_at = worker.heard_at + now - held_at if was_quiet else now
            self._workers[worker_id] = replace(worker, heard_at=heard_at)

    def subscribe(
        self, listener: Callable[[Change], None], heard: Callable[[WorkerRef, WorkerLoad], None] | None = None
    ) -> None:
        """Call `listener` on the event loop for every change from now on, and `heard` for every word, after its change."""
        self._listeners.append(listener)
        if heard is not None:
            self._ears.append(heard)

    def _fresh(self, worker_id: str) -> Worker | None:
        """That worker, forgotten if its word is no longer fresh."""
        known = self._workers.get(worker_id)
        if known is not None and known.heard_at < self._time.now() - _ttl_s(known, self._config):
            self._forget(known, ChangeKind.LOST)
            return None
        return known

    def _forget(self, worker: Worker, kind: ChangeKind) -> None:
        ref = worker.info.ref
        del self._workers[ref.worker_id]
        self._suspected_at.pop(ref, None)
        self._strangers.discard(ref)
        self._last_known[worker.info.kind] = self._clock.now()
        if kind is ChangeKind.LEFT:
            self._tombstones.put(ref)
        _tell(self._listeners, kind, worker.info)


def _ttl_s(worker: Worker, config: RegistryConfig) -> float:
    return config.ttl_s if worker.ttl_s is None else worker.ttl_s


def _check_known(known: Worker, info: WorkerInfo, *, judged: bool) -> None:
    """A restart where it was, or elsewhere after the old life fell silent, takes the name over; a living namesake does not."""
    ref = info.ref
    if not judged and known.info.address != info.address and not known.suspect:
        raise WorkerIdTaken(ref.worker_id, known.info.address, info.address)
    if ref.epoch < known.info.ref.epoch:
        raise StaleEpoch(ref.worker_id, known.info.ref.epoch, ref.epoch)


def _check_fits(model_name: str, other: Worker | None, info: WorkerInfo) -> None:
    """All serve one model, in the layout that any `other` has."""
    if info.model_name != model_name:
        raise LayoutMismatch("model_name", model_name, info.model_name)
    if other is not None:
        check_same_layout(other.info.layout, info.layout)


def _tell(listeners: Sequence[Callable[[Change], None]], kind: ChangeKind, info: WorkerInfo) -> None:
    log.info(
        f"worker {kind}",
        worker_id=info.ref.worker_id,
        epoch=info.ref.epoch,
        pool=info.kind.value,
        address=info.address,
    )
    for listener in listeners:
        listener(Change(kind, info))
