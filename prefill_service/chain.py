"""The hand-offs of one run, one after another over the same source blocks, until one is committed.

    Attempt(h1) ──another target: aborted, quiesced, HandoffFailed(h1)──▶ Attempt(h2) ──▶ …
        ├──failed: HandoffFailed(h1)──▶ held for another target ──hold_s──▶ UnknownHandoff
        └──committed before the target came──▶ HandedOff(h1): too late, h2 is never begun

So each id that was aimed at has exactly one outcome: HandedOff, which is the last of all, or HandoffFailed. The exceptions are
those that are still open when the reader leaves or the run ends with an error.

Owns the senders, not the blocks: they are the run's again once `give_up` has returned. Does not know the engine or gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, DiptychError, InternalError, RequestCancelled, UnknownHandoff
from contracts.prefill import HandedOff, HandoffFailed, Target
from contracts.request import GenerationRequest
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
from contracts.wire import error_info
from kv_transfer.config import SenderConfig
from kv_transfer.endings import within
from kv_transfer.links import Links
from kv_transfer.peer import HandoffPeer
from kv_transfer.sender import HandoffFacts, PrefillResult, Sender
from prefill_service.peer import PeerSource


@dataclass(frozen=True, slots=True)
class Means:
    """What hand-offs are made with. `tell_failed` hears of each that has failed, once."""

    links: Links
    peers: PeerSource
    clock: Clock
    sender: SenderConfig
    hold_s: float
    tell_failed: Callable[[HandoffFailed], None]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A finished prompt; `at` is the instant since which it is."""

    result: PrefillResult
    at: float


@dataclass(slots=True)
class Attempt:
    """One hand-off: where it goes, and once it has begun who sends it and who notes its commit."""

    target: Target
    sender: Sender | None = None
    watch: CommitWatch | None = None
    told: bool = False  # that it has failed


