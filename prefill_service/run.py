"""One request on a prefill worker: computed in the engine, pushed to a decode worker while it computes, handed off.

    ADMITTED ──first chunk scheduled──▶ COMPUTING (blocks of finished chunks travel) ──first token──▶ PUSHING
        │                                   │ ended at its first token: no hand-off                     │
        │                                   ▼                                                           ├──committed──▶ done
        └── refused: error               done                                                           ▼ failed
                                                              PUSHING (again) ◀──another target──── HOLDING ──hold_s──▶ error

Another target may come at any moment before the commit is acknowledged, also while the prompt computes: the hand-off that is
under way is given up, and the next one begins over the same blocks when no write of it is under way any more.

    Attempt(h1) ──another target: aborted, quiesced, HandoffFailed(h1)──▶ Attempt(h2) ──▶ …
        └──committed before the target came──▶ HandedOff(h1): too late, h2 is never begun

So each id that was aimed at has exactly one outcome: HandedOff, which is the last event of all, or HandoffFailed. The exceptions
are those that are still open when the reader leaves or the run ends with an error.

Whatever the state, when the reader leaves, `settle` gives everything up: the sender first, and only when no write of it is
under way the blocks. Nobody holds them for longer than `hold_s` without a hand-off under way, nor beyond the request's
deadline. The engine's news come by `on_*`; they may come late, after the end, and then change nothing but that a lease which
arrives is given back. Does not know gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from contracts.clock import Clock
from contracts.errors import (
    ConfigError,
    DeadlineExceeded,
    DiptychError,
    InternalError,
    RequestCancelled,
    UnknownHandoff,
)
from contracts.prefill import FirstTokens, HandedOff, HandoffFailed, PrefillEvent, Target
from contracts.request import GenerationRequest, TokenDelta
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
from engine.driver import EngineDriver
from engine.engine import Engine
from engine.output import Progress, Retained
from kv_transfer.config import SenderConfig
from kv_transfer.endings import report, until_done, within
from kv_transfer.links import Links
from kv_transfer.peer import HandoffPeer
from kv_transfer.sender import HandoffFacts, PrefillResult, Sender
from prefill_service.peer import PeerSource


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How runs are handed off. `hold_s`: how long a prompt's KV is kept for another target after a failed hand-off."""

    sender: SenderConfig = field(default_factory=SenderConfig)
    hold_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.hold_s > 0:
            raise ConfigError(f"hold_s: got {self.hold_s}, must be above 0")


@dataclass(frozen=True, slots=True)
class RunParts:
    """What every run of a worker shares."""

    driver: EngineDriver
    links: Links
    peers: PeerSource
    clock: Clock
    config: RunConfig


@dataclass(slots=True)
class Attempt:
    """One hand-off: where it goes, and once it has begun who sends it and who notes its commit."""

    target: Target
    sender: Sender | None = None
    watch: CommitWatch | None = None
    told: bool = False  # that it has failed


