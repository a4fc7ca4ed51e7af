"""One request on a prefill worker: computed in the engine, pushed to a decode worker while it computes, handed off.

    ADMITTED ──first chunk scheduled──▶ COMPUTING (blocks of finished chunks travel) ──first token──▶ PUSHING
        │                                   │ ended at its first token: no hand-off                     │
        │                                   ▼                                                           ├──committed──▶ done
        └── refused: error               done                                                           ▼ failed
                                                              PUSHING (again) ◀──another target──── HOLDING ──hold_s──▶ error

Another target may come at any moment before the commit is acknowledged, also while the prompt computes: the hand-off that is
under way is given up, and the next one begins over the same blocks (`chain.py`).

Whatever the state, when the reader leaves, `settle` gives everything up: the sender first, and only when no write of it is
under way the blocks. Nobody holds them for longer than `hold_s` without a hand-off under way, nor beyond the request's
deadline. The engine's news come by `on_*`; they may come late, after the end, and then change nothing but that a lease which
arrives is given back. Does not know gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from contracts.clock import Clock
from contracts.errors import ConfigError
from contracts.prefill import FirstTokens, PrefillEvent, Target
from contracts.request import GenerationRequest, TokenDelta
from engine.driver import EngineDriver
from engine.engine import Engine
from engine.output import Progress, Retained
from kv_transfer.config import SenderConfig
from kv_transfer.endings import report, until_done
from kv_transfer.links import Links
from kv_transfer.sender import PrefillResult
from observability.stages import HandoffStats
from prefill_service.chain import HandoffChain, Means, Prefilled
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
    on_sent: Callable[[HandoffStats], object]  # hears of each hand-off that was committed


class PrefillRun:
    """Owns the request in the engine, its hand-offs, and its lease once the engine has let go of it, until `settle`."""

    def __init__(self, parts: RunParts, request: GenerationRequest, target: Target) -> None:
        self._parts = parts
        self._request = request
        self._events: asyncio.Queue[PrefillEvent | None] = asyncio.Queue()  # for the reader; None is the end
        config = parts.config
        means = Means(parts.links, parts.peers, parts.clock, config.sender, config.hold_s, self._events.put_nowait)
        self.chain = HandoffChain(means, request, target)
        self._hashes: tuple[bytes, ...] | None = None  # None until the engine has admitted it
        self._started = False
        self._came_s = parts.clock.now()
        self._first: asyncio.Future[TokenDelta] = asyncio.get_running_loop().create_future()
        self._prefilled: tuple[Retained, float] | None = None  # and since when
        self._settled = False

    # The engine's news, on the event loop

    def on_started(self) -> None:
        """Its first chunk is about to be computed: time to ask for room."""
        self._started = True
        self._begin_handoff()

    def on_progress(self, progress: Progress) -> None:
        """A chunk is finished; its full blocks may travel."""
        self.chain.advance(progress.num_computed_tokens, progress.block_ids)

    def on_delta(self, delta: TokenDelta) -> None:
        """Its one token, or its end."""
        if not self._first.done():
            self._first.set_result(delta)

    def on_retained(self, retained: Retained) -> None:
        """Its KV is this run's from now on; comes before the delta of the same step."""
        if self._settled:
            self._parts.driver.post(lambda engine: engine.release(retained.lease))
        else:
            self._prefilled = retained, self._parts.clock.now()

    # What its reader sees

    async def events(self, targets: asyncio.Queue[Target | None]) -> AsyncGenerator[PrefillEvent, None]:
        """Run it. `targets` brings other targets, each instead of the one before, or None when none will come any more.

        Raises what the engine refuses it with, DeadlineExceeded, and UnknownHandoff when nobody re-targeted a failed hand-off
        in time. The caller calls `settle` afterwards, however this ended.
        """
        driving, following = asyncio.ensure_future(self._drive()), asyncio.ensure_future(self.chain.follow(targets))
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
        await self.chain.give_up(reason)
        prefilled, self._prefilled = self._prefilled, None
        request_id = self._request.request_id

        def give_back(engine: Engine) -> None:
            engine.abort(request_id)
            if prefilled is not None:
                engine.release(prefilled[0].lease)

        await self._parts.driver.call(give_back)

    # How

    async def _drive(self) -> None:
        try:
            await self._admit()
            delta = await self._first
            self._events.put_nowait(FirstTokens(delta))
            if self._prefilled is not None:
                kept, since = self._prefilled
                logprob, block_ids = kept.first_token_logprob, tuple(kept.lease.block_ids)
                result = PrefillResult(kept.request, block_ids, kept.num_cached_tokens, logprob, kept.stages)
                handed = await self.chain.finish(Prefilled(result, since))
                self._parts.on_sent(handed.stats)
                self._events.put_nowait(handed)
        finally:
            self._events.put_nowait(None)

    async def _admit(self) -> None:
        request, came_s = self._request, self._came_s

        def admit(engine: Engine) -> tuple[bytes, ...]:
            engine.admit(request, retain_kv=True, arrived_s=came_s)
            return engine.block_hashes(request.prompt_token_ids + request.output_token_ids)

        self._hashes = await self._parts.driver.call(admit)
        self._begin_handoff()

    def _begin_handoff(self) -> None:
        """Once both are known: that the first chunk is scheduled, and the block hashes. Either may come first.

        Not where the token made here is the last that was asked for: then no room is asked for either.
        """
        ends_here = len(self._request.output_token_ids) + 1 >= self._request.sampling.max_tokens
        if self._started and self._hashes is not None and not ends_here:
            self.chain.start(self._hashes)