class HandoffChain:
    """See the module. Used from one event loop; a run has one."""

    def __init__(self, means: Means, request: GenerationRequest, target: Target) -> None:
        self._means = means
        self._request = request
        self._began_at = means.clock.now()
        self._hashes: tuple[bytes, ...] | None = None
        self._computed: tuple[int, tuple[int, ...]] | None = None
        self._given_up = False
        self._attempt = Attempt(target)
        self._asked_for = {target.handoff_id}  # every id that a target has named
        self._no_more_targets = False
        self._news = asyncio.Event()  # of targets

    @property
    def attempt(self) -> Attempt:
        """The latest."""
        return self._attempt

    def start(self, block_hashes: tuple[bytes, ...]) -> None:
        """The first chunk is about to be computed: time to ask for room. Called once."""
        self._hashes = block_hashes
        self._begin()

    def advance(self, num_computed_tokens: int, block_ids: tuple[int, ...]) -> None:
        """The KV of so many tokens is finished, in these blocks; full ones may travel."""
        self._computed = num_computed_tokens, block_ids
        if self._attempt.sender is not None:
            self._attempt.sender.advance(*self._computed)

    async def follow(self, targets: asyncio.Queue[Target | None]) -> None:
        """Aim at each target as it comes, until None. One that is named again changes nothing."""
        while (target := await targets.get()) is not None:
            if target.handoff_id not in self._asked_for:
                self._asked_for.add(target.handoff_id)
                await self._aim_at(target)
        self._no_more_targets = True
        self._news.set()

    async def finish(self, prefilled: Prefilled) -> HandedOff:
        """Hand it off, to whichever target takes it.

        Raises DeadlineExceeded, and UnknownHandoff when a hand-off failed and no other target came in time.
        """
        attempt = await self._begun()
        while True:
            try:
                return await self._hand_off(attempt, prefilled)
            except DeadlineExceeded:
                raise
            except DiptychError as error:
                if attempt is self._attempt:  # else it was given up for another target, by `_aim_at`
                    self._tell_failed(attempt, error)
                attempt = await self._hold(attempt)

    async def give_up(self, reason: str) -> None:
        """Begin nothing more; when this returns no write is under way. Idempotent. Not while `follow` runs."""
        self._given_up = True
        if self._attempt.sender is not None:
            await self._attempt.sender.abort(reason)

    @property
    def _time_left_s(self) -> float | None:
        """Until the request's deadline, if it has one."""
        limit_s = self._request.deadline_s
        return None if limit_s is None else max(0.0, limit_s - (self._means.clock.now() - self._began_at))

    def _begin(self) -> None:
        """Unless it is begun, or it is not time yet."""
        attempt, means = self._attempt, self._means
        if self._hashes is None or attempt.sender is not None or self._given_up:
            return
        target = attempt.target
        facts = HandoffFacts(
            target.handoff_id, target.decode, self._request.num_tokens, self._hashes, self._time_left_s
        )
        attempt.watch = CommitWatch(means.peers.peer(target.decode, target.address), means.clock)
        attempt.sender = Sender(facts, attempt.watch, means.links, means.sender)
        attempt.sender.start()
        if self._computed is not None:
            attempt.sender.advance(*self._computed)

    async def _aim_at(self, target: Target) -> None:
        """Give the hand-off up that is under way and begin the next, unless the commit has been acknowledged already."""
        before, self._attempt = self._attempt, Attempt(target)
        reason = f"the router aims at {target.decode.worker_id} instead"
        if before.sender is not None:
            await before.sender.abort(reason)
        if before.sender is not None and before.sender.committed:
            self._attempt = before
        else:
            self._tell_failed(before, RequestCancelled(reason))
            self._begin()
        self._news.set()

    def _tell_failed(self, attempt: Attempt, error: DiptychError) -> None:
        if not attempt.told:
            attempt.told = True
            failed = HandoffFailed(attempt.target.handoff_id, error_info(error), self._means.hold_s)
            self._means.tell_failed(failed)

    async def _begun(self, failed: Attempt | None = None) -> Attempt:
        """The hand-off that is under way, other than `failed`. UnknownHandoff when no other target will come."""
        while self._attempt is failed or self._attempt.sender is None:
            if self._attempt is failed and self._no_more_targets:
                raise UnknownHandoff(f"{failed.target.handoff_id}: no other target will come")
            self._news.clear()
            await self._news.wait()
        return self._attempt

    async def _hand_off(self, attempt: Attempt, prefilled: Prefilled) -> HandedOff:
        sender, watch, clock = attempt.sender, attempt.watch, self._means.clock
        if sender is None or watch is None:
            raise InternalError(f"{self._request.request_id}: its KV is here but no hand-off was begun")
        result, passed_s = prefilled.result, clock.now() - prefilled.at
        if result.request.deadline_s is not None:
            left = replace(result.request, deadline_s=result.request.deadline_s - passed_s)
            result = replace(result, request=left)
        stats = await sender.finish(result)
        began = clock.now() if watch.commit_began is None else watch.commit_began
        stages = replace(result.stages, transfer_s=began - prefilled.at, commit_s=watch.commit_s)
        return HandedOff(attempt.target.handoff_id, stats, stages)

    async def _hold(self, failed: Attempt) -> Attempt:
        """The next hand-off, once it has begun. UnknownHandoff when no other target came in time, or none will come."""
        hold_s, left_s = self._means.hold_s, self._time_left_s
        hold_s = hold_s if left_s is None else min(hold_s, left_s)
        name = failed.target.handoff_id
        try:
            return await within(self._means.clock, hold_s, self._begun(failed))
        except TimeoutError as error:
            raise UnknownHandoff(f"{name}: held for {hold_s:g} s, no other target came") from error


class CommitWatch:
    """A peer that notes when it was first asked to commit, so that transfer and commit can be told apart.

    `commit_s` is from there until the decode worker gave the request to its engine, of which no clock here knows: the time of
    the answer less what that worker says has passed since, and less the answer's way, which takes half of what is nobody's work.
    """

    def __init__(self, peer: HandoffPeer, clock: Clock) -> None:
        self._peer = peer
        self._clock = clock
        self.commit_began: float | None = None
        self.commit_s = 0.0

    async def connect(self, request: ConnectRequest) -> ConnectResponse:
        """See HandoffPeer."""
        return await self._peer.connect(request)

    async def reserve(self, request: ReserveRequest) -> Grant:
        """See HandoffPeer."""
        return await self._peer.reserve(request)

    async def commit(self, ticket: Ticket) -> CommitResponse:
        """See HandoffPeer."""
        began = self._clock.now()
        if self.commit_began is None:
            self.commit_began = began
        answer = await self._peer.commit(ticket)
        answered = self._clock.now()
        back_s = max(0.0, answered - began - answer.took_s) / 2
        self.commit_s = max(0.0, answered - self.commit_began - back_s - max(0.0, answer.took_s - answer.checked_s))
        return answer

    async def abort(self, request: AbortRequest) -> AbortResponse:
        """See HandoffPeer."""
        return await self._peer.abort(request)

    async def renew(self, request: RenewRequest) -> RenewResponse:
        """See HandoffPeer."""
        return await self._peer.renew(request)
