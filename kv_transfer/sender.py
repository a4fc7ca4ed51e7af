"""The prefill side of one hand-off: gets room, pushes blocks while later chunks compute, commits.

    start() ──▶ Reserve, again while there is no room ──▶ blocks of advance(…) as they are finished ──▶ finish(result): the
    rest and the ticket ──▶ HandoffStats     abort(reason), its time is up, a failure or a lost lease: DRAINING, then Abort

States are `handoff.SOURCE_TABLE`. One Sender is one hand-off id: to re-target, abort it and make another over the same blocks;
`committed` says whether the abort came too late. Its owner ends it; one that is forgotten gives itself up when the request's
deadline, or `max_handoff_s`, has passed, and holds the peer's room no longer. After
`finish` or `abort` has returned or raised, no write is under way and the source blocks are the caller's alone. Owns no
blocks. Does not know the engine, gRPC or who chose the peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from contracts.errors import (
    DeadlineExceeded,
    DiptychError,
    InternalError,
    RequestCancelled,
    StaleEpoch,
    TransferFailed,
)
from contracts.request import GenerationRequest, TokenLogprob
from contracts.ticket import AbortRequest, Grant, ReserveRequest, Ticket
from contracts.worker import WorkerRef
from kv_transfer.asking import Asker
from kv_transfer.blocks import Pusher, key_for
from kv_transfer.config import SenderConfig
from kv_transfer.endings import run_to_end, until_done
from kv_transfer.handoff import SOURCE_TABLE, SourceAction, SourceEvent, SourceState, SourceStep, step
from kv_transfer.links import Link, Links
from kv_transfer.peer import HandoffPeer
from observability.stages import HandoffStats, StageTimes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandoffFacts:
    """What is known about a hand-off before its prompt is computed.

    `num_tokens` are the tokens whose KV will be pushed: all that are known when the first chunk is scheduled. `time_left_s` is
    the time until the request's deadline, if it has one.
    """

    handoff_id: str
    decode: WorkerRef
    num_tokens: int
    block_hashes: tuple[bytes, ...]
    time_left_s: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What prefill made: the ticket's content beside what the sender knows itself.

    `request.output_token_ids` ends with the token sampled here; `block_ids` are the source blocks in order.
    """

    request: GenerationRequest
    block_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    first_token_logprob: TokenLogprob | None = None
    stages: StageTimes = field(default_factory=StageTimes)


