"""One request on a prefill worker: computed in the engine, pushed to a decode worker while it computes, handed off.

    ADMITTED ──first chunk scheduled──▶ COMPUTING (blocks of finished chunks travel) ──first token──▶ PUSHING
        │                                   │ ended at its first token: no hand-off                     │
        │                                   ▼                                                           ├──committed──▶ done
        └── refused: error               done                                                           ▼ failed
                                                              PUSHING (again) ◀──another target──── HOLDING ──hold_s──▶ error

Whatever the state, when the reader leaves, `settle` gives everything up: the sender first, and only when no write of it is
under way the blocks. The engine's news come by `on_*`; they may come late, after the end, and then change nothing but that a
lease which arrives is given back. Does not know gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from contracts.clock import Clock
from contracts.errors import ConfigError, DiptychError, InternalError, UnknownHandoff
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
from kv_transfer.endings import within
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


class PrefillRun:
    """Owns the request in the engine, its hand-off, and its lease once the engine has let go of it, until `settle`."""

    def __init__(self, parts: RunParts, request: GenerationRequest, target: Target) -> None:
        self._parts = parts
        self._request = request
        self._target = target
        self._hashes: tuple[bytes, ...] | None = None  # None until the engine has admitted it
        self._sender: Sender | None = None
        self._peer: CommitWatch | None = None
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
        if self._sender is not None:
            self._sender.advance(*self._computed)

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
        """Run it. `targets` brings another target after each HandoffFailed, or None when none will come.

        Raises what the engine refuses it with, and UnknownHandoff when nobody re-targeted it in time. The caller calls
        `settle` afterwards, however this ended.
        """
        await self._admit()
        delta = await self._first
        retained = self._retained
        yield FirstTokens(delta)
        if retained is None:
            return
        while True:
            try:
                event = await self._hand_off(retained)
            except DiptychError as error:
                yield HandoffFailed(self._target.handoff_id, error_info(error), self._parts.config.hold_s)
                self._target = await self._next_target(targets)
                self._sender = None
                self._begin_handoff()
            else:
                yield event
                return

    async def settle(self, reason: str) -> None:
        """Give up what is left: no write is under way and no block is held when this returns. Idempotent."""
        if self._settled:
            return
        self._settled = True
        if self._sender is not None:
            await self._sender.abort(reason)
        retained, self._retained = self._retained, None
        request_id = self._request.request_id

        def give_back(engine: Engine) -> None:
            engine.abort(request_id)
            if retained is not None:
                engine.release(retained.lease)

        await self._parts.driver.call(give_back)

    # How

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

    def _begin_handoff(self) -> None:
        """Once both are known: that the first chunk is scheduled, and the block hashes. Either may come first."""
        if not self._started or self._hashes is None or self._sender is not None or self._settled or self._ends_here:
            return
        target, parts = self._target, self._parts
        facts = HandoffFacts(target.handoff_id, target.decode, self._request.num_tokens, self._hashes)
        self._peer = CommitWatch(parts.peers.peer(target.decode, target.address), parts.clock)
        self._sender = Sender(facts, self._peer, parts.links, parts.config.sender)
        self._sender.start()
        if self._computed is not None:
            self._sender.advance(*self._computed)

    async def _hand_off(self, retained: Retained) -> HandedOff:
        sender, watch, clock = self._sender, self._peer, self._parts.clock
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
        return HandedOff(self._target.handoff_id, stats, stages)

    async def _next_target(self, targets: asyncio.Queue[Target | None]) -> Target:
        hold_s = self._parts.config.hold_s
        try:
            target = await within(self._parts.clock, hold_s, targets.get())
        except TimeoutError as error:
            raise UnknownHandoff(f"{self._target.handoff_id}: held for {hold_s:g} s, no other target came") from error
        if target is None:
            raise UnknownHandoff(f"{self._target.handoff_id}: no other target will come")
        return target


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
