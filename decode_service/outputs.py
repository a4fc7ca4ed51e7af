"""Whose tokens are whose: every answer in the engine, and the session that reads it.

                     expect (hand-off is being adopted)
    (nothing) ──────────────────────────────────────────▶ UNCLAIMED ──attach──▶ STREAMING ──last delta──▶ (nothing)
        │                                                    │ nobody attached within claim_wait_s: aborted
        ├──attach──▶ AWAITED ──expect──▶ STREAMING           ▼
        │               └─ lost, or wait_s passed: error delta, (nothing)
        └──start (runs alone)──▶ STREAMING ──cancel, session closed──▶ aborted, (nothing)

Tokens made before anybody attached wait in the answer. A hand-off that was lost before anybody attached is remembered for
`lost_memory_s`, so that the attach gets the true reason at once instead of a timeout. Every attach, start and cancel ends
with exactly one delta that has a finish_reason, unless the session closes first.

Synchronous and driven by the caller's clock: `sweep` does what is due. Does not know gRPC, KV or the engine beyond `abort`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from contracts.clock import Clock
from contracts.errors import DiptychError, InvalidRequest, RequestCancelled, UnknownHandoff
from contracts.request import FinishReason, TokenDelta
from contracts.wire import error_info
from decode_service.session import Session
from observability.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Seconds and counts."""

    claim_wait_s: float = 30.0  # how long an adopted hand-off may run without a reader
    max_attach_wait_s: float = 600.0
    lost_memory_s: float = 60.0
    max_lost: int = 10_000


class AnswerState(StrEnum):
    """See the drawing above."""

    AWAITED = "awaited"
    UNCLAIMED = "unclaimed"
    STREAMING = "streaming"


@dataclass(slots=True)
class Answer:
    """One request's tokens on their way out."""

    request_id: str
    state: AnswerState
    session: Session | None
    deadline: float | None  # on the book's clock; None while streaming
    buffered: list[TokenDelta] = field(default_factory=list)