class PrefillRun:
    """Owns the request in the engine, its hand-off, and its lease once the engine has let go of it, until `settle`."""

    def __init__(self, parts: RunParts, request: GenerationRequest, target: Target) -> None:
        self._parts = parts
        self._request = request
        self._began_at = parts.clock.now()
        self._hashes: tuple[bytes, ...] | None = None  # None until the engine has admitted it
        self._attempt = Attempt(target)
        self._asked_for = {target.handoff_id}  # every id that a target has named
        self._no_more_targets = False
        self._news = asyncio.Event()  # of targets
        self._events: asyncio.Queue[PrefillEvent | None] = asyncio.Queue()  # for the reader; None is the end
        self._started = False
        self._computed: tuple[int, tuple[int, ...]] | None = None
        self._first: asyncio.Future[TokenDelta] = asyncio.get_running_loop().create_future()
        self._retained: Retained | None = None
        self._retained_at = 0.0
        self._settled = False

    # The engine's news, on the event loop

    def on_started(self) -> None:
        """Its first chunk is about to be computed: time to ask for room."""
        self._started = True
        self._begin_handoff()

    def on_progress(self, progress: Progress) -> None:
        """A chunk is finished; its full blocks may travel."""
        self._computed = (progress.num_computed_tokens, progress.block_ids)
        if self._attempt.sender is not None:
            self._attempt.sender.advance(*self._computed)

    def on_delta(self, delta: TokenDelta) -> None:
        """Its one token, or its end."""
        if not self._first.done():
            self._first.set_result(delta)

    def on_retained(self, retained: Retained) -> None:
        """Its KV is this run's from now on; comes before the delta of the same step."""
        if self._settled:
            self._parts.driver.post(lambda engine: engine.release(retained.lease))
        else:
            self._retained, self._retained_at = retained, self._parts.clock.now()

    # What its reader sees

    async def events(self, targets: asyncio.Queue[Target | None]) -> AsyncGenerator[PrefillEvent, None]:
        """Run it. `targets` brings other targets, each instead of the one before, or None when none will come any more.

        Raises what the engine refuses it with, DeadlineExceeded, and UnknownHandoff when nobody re-targeted a failed hand-off
        in time. The caller calls `settle` afterwards, however this ended.
        """
        driving, following = asyncio.ensure_future(self._drive()), asyncio.ensure_future(self._follow(targets))
        report(following, self._parts.driver.die)
        try:
            while (event := await self._events.get()) is not None:
                yield event
            await driving
        finally:
            following.cancel()  # first: nothing may be begun while what is under way ends
            driving.cancel()
            await until_done(following)
            await until_done(driving)

    async def settle(self, reason: str) -> None:
        """Give up what is left: no write is under way and no block is held when this returns. Idempotent."""
        if self._settled:
            return
        self._settled = True
        if self._attempt.sender is not None:
            await self._attempt.sender.abort(reason)
        retained, self._retained = self._retained, None
        request_id = self._request.request_id

        def give_back(engine: Engine) -> None:
            engine.abort(request_id)
            if retained is not None:
                engine.release(retained.lease)

        await self._parts.driver.call(give_back)

    # How

    async def _drive(self) -> None:
        try:
            await self._admit()
            delta = await self._first
            self._events.put_nowait(FirstTokens(delta))
            if self._retained is not None:
                self._events.put_nowait(await self._hand_off_somewhere(self._retained))
        finally:
            self._events.put_nowait(None)

    async def _hand_off_somewhere(self, retained: Retained) -> HandedOff:
        attempt = await self._begun()
        while True:
            try:
                return await self._hand_off(attempt, retained)
            except DeadlineExceeded:
                raise
            except DiptychError as error:
                if attempt is self._attempt:  # else it was given up for another target, by `_aim_at`
                    self._tell_failed(attempt, error)
                attempt = await self._hold(attempt)

    def _tell_failed(self, attempt: Attempt, error: DiptychError) -> None:
        if not attempt.told:
            attempt.told = True
            failed = HandoffFailed(attempt.target.handoff_id, error_info(error), self._parts.config.hold_s)
            self._events.put_nowait(failed)

    async def _admit(self) -> None:
        request = self._request

        def admit(engine: Engine) -> tuple[bytes, ...]:
            engine.admit(request, retain_kv=True)
            return engine.block_hashes(request.prompt_token_ids + request.output_token_ids)

        self._hashes = await self._parts.driver.call(admit)
        self._begin_handoff()

    @property
    def _ends_here(self) -> bool:
        """Whether the token made here is the last that was asked for: then no room is asked for either."""
        return len(self._request.output_token_ids) + 1 >= self._request.sampling.max_tokens

    @property
    def _time_left_s(self) -> float | None:
        """Until the request's deadline, if it has one."""
        limit_s = self._request.deadline_s
        return None if limit_s is None else max(0.0, limit_s - (self._parts.clock.now() - self._began_at))

    def _begin_handoff(self) -> None:
        """Once both are known: that the first chunk is scheduled, and the block hashes. Either may come first."""
        attempt, parts = self._attempt, self._parts
        if not self._started or self._hashes is None or attempt.sender is not None or self._settled or self._ends_here:
            return
        target = attempt.target
        facts = HandoffFacts(
            target.handoff_id, target.decode, self._request.num_tokens, self._hashes, self._time_left_s
        )
        attempt.watch = CommitWatch(parts.peers.peer(target.decode, target.address), parts.clock)
        attempt.sender = Sender(facts, attempt.watch, parts.links, parts.config.sender)
        attempt.sender.start()
        if self._computed is not None:
            attempt.sender.advance(*self._computed)

    async def _follow(self, targets: asyncio.Queue[Target | None]) -> None:
        """Aim at each target as it comes. One that is named again changes nothing."""
        while (target := await targets.get()) is not None:
            if target.handoff_id not in self._asked_for:
                self._asked_for.add(target.handoff_id)
                await self._aim_at(target)
        self._no_more_targets = True
        self._news.set()

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
            self._begin_handoff()
        self._news.set()

    async def _begun(self, failed: Attempt | None = None) -> Attempt:
        """The hand-off that is under way, other than `failed`. UnknownHandoff when no other target will come."""
        while self._attempt is failed or self._attempt.sender is None:
            if self._attempt is failed and self._no_more_targets:
                raise UnknownHandoff(f"{failed.target.handoff_id}: no other target will come")
            self._news.clear()
            await self._news.wait()
        return self._attempt

    async def _hand_off(self, attempt: Attempt, retained: Retained) -> HandedOff:
        sender, watch, clock = attempt.sender, attempt.watch, self._parts.clock
        if sender is None or watch is None:
            raise InternalError(f"{self._request.request_id}: its KV is here but no hand-off was begun")
        request, passed_s = retained.request, clock.now() - self._retained_at
        if request.deadline_s is not None:
            request = replace(request, deadline_s=request.deadline_s - passed_s)
        block_ids = tuple(retained.lease.block_ids)
        logprob, stages = retained.first_token_logprob, retained.stages
        stats = await sender.finish(PrefillResult(request, block_ids, retained.num_cached_tokens, logprob, stages))
        ended = clock.now()
        began = ended if watch.commit_began is None else watch.commit_began
        stages = replace(stages, transfer_s=began - self._retained_at, commit_s=ended - began)
        return HandedOff(attempt.target.handoff_id, stats, stages)

    async def _hold(self, failed: Attempt) -> Attempt:
        """The next hand-off, once it has begun. UnknownHandoff when no other target came in time, or none will come."""
        hold_s, left_s = self._parts.config.hold_s, self._time_left_s
        hold_s = hold_s if left_s is None else min(hold_s, left_s)
        name = failed.target.handoff_id
        try:
            return await within(self._parts.clock, hold_s, self._begun(failed))
        except TimeoutError as error:
            raise UnknownHandoff(f"{name}: held for {hold_s:g} s, no other target came") from error


class CommitWatch:
    """A peer that notes when it was first asked to commit, so that transfer and commit can be told apart."""

    def __init__(self, peer: HandoffPeer, clock: Clock) -> None:
        self._peer = peer
        self._clock = clock
        self.commit_began: float | None = None

    async def connect(self, request: ConnectRequest) -> ConnectResponse:
        """See HandoffPeer."""
        return await self._peer.connect(request)

    async def reserve(self, request: ReserveRequest) -> Grant:
        """See HandoffPeer."""
        return await self._peer.reserve(request)

    async def commit(self, ticket: Ticket) -> CommitResponse:
        """See HandoffPeer."""
        if self.commit_began is None:
            self.commit_began = self._clock.now()
        return await self._peer.commit(ticket)

    async def abort(self, request: AbortRequest) -> AbortResponse:
        """See HandoffPeer."""
        return await self._peer.abort(request)

    async def renew(self, request: RenewRequest) -> RenewResponse:
        """See HandoffPeer."""
        return await self._peer.renew(request)
