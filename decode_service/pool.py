"""The engine's blocks as hand-offs see them: `kv_transfer.pool.KVPool` on an engine's thread, and whom endings are told.

    reserve ──▶ Engine.reserve          adopt ──▶ the book expects its tokens, then Engine.adopt          release ──▶ Engine.release

Does not know connectors, peers or sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contracts.errors import DigestMismatch, DiptychError, UnknownHandoff
from contracts.request import GenerationRequest
from contracts.ticket import Ticket
from decode_service.outputs import AnswerBook, AnswerState
from engine.driver import EngineDriver
from engine.engine import Engine, KVLease
from observability.log import get_logger

log = get_logger(__name__)


class EnginePool:
    """See KVPool. A lease that nobody waits for any more goes back at once."""

    def __init__(self, driver: EngineDriver, book: AnswerBook) -> None:
        self._driver = driver
        self._book = book
        self._coming: set[str] = set()  # hand-offs that hold room, or ask for it just now
        self.on_reserved: Callable[[str], object] | None = None  # hears: granted, no_room or refused

    def holds(self, handoff_id: str) -> bool:
        """Whether this hand-off is on its way in: it has room here, or asks for it, and is not adopted."""
        return handoff_id in self._coming

    async def reserve(self, handoff_id: str, num_tokens: int, block_hashes: tuple[bytes, ...]) -> KVLease | None:
        """See KVPool, and `_reserve`."""
        outcome = "refused"
        try:
            lease = await self._reserve(handoff_id, num_tokens, block_hashes)
            outcome = "no_room" if lease is None else "granted"
        finally:
            if self.on_reserved is not None:
                self.on_reserved(outcome)
        return lease

    async def _reserve(self, handoff_id: str, num_tokens: int, block_hashes: tuple[bytes, ...]) -> KVLease | None:
        """UnknownHandoff for one that was adopted: a late copy of its Reserve must not end its answer.

        So also for one that its reader has given up, before or meanwhile: nobody else might ever end it.
        """
        if self._book.state(handoff_id) not in (None, AnswerState.AWAITED):
            raise UnknownHandoff(f"hand-off {handoff_id} is adopted already")
        self._check_wanted(handoff_id)

        def give_back(engine: Engine, lease: KVLease | None) -> None:
            if lease is not None:
                engine.release(lease)

        was_coming = handoff_id in self._coming
        self._coming.add(handoff_id)
        lease: KVLease | None = None
        try:
            lease = await self._driver.call(
                lambda engine: engine.reserve(handoff_id, num_tokens, block_hashes), give_back
            )
        finally:
            if lease is None and not was_coming:
                self._coming.discard(handoff_id)
        if lease is not None:
            try:
                self._check_wanted(handoff_id)
            except DiptychError:
                await self.release(lease)
                raise
        return lease

    def _check_wanted(self, handoff_id: str) -> None:
        lost = self._book.lost(handoff_id)
        if lost is not None:
            raise UnknownHandoff(f"hand-off {handoff_id} is not awaited any more: {lost.message}")

    async def adopt(
        self, request: GenerationRequest, lease: KVLease, num_computed_tokens: int, seals: Sequence[bytes]
    ) -> None:
        """See KVPool. Its tokens may come before this returns, so the book is told first."""
        try:
            self._book.expect(request.request_id)
        except DiptychError:
            await self.release(lease)
            raise
        self._coming.discard(request.request_id)
        since_s = self._driver.now()

        def adopt(engine: Engine) -> None:
            try:
                engine.adopt(request, lease, num_computed_tokens, seals, since_s)
            except DiptychError:
                engine.release(lease)
                raise

        await self._driver.call(adopt)

    async def release(self, lease: KVLease, spoiled: Sequence[int] = ()) -> None:
        """See KVPool."""
        self._coming.discard(lease.holder)
        await self._driver.call(lambda engine: engine.release(lease, spoiled))


class HandoffListener:
    """See HandoffEvents: a lost hand-off's reader is told why; `on_mismatch` hears of each that brought wrong bytes."""

    def __init__(self, book: AnswerBook, on_mismatch: Callable[[], None]) -> None:
        self._book = book
        self._on_mismatch = on_mismatch

    def on_adopted(self, ticket: Ticket) -> None:
        """See HandoffEvents."""
        log.debug("adopted", handoff_id=ticket.handoff_id, prefill=ticket.prefill.worker_id)

    def on_lost(self, handoff_id: str, cause: DiptychError) -> None:
        """See HandoffEvents."""
        log.info("hand-off lost", handoff_id=handoff_id, reason=cause)
        if isinstance(cause, DigestMismatch):
            self._on_mismatch()
        self._book.fail(handoff_id, cause)