class AnswerBook:
    """Every open answer. Owns their buffers; asks `abort` to stop a request in the engine that nobody will read."""

    def __init__(self, abort: Callable[[str], None], clock: Clock, config: OutputConfig | None = None) -> None:
        self._abort = abort
        self._clock = clock
        self._config = config if config is not None else OutputConfig()
        self._answers: dict[str, Answer] = {}
        self._lost: OrderedDict[str, tuple[float, DiptychError]] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Answers that a session reads or waits for, or that nobody claimed yet."""
        return len(self._answers)

    def expect(self, handoff_id: str) -> None:
        """The engine is about to adopt this hand-off; called before it can make a token.

        Raises the reason when the hand-off was lost or cancelled before: then the engine must not take it.
        """
        if handoff_id in self._lost:
            raise self._lost[handoff_id][1]
        answer = self._answers.get(handoff_id)
        if answer is None:
            deadline = self._clock.now() + self._config.claim_wait_s
            self._answers[handoff_id] = Answer(handoff_id, AnswerState.UNCLAIMED, None, deadline)
        elif answer.state is AnswerState.AWAITED:
            answer.state, answer.deadline = AnswerState.STREAMING, None

    def lost(self, handoff_id: str, error: DiptychError) -> None:
        """This hand-off will not come: whoever waits for it, or asks for it soon, is told why."""
        answer = self._answers.get(handoff_id)
        if answer is not None and answer.session is not None:
            self._end(answer, error)
            return
        self._answers.pop(handoff_id, None)
        self._remember(handoff_id, error)

    def attach(self, session: Session, handoff_id: str, wait_s: float) -> None:
        """`session` reads this hand-off, now or when it comes within `wait_s`. Repeating it changes nothing."""
        answer = self._answers.get(handoff_id)
        if answer is None:
            self._await(session, handoff_id, wait_s)
        elif answer.session is None:
            answer.session, answer.state, answer.deadline = session, AnswerState.STREAMING, None
            buffered, answer.buffered = tuple(answer.buffered), []
            self._send({session: list(buffered)} if buffered else {})
            if buffered and buffered[-1].finish_reason is not None:
                self._answers.pop(handoff_id, None)
        elif answer.session is not session:
            self._refuse(session, handoff_id, UnknownHandoff(f"{handoff_id}: another session reads it"))

    def start(self, session: Session, request_id: str) -> bool:
        """`session` is about to run a request alone; False when the id is taken (told to the session, if it is not its own)."""
        answer = self._answers.get(request_id)
        if answer is None:
            self._answers[request_id] = Answer(request_id, AnswerState.STREAMING, session, None)
            return True
        if answer.session is not session:
            self._refuse(session, request_id, InvalidRequest("request_id", request_id, "must be new"))
        return False

    def fail(self, request_id: str, error: DiptychError) -> None:
        """The engine refused or lost this request; its reader is told."""
        answer = self._answers.get(request_id)
        if answer is not None:
            self._end(answer, error)

    def cancel(self, session: Session, request_id: str) -> None:
        """Stop a request of this session; it ends with ABORT. One that is not known, or another's, is left alone."""
        answer = self._answers.get(request_id)
        if answer is not None and answer.session is session:
            error = RequestCancelled(f"{request_id}: cancelled")
            self._stop(answer, error)
            self._end(answer, error)

    def deliver(self, deltas: Iterable[TokenDelta]) -> None:
        """One engine step's news, one batch per session. News of requests that nobody knows any more is dropped."""
        batches: dict[Session, list[TokenDelta]] = {}
        for delta in deltas:
            answer = self._answers.get(delta.request_id)
            if answer is None:
                continue  # cancelled while the step ran
            if answer.session is None:
                answer.buffered.append(delta)
                continue
            batches.setdefault(answer.session, []).append(delta)
            if delta.finish_reason is not None:
                del self._answers[delta.request_id]
        self._send(batches)

    def close_session(self, session: Session) -> None:
        """The session is over: abort all it carried. Idempotent."""
        for answer in [a for a in self._answers.values() if a.session is session]:
            self._stop(answer, RequestCancelled(f"{answer.request_id}: its session ended"))
            del self._answers[answer.request_id]

    def sweep(self) -> None:
        """End what has waited too long."""
        now = self._clock.now()
        for answer in [a for a in self._answers.values() if a.deadline is not None and a.deadline <= now]:
            if answer.state is AnswerState.AWAITED:
                self._end(answer, UnknownHandoff(f"{answer.request_id}: did not come in time"))
            else:
                log.warning("nobody attached; aborting", handoff_id=answer.request_id)
                error = UnknownHandoff(f"{answer.request_id}: nobody attached in time")
                self._stop(answer, error)
                self.lost(answer.request_id, error)
        while self._lost and next(iter(self._lost.values()))[0] <= now:
            self._lost.popitem(last=False)

    def _remember(self, handoff_id: str, error: DiptychError) -> None:
        self._lost[handoff_id] = (self._clock.now() + self._config.lost_memory_s, error)
        self._lost.move_to_end(handoff_id)
        while len(self._lost) > self._config.max_lost:
            self._lost.popitem(last=False)

    def _await(self, session: Session, handoff_id: str, wait_s: float) -> None:
        lost = self._lost.get(handoff_id)
        if lost is not None:
            self._refuse(session, handoff_id, lost[1])
            return
        wait_s = min(max(wait_s, 0.0), self._config.max_attach_wait_s)
        self._answers[handoff_id] = Answer(handoff_id, AnswerState.AWAITED, session, self._clock.now() + wait_s)

    def _stop(self, answer: Answer, error: DiptychError) -> None:
        if answer.state is AnswerState.AWAITED:
            self._remember(answer.request_id, error)  # its KV may be on the way: a commit is refused
        else:
            self._abort(answer.request_id)

    def _end(self, answer: Answer, error: DiptychError) -> None:
        self._answers.pop(answer.request_id, None)
        if answer.session is not None:
            self._refuse(answer.session, answer.request_id, error)

    def _refuse(self, session: Session, request_id: str, error: DiptychError) -> None:
        reason = FinishReason.ABORT if isinstance(error, RequestCancelled) else FinishReason.ERROR
        delta = TokenDelta(request_id, 0, finish_reason=reason, error=error_info(error))
        self._send({session: [delta]})

    def _send(self, batches: dict[Session, list[TokenDelta]]) -> None:
        for session, deltas in batches.items():
            if not session.push(tuple(deltas)) and any(a.session is session for a in self._answers.values()):
                log.warning("session closed: its router does not read", session=session.session_id)
                self.close_session(session)