class Sender:
    """One hand-off, seen from prefill. `start`, `advance` and the rest are called from one event loop."""

    def __init__(self, facts: HandoffFacts, peer: HandoffPeer, links: Links, config: SenderConfig) -> None:
        self._facts = facts
        self._peer = peer
        self._links = links
        self._config = config
        self._clock = links.side.clock
        self._asker = Asker(links.side.ref, facts.decode, self._clock, config)
        self._state = SourceState.COMPUTING
        self._pusher = Pusher(links.side, facts.num_tokens, config, facts.handoff_id)
        self._result: asyncio.Future[PrefillResult] | None = None
        self._work: asyncio.Task[HandoffStats] | None = None
        self._ending: asyncio.Task[HandoffStats] | None = None
        self._cause: DiptychError | None = None  # why the work was cancelled
        self._committed = False

    @property
    def state(self) -> SourceState:
        """Where the hand-off is."""
        return self._state

    @property
    def failed(self) -> bool:
        """Whether it has ended without a commit: `finish` will raise, so a caller may re-target early."""
        return self._ending is not None and self._ending.done() and not self._committed

    @property
    def committed(self) -> bool:
        """Whether the decode side has acknowledged the commit: its engine goes on with the request."""
        return self._committed

    def start(self) -> None:
        """Ask for room and begin to push. Called once, when the request's first chunk is scheduled."""
        if self._work is not None or self._state is not SourceState.COMPUTING:
            raise InternalError(f"hand-off {self._facts.handoff_id}: started twice or after its end")
        self._result = asyncio.get_running_loop().create_future()
        self._work = asyncio.ensure_future(self._run(self._result))
        self._ending = asyncio.ensure_future(self._settle(self._work))
        # Seen here, so that a hand-off which fails while its prompt still computes is not reported as unobserved.
        self._ending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def advance(self, num_computed_tokens: int, block_ids: Sequence[int]) -> None:
        """The KV of the first `num_computed_tokens` tokens is finished, in these source blocks: full ones may travel."""
        self._pusher.advance(num_computed_tokens, block_ids)

    async def finish(self, result: PrefillResult) -> HandoffStats:
        """Push what is left, commit, and say what was moved.

        Raises a HandoffError, an InvalidRequest of the decode side, or RequestCancelled after `abort`. Cancelling the
        caller aborts the hand-off first. Called once.
        """
        if self._ending is None or self._result is None:
            raise InternalError(f"hand-off {self._facts.handoff_id}: finished before it was started")
        if not self._ending.done():
            if result.request.num_tokens - 1 != self._facts.num_tokens:
                raise InternalError(
                    f"hand-off {self._facts.handoff_id}: {result.request.num_tokens} tokens after a first one, "
                    f"but {self._facts.num_tokens} were reserved"
                )
            self._pusher.finish(result.block_ids)
            self._result.set_result(result)
        return await run_to_end(self._ending, lambda: self._give_up(RequestCancelled("the hand-off's caller has left")))

    async def abort(self, reason: str) -> None:
        """Give the hand-off up; when this returns no write is under way. Harmless after its end, idempotent."""
        if self._ending is None:
            self._on(SourceEvent.ABORTED)
            return
        self._give_up(RequestCancelled(reason))
        await until_done(self._ending)

    def _give_up(self, cause: DiptychError) -> None:
        if self._work is not None and not self._work.done() and self._cause is None:
            self._cause = cause
            self._work.cancel()

    def _on(self, event: SourceEvent) -> None:
        before = self._state
        self._state, actions = step(SOURCE_TABLE, before, event)
        self._links.side.observer(SourceStep(self._facts.handoff_id, before, event, self._state, actions))
        if SourceAction.TELL_PEER in actions and self._work is not None:
            reason = self._cause.message if self._cause is not None else "the hand-off failed"
            farewell = AbortRequest(self._facts.handoff_id, self._links.side.ref, self._facts.decode, reason)
            self._links.tell(self._peer, farewell)
        if SourceAction.STOP in actions:  # said by `_settle` alone, when the work has ended and with it every write
            self._on(SourceEvent.QUIESCED)

    async def _settle(self, work: asyncio.Task[HandoffStats]) -> HandoffStats:
        """Drive the table to RELEASED whatever became of the work. The work awaits its writes, so its end is quiescence."""
        try:
            stats = await run_to_end(work, work.cancel)
        except (DiptychError, asyncio.CancelledError) as error:
            if self._cause is None and isinstance(error, DiptychError):
                self._cause = error
            aborted = self._cause is None or isinstance(self._cause, RequestCancelled | DeadlineExceeded)
            if isinstance(self._cause, StaleEpoch):
                self._links.over(self._facts.decode, self._cause)
            self._on(SourceEvent.ABORTED if aborted else SourceEvent.FAILED)
            if self._cause is None:  # the loop itself goes down
                raise
            logger.info("hand-off %s failed: %s", self._facts.handoff_id, self._cause)
            raise self._cause from error
        except BaseException:  # a fault of ours: the blocks are safe all the same
            self._on(SourceEvent.FAILED)
            raise
        self._committed = True
        self._on(SourceEvent.COMMITTED)
        return stats

    async def _run(self, result: asyncio.Future[PrefillResult]) -> HandoffStats:
        limit_s = _limit_s(self._config, self._facts)

        async def time_out() -> None:
            await self._clock.sleep(limit_s)
            self._give_up(DeadlineExceeded(f"hand-off {self._facts.handoff_id}: not ended within {limit_s:g} s"))

        timer = asyncio.ensure_future(time_out())
        try:
            return await self._hand_off(result)
        finally:
            timer.cancel()
            await until_done(timer)

    async def _hand_off(self, result: asyncio.Future[PrefillResult]) -> HandoffStats:
        # Asking ends before the whole time does, so that it is said what was missing: room, or an answer.
        asked_s = self._clock.now()
        deadline = asked_s + min(self._config.reserve_timeout_s, _limit_s(self._config, self._facts))
        link = await self._asker.until_answer(lambda: self._links.get(self._peer, self._facts.decode), deadline)
        facts = self._facts
        request = ReserveRequest(
            facts.handoff_id, self._links.side.ref, facts.decode, facts.num_tokens, facts.block_hashes
        )
        grant = await self._asker.until_answer(lambda: self._asker.once(self._peer.reserve(request)), deadline)
        self._on(SourceEvent.GRANTED)
        if self._links.listener is not None:
            self._links.listener.granted(self._clock.now() - asked_s)
        self._links.heartbeats.keep(grant, self._peer, self._give_up)
        try:
            return await self._send(link, grant, result)
        finally:
            self._links.heartbeats.let_go(grant)

    async def _send(self, link: Link, grant: Grant, result: asyncio.Future[PrefillResult]) -> HandoffStats:
        try:
            stats = await self._pusher.push(link, grant)
        except TransferFailed:
            self._links.drop(link)
            raise
        ticket = self._ticket(await asyncio.shield(result), stats, key_for(link, grant))
        deadline = self._clock.now() + self._config.commit_timeout_s
        await self._asker.until_answer(lambda: self._asker.once(self._peer.commit(ticket)), deadline)
        return stats

    def _ticket(self, result: PrefillResult, stats: HandoffStats, window_key: int) -> Ticket:
        stages = replace(result.stages, transfer_s=result.stages.transfer_s + stats.exposed_s)
        return Ticket(
            handoff_id=self._facts.handoff_id,
            prefill=self._links.side.ref,
            decode=self._facts.decode,
            layout=self._links.side.layout,
            request=replace(result.request, request_id=self._facts.handoff_id),
            num_computed_tokens=self._facts.num_tokens,
            num_cached_tokens=result.num_cached_tokens,
            window_key=window_key,
            block_hashes=self._facts.block_hashes,
            block_digests=self._pusher.digests(),
            first_token_logprob=result.first_token_logprob,
            stages=stages,
        )


def _limit_s(config: SenderConfig, facts: HandoffFacts) -> float:
    """How long the whole hand-off may take."""
    return config.max_handoff_s if facts.time_left_s is None else min(config.max_handoff_s, facts.time_left_s)
