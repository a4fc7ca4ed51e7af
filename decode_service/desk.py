"""Where routers' sessions are served: commands in, answers out, whatever carries them.

    open_session ──▶ attach, generate, cancel … ──▶ finish_session (no more commands) or close_session (abort what is carried)
    drain ──▶ what comes, and waits in vain, is told Draining ──▶ send_away: so is everything ──▶ end_sessions

Does not know gRPC or KV.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from contracts.errors import DiptychError, Draining
from contracts.request import GenerationRequest
from contracts.worker import WorkerRef
from decode_service.outputs import Answer, AnswerBook, AnswerState, RouterSession
from engine.driver import EngineDriver
from kv_transfer.endings import report


class AnswerDesk:
    """Owns the sessions; the book owns their answers. Used from one event loop."""

    def __init__(self, ref: WorkerRef, driver: EngineDriver, book: AnswerBook, session_batches: int) -> None:
        self.ref = ref
        self._driver = driver
        self._book = book
        self._session_batches = session_batches
        self._sessions: set[RouterSession] = set()
        self._numbers = itertools.count(1)
        self._admitting: set[asyncio.Task[None]] = set()
        self._holds: Callable[[str], bool] | None = None  # set once it drains

    def open_session(self) -> RouterSession:
        """A new stream of answers; `close_session` must follow."""
        session = RouterSession(f"session-{next(self._numbers)}", self._session_batches)
        self._sessions.add(session)
        return session

    def attach(self, session: RouterSession, handoff_id: str, wait_s: float) -> None:
        """`session` reads this hand-off, whether its KV has come or will come within `wait_s`."""
        self._book.attach(session, handoff_id, wait_s)
        if self._holds is not None:
            self.send_away(everything=False)

    def generate(self, session: RouterSession, request: GenerationRequest) -> None:
        """Run a request alone; a refusal comes as its only delta."""
        if not self._book.start(session, request.request_id):
            return
        if self._holds is not None:
            self._book.fail(request.request_id, self._draining())
            return
        admitting = asyncio.ensure_future(self._admit(request, self._driver.now()))
        self._admitting.add(admitting)
        admitting.add_done_callback(self._admitting.discard)
        report(admitting, self._driver.die)

    def cancel(self, session: RouterSession, *request_ids: str) -> None:
        """Stop requests or hand-offs of this session; each ends with ABORT, its blocks are free within a step."""
        self._book.cancel(session, *request_ids)

    def finish_session(self, session: RouterSession) -> None:
        """No more commands will come: the stream ends with the last answer that it carries."""
        self._book.finish_session(session)

    def close_session(self, session: RouterSession) -> None:
        """The stream is over: abort what it carried. Idempotent."""
        session.end()
        self._sessions.discard(session)
        self._book.close_session(session)

    def drain(self, holds: Callable[[str], bool]) -> None:
        """From now on whoever asks for an answer that is not here is told Draining, and so is who waits for one already.

        `holds` says of a hand-off whether its KV is on the way here.
        """
        self._holds = holds
        self.send_away(everything=False)

    def send_away(self, *, everything: bool) -> None:
        """Tell Draining to who waits for a hand-off that will not come or, with `everything`, to every reader."""
        error = self._draining()

        def verdict(answer: Answer) -> DiptychError | None:
            coming = self._holds is not None and self._holds(answer.request_id)
            hopeless = answer.state is AnswerState.AWAITED and not coming
            return error if everything or hopeless else None

        self._book.sweep(verdict)

    def end_sessions(self) -> None:
        """Let every stream end once its outbox is empty; for when no answer is open any more."""
        for session in self._sessions:
            session.end()

    async def close(self) -> None:
        """Close every session. Idempotent."""
        for session in list(self._sessions):
            self.close_session(session)
        if self._admitting:
            await asyncio.wait(set(self._admitting))

    def _draining(self) -> Draining:
        return Draining(f"{self.ref.worker_id} is about to stop")

    async def _admit(self, request: GenerationRequest, arrived_s: float) -> None:
        # Cancelled before its turn: then its abort is ahead of us in the queue.
        if self._book.state(request.request_id) is None:
            return
        try:
            await self._driver.call(lambda engine: engine.admit(request, arrived_s=arrived_s))
        except DiptychError as error:
            self._book.fail(request.request_id, error)
