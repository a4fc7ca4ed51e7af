"""The decode side of all hand-offs of one worker: grants room, keeps leases, commits, drains.

    connect ─▶ reserve ─▶ renew … ─▶ commit ─▶ engine           states of each: `handoff.TARGET_TABLE`, driven by `incoming.py`
                       └─▶ abort, lease ran out, prefill restarted ─▶ DRAINING ─▶ blocks back in the pool

A HandoffPeer: used directly within one process, behind gRPC between two. Every message must name both current lives
(epochs), as every answer does; a newer life of a prefill worker ends the hand-offs of its older ones. An id belongs to the
life that reserved it: another's Commit, Abort or Renew for it is refused and changes nothing. Finished ids are remembered
(bounded), so that late and repeated messages are answered and harm nothing.

Does not know gRPC, the engine or how bytes travel.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

from contracts.clock import Clock
from contracts.errors import (
    DiptychError,
    Draining,
    HandoffError,
    NoRoom,
    RequestCancelled,
    StaleEpoch,
    UnknownHandoff,
)
from contracts.kv_layout import check_same_layout
from contracts.ticket import (
    AbortRequest,
    AbortResponse,
    CommitResponse,
    ConnectRequest,
    ConnectResponse,
    Grant,
    RenewRequest,
    RenewResponse,
    ReserveRequest,
    Ticket,
)
from contracts.worker import WorkerRef
from kv_transfer.blocks import block_ranges
from kv_transfer.config import ReceiverConfig
from kv_transfer.connector import ByteRange, Connector
from kv_transfer.endings import report, until_done
from kv_transfer.handoff import TargetEvent, TargetState
from kv_transfer.incoming import Adopted, Incoming, Outcome, Reservation, Surroundings
from kv_transfer.links import Side
from kv_transfer.memory import Endings, Lives, check_owner, said_again
from kv_transfer.pool import HandoffEvents, KVPool, LeaseT
from kv_transfer.verifier import Verifier

logger = logging.getLogger(__name__)

MAX_PEERS = 4096  # prefill workers whose newest epoch is remembered
OnFatal = Callable[[BaseException], None]


class Receiver(Generic[LeaseT]):
    """See the module. `on_fatal` gets an exception that is a fault of ours: the worker must not go on."""

    def __init__(
        self, side: Side, pool: KVPool[LeaseT], events: HandoffEvents, config: ReceiverConfig, on_fatal: OnFatal
    ) -> None:
        self._side = side
        self._pool = pool
        self._events = events
        self._config = config
        self._on_fatal = on_fatal
        verifier = Verifier(side.layout, config.integrity, side.digester)
        self._around = Surroundings(
            pool, side.clock, config, side.layout, self._ended, on_fatal, side.observer, verifier
        )
        self._asking: dict[str, tuple[ReserveRequest, asyncio.Task[Grant]]] = {}
        self._live: dict[str, Incoming[LeaseT]] = {}
        self._finished: Endings[int | DiptychError] = Endings(config.max_remembered)
        self._lives = Lives(side.ref, MAX_PEERS)
        self._sweep: asyncio.Task[None] | None = None
        self._draining = False

    def start(self) -> None:
        """Begin to end leases that run out. Called once, in the event loop that carries the messages."""
        self._sweep = asyncio.ensure_future(_sweep_leases(self._live, self._side.clock, self._config))
        report(self._sweep, self._on_fatal)

    async def connect(self, request: ConnectRequest) -> ConnectResponse:
        """See HandoffPeer."""
        self._check_lives(request.prefill, request.decode)
        check_same_layout(self._side.layout, request.layout)
        return ConnectResponse(request.prefill, self._side.ref, tuple(c.address() for c in self._side.connectors))

    async def reserve(self, request: ReserveRequest) -> Grant:
        """See HandoffPeer. UnknownHandoff for an id that has ended; Draining while this worker drains."""
        self._check_lives(request.prefill, request.decode)
        handoff_id = request.handoff_id
        live = self._live.get(handoff_id)
        if live is not None:
            _check_same(live.reservation.request, request)
            if live.state is not TargetState.RESERVED:
                raise UnknownHandoff(f"hand-off {handoff_id} is {live.state} already")
            live.renew()
            return live.reservation.grant
        if self._finished.of(handoff_id, request.prefill) is not None:
            raise UnknownHandoff(f"hand-off {handoff_id} has ended")
        if self._draining:
            raise Draining(f"{self._side.ref.worker_id} is about to stop")
        if handoff_id in self._asking:
            first, asking = self._asking[handoff_id]
            _check_same(first, request)
        else:
            asking = asyncio.ensure_future(self._take(request))
            self._asking[handoff_id] = request, asking
            report(asking, self._on_fatal)
        return await asyncio.shield(asking)

    async def commit(self, ticket: Ticket) -> CommitResponse:
        """See HandoffPeer."""
        self._check_lives(ticket.prefill, ticket.decode)
        live, clock = self._live.get(ticket.handoff_id), self._side.clock
        came = clock.now()
        if live is not None:
            check_owner(ticket.handoff_id, live.reservation.owner, ticket.prefill)
            outcome: int | DiptychError | None = await live.commit(ticket)
        else:
            outcome = self._finished.of(ticket.handoff_id, ticket.prefill)
        if outcome is None:
            raise UnknownHandoff(f"hand-off {ticket.handoff_id} is not known here")
        if isinstance(outcome, int):
            given = None if live is None else live.given_at
            checked_s = 0.0 if given is None else max(0.0, given - came)
            took_s = clock.now() - came
            return CommitResponse(ticket.handoff_id, ticket.prefill, self._side.ref, outcome, took_s, checked_s)
        raise said_again(outcome)

    async def abort(self, request: AbortRequest) -> AbortResponse:
        """See HandoffPeer. An id that is not known is remembered: a Reserve that comes after its Abort gets nothing."""
        self._check_lives(request.prefill, request.decode)
        cause = RequestCancelled(f"given up by {request.prefill.worker_id}: {request.reason}")
        live = self._live.get(request.handoff_id)
        if live is not None:
            check_owner(request.handoff_id, live.reservation.owner, request.prefill)
            live.end(TargetEvent.ABORTED, cause)
        else:
            self._finished.give_up(request.handoff_id, request.prefill, cause)
        return AbortResponse(request.handoff_id, request.prefill, self._side.ref)

    def give_up(self, handoff_id: str, cause: DiptychError) -> None:
        """This worker's own word that nobody waits for a hand-off any more: its blocks do not wait for the lease to run out.

        Harmless for one that is adopted or not known.
        """
        live = self._live.get(handoff_id)
        if live is not None:
            live.end(TargetEvent.ABORTED, cause)

    async def renew(self, request: RenewRequest) -> RenewResponse:
        """See HandoffPeer. Adopted hand-offs are not lost; they need no lease any more. Another's are not the asker's."""
        self._check_lives(request.prefill, request.decode)
        lost = tuple(name for name in request.handoff_ids if not self._renewed(name, request.prefill))
        return RenewResponse(request.prefill, self._side.ref, lost, self._config.lease_s)

    def counts(self) -> Mapping[TargetState, int]:
        """Hand-offs that hold a lease, by state. From any thread."""
        return Counter(live.state for live in list(self._live.values()))

    async def drain(self, patience_s: float) -> None:
        """Grant nothing new, give up after `patience_s` what is not adopted then; return when nothing holds a lease."""
        self._draining = True
        enough_at = self._side.clock.now() + patience_s
        while self._asking or self._live:
            if self._side.clock.now() >= enough_at:
                for live in tuple(self._live.values()):
                    if live.state in (TargetState.RESERVED, TargetState.RECEIVING):
                        live.end(TargetEvent.ABORTED, Draining(f"{self._side.ref.worker_id} is about to stop"))
            await self._side.clock.sleep(self._config.quiesce_poll_s)

    async def close(self) -> None:
        """End everything now. Blocks that a stopped writer may still touch are left fenced, and said so in the log."""
        self._draining = True
        if self._sweep is not None:
            self._sweep.cancel()
            await until_done(self._sweep)
        for _, asking in tuple(self._asking.values()):
            await until_done(asking)
        for live in tuple(self._live.values()):
            await live.close(RequestCancelled(f"{self._side.ref.worker_id} goes down"))

    def _check_lives(self, prefill: WorkerRef, decode: WorkerRef) -> None:
        if self._lives.check(prefill, decode):
            for live in tuple(self._live.values()):
                before = live.reservation.owner
                if before.worker_id == prefill.worker_id and before.epoch < prefill.epoch:
                    cause = StaleEpoch(prefill.worker_id, prefill.epoch, before.epoch)
                    live.end(TargetEvent.PEER_RESTARTED, cause)

    async def _take(self, request: ReserveRequest) -> Grant:
        """Ask the engine for room. Whatever has changed meanwhile (an abort, a restart) is looked at before granting."""
        try:
            lease = await self._pool.reserve(request.handoff_id, request.num_tokens, request.block_hashes)
        finally:
            del self._asking[request.handoff_id]
        if lease is None:
            raise NoRoom(f"no room for {request.num_tokens} tokens", self._config.retry_after_s)
        try:
            self._check_lives(request.prefill, request.decode)
            if self._finished.of(request.handoff_id, request.prefill) is not None:
                raise UnknownHandoff(f"hand-off {request.handoff_id} has ended")
            first = lease.num_cached_tokens // self._side.layout.block_size
            windows = open_windows(self._side.connectors, block_ranges(lease.block_ids[first:], self._side.layout))
        except DiptychError:
            await self._pool.release(lease)  # no key has left this process
            raise
        grant = Grant(
            handoff_id=request.handoff_id,
            prefill=request.prefill,
            decode=self._side.ref,
            block_ids=tuple(lease.block_ids),
            num_cached_tokens=lease.num_cached_tokens,
            lease_s=self._config.lease_s,
            windows=tuple((connector.address(), key) for connector, key in windows),
        )
        self._live[request.handoff_id] = Incoming(Reservation(request, grant, lease, windows), self._around)
        return grant

    def _renewed(self, handoff_id: str, asker: WorkerRef) -> bool:
        try:
            live = self._live.get(handoff_id)
            if live is not None:
                check_owner(handoff_id, live.reservation.owner, asker)
                return live.renew()
            if handoff_id in self._asking:
                check_owner(handoff_id, self._asking[handoff_id][0].prefill, asker)
                return True
            return isinstance(self._finished.of(handoff_id, asker), int)
        except HandoffError as error:  # one that is not the asker's must not spoil the renewal of the others
            logger.warning("not renewed: %s", error)
            return False

    def _ended(self, handoff_id: str, outcome: Outcome) -> None:
        owner = self._live.pop(handoff_id).reservation.owner
        if isinstance(outcome, Adopted):
            self._finished.put(handoff_id, owner, outcome.num_blocks)
            self._events.on_adopted(outcome.ticket)
        else:
            self._finished.put(handoff_id, owner, outcome)
            self._events.on_lost(handoff_id, outcome)


def _check_same(first: ReserveRequest, again: ReserveRequest) -> None:
    check_owner(first.handoff_id, first.prefill, again.prefill)
    if first != again:
        raise HandoffError(f"hand-off {first.handoff_id} was reserved with other facts")


async def _sweep_leases(handoffs: Mapping[str, Incoming[LeaseT]], clock: Clock, config: ReceiverConfig) -> None:
    """End those whose lease has run out, for ever."""
    while True:
        await clock.sleep(config.sweep_every_s)
        now = clock.now()
        for handoff_id, live in tuple(handoffs.items()):
            if live.deadline_s <= now and live.state in (TargetState.RESERVED, TargetState.RECEIVING):
                logger.warning("hand-off %s: its lease ran out in state %s", handoff_id, live.state)
                live.end(TargetEvent.EXPIRED, UnknownHandoff(f"the lease of {handoff_id} ran out"))


def open_windows(connectors: Sequence[Connector], ranges: Sequence[ByteRange]) -> tuple[tuple[Connector, int], ...]:
    """A window over `ranges` on each connector, all or none; NoRoom when a connector has no window left."""
    opened: list[tuple[Connector, int]] = []
    try:
        for connector in connectors:
            opened.append((connector, connector.open_window(ranges)))
    except DiptychError:
        for connector, key in opened:
            connector.close_window(key)
        raise
    return tuple(opened)
