"""One hand-off on the decode side: its lease, its windows, its state, from RESERVED to its end.

Drives `handoff.TARGET_TABLE`. Leaving RESERVED closes the windows; from then on one task asks until they are quiesced, and
only then compares digests (nobody can write any more), and only then adopts or releases. Owns the lease until it is adopted
or released. Does not know messages, epochs or other hand-offs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from contracts.clock import Clock
from contracts.errors import DiptychError, HandoffError, InternalError, LayoutMismatch, UnknownHandoff
from contracts.kv_layout import KVLayout, check_same_layout
from contracts.ticket import Grant, ReserveRequest, Ticket
from contracts.worker import WorkerRef
from kv_transfer.config import ReceiverConfig
from kv_transfer.connector import Connector
from kv_transfer.endings import report
from kv_transfer.handoff import TARGET_TABLE, Observer, TargetAction, TargetEvent, TargetState, TargetStep, step
from kv_transfer.memory import said_again
from kv_transfer.pool import KVPool, LeaseT
from kv_transfer.verifier import Findings, Verifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adopted:
    """The good end."""

    ticket: Ticket
    num_blocks: int


Outcome = Adopted | DiptychError  # or why it was lost


@dataclass(frozen=True, slots=True)
class Reservation(Generic[LeaseT]):
    """What was granted, to whom, and which keys are out for it."""

    request: ReserveRequest
    grant: Grant
    lease: LeaseT
    windows: tuple[tuple[Connector, int], ...]

    @property
    def owner(self) -> WorkerRef:
        """The life of the prefill worker that the hand-off belongs to."""
        return self.request.prefill


@dataclass(frozen=True, slots=True)
class Surroundings(Generic[LeaseT]):
    """What every hand-off of a worker shares. `ended` is called once for each, after its lease has gone where it belongs."""

    pool: KVPool[LeaseT]
    clock: Clock
    config: ReceiverConfig
    layout: KVLayout
    ended: Callable[[str, Outcome], None]
    on_fatal: Callable[[BaseException], None]
    observer: Observer
    verifier: Verifier


class Incoming(Generic[LeaseT]):
    """One hand-off from its grant on. `deadline_s` is on the clock of its surroundings."""

    def __init__(self, reservation: Reservation[LeaseT], surroundings: Surroundings[LeaseT]) -> None:
        self._reservation = reservation
        self._around = surroundings
        self._state = TargetState.RESERVED
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._cause: DiptychError = UnknownHandoff(f"hand-off {reservation.request.handoff_id} has ended")
        self._hurry = asyncio.Event()
        self._winding_up: asyncio.Task[None] | None = None
        self._ticket: Ticket | None = None
        self._findings = Findings()
        self.given_at: float | None = None  # to the engine
        self.deadline_s = surroundings.clock.now() + surroundings.config.lease_s

    @property
    def reservation(self) -> Reservation[LeaseT]:
        """What was granted."""
        return self._reservation

    @property
    def state(self) -> TargetState:
        """Where the hand-off is."""
        return self._state

    def renew(self) -> bool:
        """Keep the lease for another `lease_s`; False when it is lost already."""
        if self._state not in (TargetState.RESERVED, TargetState.RECEIVING):
            return self._state is TargetState.ADOPTED
        self.deadline_s = self._around.clock.now() + self._around.config.lease_s
        return True

    async def commit(self, ticket: Ticket) -> int:
        """Blocks that the engine now owns for it; raises what made it fail. Asking again gives the same answer."""
        if self._state is TargetState.RESERVED:
            problem = self._problem(ticket)
            if problem is None:
                self._ticket = ticket
                self._on(TargetEvent.COMMIT)
            else:
                self.end(TargetEvent.REFUSED, problem)
        if self._state is TargetState.DRAINING:  # lost; how long its blocks stay fenced is not the peer's matter
            raise said_again(self._cause)
        outcome = await asyncio.shield(self._outcome)
        if isinstance(outcome, Adopted):
            return outcome.num_blocks
        raise said_again(outcome)

    def end(self, event: TargetEvent, cause: DiptychError) -> None:
        """Give it up (abort, expiry, the peer's new life); stays as it is where it is too late for that."""
        if self._state in (TargetState.RESERVED, TargetState.RECEIVING):
            self._cause = cause
        self._on(event)

    async def close(self, cause: DiptychError) -> None:
        """End it now: the worker goes down. Windows are asked once more, then left fenced for ever."""
        self.end(TargetEvent.ABORTED, cause)
        self._hurry.set()
        await asyncio.shield(self._outcome)

    def _on(self, event: TargetEvent) -> None:
        before = self._state
        self._state, actions = step(TARGET_TABLE, before, event)
        self._around.observer(TargetStep(self._reservation.request.handoff_id, before, event, self._state, actions))
        if TargetAction.CLOSE_WINDOWS in actions:
            self._closed()  # at once: no write begins after this, even before the task runs
            self._winding_up = asyncio.ensure_future(self._wind_up())
            report(self._winding_up, self._around.on_fatal)

    def _closed(self) -> bool:
        # Each of them, also after a False.
        closed = [connector.close_window(key) for connector, key in self._reservation.windows]
        return all(closed)

    async def _wind_up(self) -> None:
        """Wait until no byte can land, then give the lease where it belongs."""
        outcome: Outcome = InternalError("the hand-off ended by a fault of the decode worker")
        try:
            quiesced = await self._quiesced()
            if quiesced and self._state is TargetState.RECEIVING and self._ticket is not None:
                await self._verify(self._ticket)
            if not quiesced:
                outcome = InternalError("the worker went down while a write was under way; its blocks stay fenced")
            elif self._state is TargetState.RECEIVING and self._ticket is not None:
                self._on(TargetEvent.VERIFIED)
                outcome = await self._adopt(self._ticket)
            else:
                self._on(TargetEvent.QUIESCED)
                await self._around.pool.release(self._reservation.lease, self._findings.spoiled)
                outcome = self._cause
        finally:
            self._outcome.set_result(outcome)
            self._around.ended(self._reservation.request.handoff_id, outcome)

    async def _verify(self, ticket: Ticket) -> None:
        """Refuse the ticket if a block is not what was sent. It may also have been given up meanwhile, which then stands."""
        reservation = self._reservation
        self._findings = await self._around.verifier.look(ticket, reservation.grant, reservation.lease.cached_seals)
        if self._findings.damage is not None:
            logger.warning("%s; none of them is used", self._findings.damage)
            self.end(TargetEvent.REFUSED, self._findings.damage)

    async def _quiesced(self) -> bool:
        pause_s = self._around.config.quiesce_poll_s
        while not self._closed():
            if self._hurry.is_set():
                return False
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, self._around.config.sweep_every_s)
        return True

    async def _pause(self, pause_s: float) -> None:
        hurried = asyncio.ensure_future(self._hurry.wait())
        rested = asyncio.ensure_future(self._around.clock.sleep(pause_s))
        await asyncio.wait((hurried, rested), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        rested.cancel()

    async def _adopt(self, ticket: Ticket) -> Outcome:
        lease = self._reservation.lease
        num_blocks = len(lease.block_ids)
        self.given_at = self._around.clock.now()
        try:
            await self._around.pool.adopt(ticket.request, lease, ticket.num_computed_tokens, self._findings.seals)
        except DiptychError as error:
            logger.warning("hand-off %s: the engine does not take it: %s", ticket.handoff_id, error)
            return error
        return Adopted(ticket, num_blocks)

    def _problem(self, ticket: Ticket) -> HandoffError | None:
        """Why this ticket does not fit what was reserved; None when it does."""
        request = self._reservation.request
        try:
            check_same_layout(self._around.layout, ticket.layout)
        except LayoutMismatch as error:
            return error
        facts: tuple[tuple[str, object, object], ...] = (
            ("num_computed_tokens", request.num_tokens, ticket.num_computed_tokens),
            ("num_tokens", request.num_tokens + 1, ticket.request.num_tokens),
            ("request_id", request.handoff_id, ticket.request.request_id),
            ("block_hashes", request.block_hashes, ticket.block_hashes),
        )
        for name, reserved, said in facts:
            if reserved != said:
                return HandoffError(f"ticket of {request.handoff_id} differs in {name} from what was reserved")
        if ticket.window_key not in (key for _, key in self._reservation.windows):
            return HandoffError(
                f"ticket of {request.handoff_id} was written under another grant than the one that is held"
            )
        return self._around.verifier.missing(ticket, self._reservation.grant)
