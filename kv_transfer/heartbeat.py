"""Keeps the leases of a prefill worker's hand-offs: one Renew for each decode worker, whatever the number of its hand-offs.

    keep(grant, …) ──▶ every renew_every_s: Renew(all ids at this life of a decode worker) ──▶ kept on
                                └─▶ an id is lost, the life is over, or no answer for as long as the lease lasts: `lost(cause)`
    let_go(grant)  ──▶ not renewed any more; with the last one at a decode worker its heartbeat ends

The lease binds both sides: decode gives blocks back that are not renewed, and prefill holds none for a decode worker that
does not answer. Owns no blocks. Does not know states.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from contracts.clock import Clock
from contracts.errors import DiptychError, InternalError, TransferFailed, UnknownHandoff
from contracts.ticket import Grant, RenewRequest
from contracts.worker import WorkerRef
from kv_transfer.asking import NO_ANSWER, Asker
from kv_transfer.config import SenderConfig
from kv_transfer.endings import until_done
from kv_transfer.peer import HandoffPeer

logger = logging.getLogger(__name__)

Lost = Callable[[DiptychError], None]


@dataclass(slots=True)
class _Kept:
    """One lease. `deadline_s` is on the worker's clock."""

    handoff_id: str
    peer: HandoffPeer
    lost: Lost
    deadline_s: float


class Heartbeats:
    """All leases of one prefill worker. Used from one event loop."""

    def __init__(self, ref: WorkerRef, clock: Clock, config: SenderConfig) -> None:
        self._ref = ref
        self._clock = clock
        self._config = config
        self._kept: dict[WorkerRef, dict[str, _Kept]] = {}
        self._beating: dict[WorkerRef, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def keep(self, grant: Grant, peer: HandoffPeer, lost: Lost) -> None:
        """Renew this lease until `let_go`. `lost` is called once if it cannot be kept, and then it is let go of."""
        kept = self._kept.setdefault(grant.decode, {})
        kept[grant.handoff_id] = _Kept(grant.handoff_id, peer, lost, self._clock.now() + grant.lease_s)
        if grant.decode not in self._beating:
            task = asyncio.ensure_future(self._beat(grant.decode))
            self._beating[grant.decode] = task
            self._ending.add(task)
            task.add_done_callback(lambda ended: self._ended(grant.decode, ended))

    def let_go(self, grant: Grant) -> None:
        """Renew it no more. Idempotent."""
        self._drop(grant.decode, (grant.handoff_id,))

    def over(self, decode: WorkerRef, cause: DiptychError) -> None:
        """This life of a decode worker is over: all that is held there is lost, now."""
        self._lose(decode, tuple(self._kept.get(decode, ())), cause)

    async def close(self) -> None:
        """Return when no heartbeat is under way. Idempotent."""
        for task in tuple(self._ending):
            task.cancel()
            await until_done(task)

    async def _beat(self, decode: WorkerRef) -> None:
        asker = Asker(self._ref, decode, self._clock, self._config)
        while True:
            await self._clock.sleep(self._config.renew_every_s)
            asked_at, kept = self._clock.now(), dict(self._kept[decode])
            peer = next(reversed(kept.values())).peer  # the one that was got last is the last to be let go
            try:
                answer = await asker.once(peer.renew(RenewRequest(self._ref, decode, tuple(kept))))
            except NO_ANSWER as error:
                self._not_answered(decode, error)
                continue
            except DiptychError as error:
                self._lose(decode, tuple(kept), error)
                continue
            for name, one in kept.items():
                if name in answer.lost_handoff_ids:
                    self._lose(decode, (name,), UnknownHandoff(f"{decode.worker_id} does not hold {name} any more"))
                else:
                    one.deadline_s = asked_at + answer.lease_s

    def _not_answered(self, decode: WorkerRef, error: BaseException) -> None:
        logger.info("%s: leases not renewed yet: %s", decode.worker_id, error)
        now = self._clock.now()
        over = tuple(one.handoff_id for one in self._kept[decode].values() if one.deadline_s <= now)
        self._lose(decode, over, TransferFailed(f"the lease at {decode.worker_id} ran out: {error}"))

    def _lose(self, decode: WorkerRef, handoff_ids: tuple[str, ...], cause: DiptychError) -> None:
        for one in self._drop(decode, handoff_ids):
            one.lost(cause)

    def _drop(self, decode: WorkerRef, handoff_ids: tuple[str, ...]) -> list[_Kept]:
        """Those of them that were still kept."""
        kept = self._kept.get(decode, {})
        dropped = [kept.pop(name) for name in handoff_ids if name in kept]
        if dropped and not kept:
            del self._kept[decode]
            self._beating.pop(decode).cancel()
        return dropped

    def _ended(self, decode: WorkerRef, task: asyncio.Task[None]) -> None:
        """It ends by cancellation; anything else is a fault of ours, and a lease that nobody renews must not seem to be kept."""
        self._ending.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("leases at %s cannot be renewed", decode.worker_id, exc_info=error)
            self.over(decode, InternalError(f"leases at {decode.worker_id} cannot be renewed: {type(error).__name__}"))
