"""The outermost layer: how many requests run at once, how many wait, who is next, and when a client is told to come back.

    permit() ──▶ running                       while there is a place: max_running, or what `resize` said last
             ──▶ waiting ──▶ running           in the order of `router.admission.fair_queue`: class, then a fair share per caller
             │      ├──▶ DeadlineExceeded      its time ran out in the queue
             │      └──▶ Overloaded            pushed out by one with a better right to wait; or it waited for max_wait_s
             ──▶ Overloaded(retry_after_s)     the queue is full; or the wait would be longer than max_wait_s; or, with its
             │                                 own answer, than the time that the request has left
             ──▶ Unavailable                   after close(); those who wait already: after halt()

A request of n answers takes n places with one permit, all at once: taken one by one, requests that each hold some and wait
for the rest would wait for each other for ever. One of more answers than there are places takes all of them. A permit is given
back once, when its `async with` block ends. How one waits is `router.admission.line`'s; who is sent away, and told to come back
when, is `router.admission.shedding`'s.
Knows nothing of a request but what `Demand` says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType

from contracts.clock import Clock
from contracts.errors import DiptychError, Overloaded, RateLimited, Unavailable
from router.admission.capacity import FIRST_PLACES
from router.admission.line import Line, Places, Turn
from router.admission.service_rate import ServiceRate
from router.admission.shedding import Shedding
from router.caller import ANYBODY, Caller
from router.config import AdmissionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request wants. `deadline` is an instant of the router's clock; `tokens` is about what prompt and answers take."""

    deadline: float
    caller: Caller = ANYBODY
    priority: int = 0
    num_answers: int = 1
    tokens: float = 1.0

    @property
    def class_(self) -> int:
        """Its priority, no better than its caller's best."""
        return self.caller.allowed(self.priority)


@dataclass(frozen=True, slots=True)
class Backlog:
    """About how many tokens wait, and how long the queue needs to empty: 0 while nothing is known of what requests take."""

    tokens: float
    wait_s: float


@dataclass(slots=True)
class Permit:
    """A running request's. `tokens` is what prompt and answers took in the end: say it before the block ends."""

    tokens: float = 0.0


class Admission:
    """Owns the permits. All methods are called on the event loop. `on_shed` hears why somebody was sent away."""

    def __init__(self, config: AdmissionConfig, clock: Clock, on_shed: Callable[[str], None] | None = None) -> None:
        self._config = config
        self._clock = clock
        self._places = Places(config.max_running or FIRST_PLACES)
        self._rate = ServiceRate(self._places.total)
        self._shedding = Shedding(config, clock, self._rate, on_shed)
        self._line = Line(config, clock, self._places, self._rate, self._shedding)
        self._closed = False

    @property
    def num_running(self) -> int:
        """Answers that are being made: each permit counts as many as it is for."""
        return self._places.taken

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a permit."""
        return len(self._line)

    @property
    def backlog(self) -> Backlog:
        """What they are for."""
        return Backlog(self._line.cost, self._rate.wait_s(self._line.cost))

    @property
    def num_places(self) -> int:
        """Answers that may be made at once."""
        return self._places.total

    def resize(self, places: int) -> None:
        """So many answers may be made at once from now on, unless the configuration says how many; 0 says nothing. Where more
        run than that, they go on to their end.
        """
        if self._config.max_running is None and places not in (0, self._places.total):
            self._places.total = places
            self._rate.resize(places)
            self._line.let_in()

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed

    def close(self) -> None:
        """Let nobody in from now on; those who wait still get their turn."""
        self._closed = True

    def halt(self, reason: DiptychError) -> None:
        """As `close`, and those who wait are sent away with `reason`."""
        self.close()
        self._line.send_away(reason)

    async def wait_idle(self) -> None:
        """Return when nothing runs and nothing waits."""
        await self._places.wait_idle()

    def permit(self, demand: Demand) -> AbstractAsyncContextManager[Permit]:
        """Hold a permit for the block. Raises Overloaded, at once or when pushed out, or DeadlineExceeded from the queue."""
        return _Stay(self, demand)

    async def enter(self, demand: Demand) -> Turn:
        """The turn of one that was let in, which it must `leave`; raises as `permit` does."""
        if self._closed:
            raise Unavailable("this router is stopping")
        turn = Turn(
            caller=demand.caller.name,
            weight=demand.caller.weight,
            priority=demand.class_,
            cost=max(1.0, demand.tokens),
            since=self._clock.now(),
            num_answers=demand.num_answers,
        )
        if not self._line and self._places.fit(turn.num_answers):
            turn.places = self._places.take(turn.num_answers)
        else:
            await self._line.wait(turn, demand.deadline)
        turn.began = self._clock.now()
        return turn

    def come_back_s(self, turn: Turn) -> float:
        """When a request may come again that was let in and that workers had no room for: when the queue has emptied, and those
        that run have been served as this one would have been.
        """
        after_s = self._rate.wait_s(self._line.cost) + self._rate.service_s(turn.cost, turn.places)
        return self._shedding.come_back_s(turn, after_s)

    def leave(self, turn: Turn, tokens: float, said: float | None) -> None:
        """Its prompt and answers took so many tokens; `said` is what was estimated, where it came to its end."""
        self._rate.ended(tokens, turn.places * (self._clock.now() - turn.began), said)
        self._line.leave(turn, tokens)


class _Stay:
    """A permit for an `async with` block. Most are given at once, and then cost no more than they must."""

    __slots__ = ("_admission", "_demand", "_permit", "_turn")

    def __init__(self, admission: Admission, demand: Demand) -> None:
        self._admission = admission
        self._demand = demand
        self._permit = Permit()

    async def __aenter__(self) -> Permit:
        self._turn = await self._admission.enter(self._demand)
        return self._permit

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Overloaded) and not isinstance(error, RateLimited):
            # A worker's, which knows no queue but its own.
            error.retry_after_s = max(error.retry_after_s, self._admission.come_back_s(self._turn))
        self._admission.leave(self._turn, self._permit.tokens, self._turn.cost if error is None else None)
