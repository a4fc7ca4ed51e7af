"""Whose tokens are whose: every answer in the engine, and the session that reads it.

                     expect (hand-off is being adopted)
    (nothing) ──────────────────────────────────────────▶ UNCLAIMED ──attach──▶ STREAMING ──last delta──▶ (nothing)
        │                                                    │ nobody attached within claim_wait_s: aborted
        ├──attach──▶ AWAITED ──expect──▶ STREAMING           ▼
        │               └─ lost, or wait_s passed: error delta, (nothing)      any ──the worker drains──▶ Draining, (nothing)
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
from observability.log import get_logger
from worker.outbox import Outbox

log = get_logger(__name__)
RouterSession = Outbox[tuple[TokenDelta, ...]]  # one router's stream of answers: what each engine step has for it
Verdict = Callable[["Answer"], DiptychError | None]  # why an answer shall end now, if it shall


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Seconds and counts."""

    # How long an adopted hand-off may run without a reader. A router attaches before it asks for the prefill, so one that
    # is not there by now was lost with its session, and its request goes on elsewhere: a connect takes 3 s at most.
    claim_wait_s: float = 5.0
    max_attach_wait_s: float = 600.0
    # As long as an attach can be late: one that comes after it waits its whole time in vain.
    lost_memory_s: float = 600.0
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
    session: RouterSession | None
    deadline: float | None  # on the book's clock; None while streaming
    buffered: list[TokenDelta] = field(default_factory=list)


class AnswerBook:
    """Every open answer. Owns their buffers; asks `abort` to stop a request in the engine that nobody will read.

    `on_unread`, if set, hears of each hand-off whose reader leaves before it has come, and why.
    """

    def __init__(self, abort: Callable[[str], None], clock: Clock, config: OutputConfig | None = None) -> None:
        self._abort = abort
        self.on_unread: Callable[[str, DiptychError], None] | None = None
        self._clock = clock
        self._config = config if config is not None else OutputConfig()
        self._answers: dict[str, Answer] = {}
        self._finishing: set[RouterSession] = set()
        self._lost = LostMemory(clock, self._config)

    @property
    def num_open(self) -> int:
        """Answers that a session reads or waits for, or that nobody claimed yet."""
        return len(self._answers)

    def state(self, request_id: str) -> AnswerState | None:
        """Where this answer is; None when it is not open."""
        answer = self._answers.get(request_id)
        return None if answer is None else answer.state

    def lost(self, request_id: str) -> DiptychError | None:
        """Why nobody will read this request, if that is known."""
        return self._lost.recall(request_id)

    def expect(self, handoff_id: str) -> None:
        """The engine is about to adopt this hand-off; called before it can make a token.

        Raises the reason when the hand-off was lost or cancelled before: then the engine must not take it.
        """
        lost = self._lost.recall(handoff_id)
        if lost is not None:
            raise lost
        answer = self._answers.get(handoff_id)
        if answer is None:
            deadline = self._clock.now() + self._config.claim_wait_s
            self._answers[handoff_id] = Answer(handoff_id, AnswerState.UNCLAIMED, None, deadline)
        elif answer.state is AnswerState.AWAITED:
            answer.state, answer.deadline = AnswerState.STREAMING, None

    def fail(self, request_id: str, error: DiptychError) -> None:
        """This request ended badly, or its KV will not come: whoever reads it, or asks for it soon, is told why."""
        answer = self._answers.pop(request_id, None)
        if answer is not None and answer.session is not None:
            self._send({answer.session: [_ending(request_id, error)]})
        else:
            self._lost.remember(request_id, error)

    def attach(self, session: RouterSession, handoff_id: str, wait_s: float) -> None:
        """`session` reads this hand-off, now or when it comes within `wait_s`. Repeating it changes nothing."""
        answer, lost = self._answers.get(handoff_id), self._lost.recall(handoff_id)
        if answer is None and lost is not None:
            self._send({session: [_ending(handoff_id, lost)]})
        elif answer is None:
            deadline = self._clock.now() + min(max(wait_s, 0.0), self._config.max_attach_wait_s)
            self._answers[handoff_id] = Answer(handoff_id, AnswerState.AWAITED, session, deadline)
        elif answer.session is None:
            answer.session, answer.state, answer.deadline = session, AnswerState.STREAMING, None
            buffered, answer.buffered = answer.buffered, []
            if buffered and buffered[-1].finish_reason is not None:
                del self._answers[handoff_id]
            self._send({session: buffered} if buffered else {})
        elif answer.session is not session:
            self._send({session: [_ending(handoff_id, UnknownHandoff(f"{handoff_id}: another session reads it"))]})

    def start(self, session: RouterSession, request_id: str) -> bool:
        """`session` is about to run a request alone; False when the id is taken (told to the session, if it is not its own)."""
        answer = self._answers.get(request_id)
        if answer is None:
            self._answers[request_id] = Answer(request_id, AnswerState.STREAMING, session, None)
            return True
        if answer.session is not session:
            self._send({session: [_ending(request_id, InvalidRequest("request_id", request_id, "must be new"))]})
        return False

    def cancel(self, session: RouterSession, *request_ids: str) -> None:
        """Stop requests of this session; each ends with ABORT. One that is not known, or another's, is left alone."""
        endings = []
        for request_id in request_ids:
            answer = self._answers.get(request_id)
            if answer is not None and answer.session is session:
                error = RequestCancelled(f"{request_id}: cancelled")
                self._stop(answer, error)
                del self._answers[request_id]
                endings.append(_ending(request_id, error))
        if endings:
            self._send({session: endings})

    def deliver(self, deltas: Iterable[TokenDelta]) -> None:
        """One engine step's news, one batch per session. News of requests that nobody knows any more is dropped."""
        batches: dict[RouterSession, list[TokenDelta]] = {}
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

    def finish_session(self, session: RouterSession) -> None:
        """The session asks for nothing more: it ends with the last answer that it carries."""
        self._finishing.add(session)
        self._send({})

    def close_session(self, session: RouterSession) -> None:
        """The session is over: abort all it carried. Idempotent."""
        self._finishing.discard(session)
        for answer in [a for a in self._answers.values() if a.session is session]:
            self._stop(answer, RequestCancelled(f"{answer.request_id}: its session ended"))
            del self._answers[answer.request_id]

    def sweep(self, verdict: Verdict | None = None) -> None:
        """End what has waited too long, and every answer for which `verdict` has a reason."""
        now = self._clock.now()
        for answer in tuple(self._answers.values()):
            error = None if verdict is None else verdict(answer)
            if error is None and answer.deadline is not None and answer.deadline <= now:
                what = "does not come" if answer.state is AnswerState.AWAITED else "nobody attached in time"
                log.warning("gave up", handoff_id=answer.request_id, reason=what)
                error = UnknownHandoff(f"{answer.request_id}: {what}")
            if error is not None and self._answers.get(answer.request_id) is answer:
                self._stop(answer, error)
                self.fail(answer.request_id, error)
        self._lost.forget()

    def _stop(self, answer: Answer, error: DiptychError) -> None:
        if answer.state is AnswerState.AWAITED:
            self._lost.remember(answer.request_id, error)  # its KV may be on the way: room and a commit are refused
            if self.on_unread is not None:
                self.on_unread(answer.request_id, error)
        else:
            self._abort(answer.request_id)

    def _send(self, batches: dict[RouterSession, list[TokenDelta]]) -> None:
        for session, deltas in batches.items():
            if not session.put(tuple(deltas)) and any(a.session is session for a in self._answers.values()):
                log.warning("session closed: its router does not read", session=session.name)
                self.close_session(session)
        for session in [s for s in self._finishing if not any(a.session is s for a in self._answers.values())]:
            self._finishing.discard(session)
            session.end()


class LostMemory:
    """Why requests that nobody read ended, for a while and for at most `max_lost` of them."""

    def __init__(self, clock: Clock, config: OutputConfig) -> None:
        self._clock = clock
        self._config = config
        self._reasons: OrderedDict[str, tuple[float, DiptychError]] = OrderedDict()  # id → (until, why), oldest first

    def remember(self, request_id: str, error: DiptychError) -> None:
        """Keep this reason, and forget the oldest if there are too many."""
        self._reasons[request_id] = (self._clock.now() + self._config.lost_memory_s, error)
        self._reasons.move_to_end(request_id)
        while len(self._reasons) > self._config.max_lost:
            self._reasons.popitem(last=False)

    def recall(self, request_id: str) -> DiptychError | None:
        """The reason, if it is still remembered."""
        known = self._reasons.get(request_id)
        return None if known is None else known[1]

    def forget(self) -> None:
        """Drop what is too old."""
        while self._reasons and next(iter(self._reasons.values()))[0] <= self._clock.now():
            self._reasons.popitem(last=False)


def _ending(request_id: str, error: DiptychError) -> TokenDelta:
    reason = FinishReason.ABORT if isinstance(error, RequestCancelled) else FinishReason.ERROR
    return TokenDelta(request_id, 0, finish_reason=reason, error=error_info(error))
