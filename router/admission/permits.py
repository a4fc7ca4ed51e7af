"""The outermost layer: how many requests run at once, how many wait, who is next, and when a client is told to come back.

    permit() ──▶ running                       while there is a place: max_running, or what `resize` said last
             ──▶ waiting ──▶ running           in the order of `router.admission.fair_queue`: class, then a fair share per caller
             │      ├──▶ DeadlineExceeded      its time ran out in the queue
             │      └──▶ Overloaded            pushed out by one with a better right to wait; or it waited for max_wait_s
             ──▶ Overloaded(retry_after_s)     the queue is full; or the wait would be longer than max_wait_s; or, with its
             │                                 own answer, than the time that the request has left
             ──▶ Unavailable                   after close(); those who wait already: after halt()

A request of n answers takes n places with one permit, all at once: taken one by one, requests that each hold some and wait
for the rest would wait for each other for ever. One of more answers than there are places takes all of them. Nobody overtakes
the first in the queue, so a large request gets its turn. A permit is given back once, when its `async with` block ends.
Who is sent away, and told to come back when, is `router.admission.shedding`'s.
Knows nothing of a request but what `Demand` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, DiptychError, Unavailable
from router.admission.capacity import FIRST_PLACES
from router.admission.fair_queue import FairQueue, QueueConfig, Waiting
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


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn(Waiting):
    num_answers: int
    given: asyncio.Future[None]
    places: int = 0  # that it holds; none while it waits
    queued: bool = False


class Admission:
    """Owns the permits. All methods are called on the event loop. `on_shed` hears why somebody was sent away."""

    def __init__(self, config: AdmissionConfig, clock: Clock, on_shed: Callable[[str], None] | None = None) -> None:
        self._config = config
        self._clock = clock
        self._queue: FairQueue[_Turn] = FairQueue(QueueConfig(config.ageing_s, config.ageing_turn))
        self._places = config.max_running or FIRST_PLACES
        self._rate = ServiceRate(self._places)
        self._shedding = Shedding(config, clock, self._rate, on_shed)
        self._num_running = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Answers that are being made: each permit counts as many as it is for."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a permit."""
        return len(self._queue)

    @property
    def backlog(self) -> Backlog:
        """What they are for."""
        return Backlog(self._queue.cost, self._rate.wait_s(self._queue.cost))

    @property
    def num_places(self) -> int:
        """Answers that may be made at once."""
        return self._places

    def resize(self, places: int) -> None:
        """So many answers may be made at once from now on, unless the configuration says how many; 0 says nothing. Where more
        run than that, they go on to their end.
        """
        if self._config.max_running is None and places not in (0, self._places):
            self._places = places
            self._rate.resize(places)
            self._let_in()

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
        for turn in list(self._queue):
            self._withdraw(turn, reason)

    async def wait_idle(self) -> None:
        """Return when nothing runs and nothing waits."""
        await self._idle.wait()

    @asynccontextmanager
    async def permit(self, demand: Demand) -> AsyncIterator[Permit]:
        """Hold a permit for the block. Raises Overloaded, at once or when pushed out, or DeadlineExceeded from the queue."""
        if self._closed:
            raise Unavailable("this router is stopping")
        turn = _Turn(
            caller=demand.caller.name,
            weight=demand.caller.weight,
            priority=demand.class_,
            cost=max(1.0, demand.tokens),
            since=self._clock.now(),
            num_answers=demand.num_answers,
            given=asyncio.get_running_loop().create_future(),
        )
        if not self._queue and self._fits(turn):
            self._seat(turn)
        else:
            await self._wait(turn, demand.deadline)
        since, permit, said = self._clock.now(), Permit(), None
        try:
            yield permit
            said = turn.cost
        finally:
            self._rate.ended(permit.tokens, turn.places * (self._clock.now() - since), said)
            self._queue.correct(turn, permit.tokens)
            self._take(-turn.places)

    async def _wait(self, turn: _Turn, deadline: float) -> None:
        places = min(turn.num_answers, self._places)
        self._shedding.check(turn, places, self._queue.ahead_of(turn), deadline)
        self._make_room(turn)
        self._queue.push(turn)
        turn.queued = True
        self._let_in()  # a small one of better priority may have room where the first so far had none
        timer = asyncio.ensure_future(self._expire(turn, deadline))
        try:
            await turn.given
        except (asyncio.CancelledError, DiptychError):
            if turn.given.done() and not turn.given.cancelled() and turn.given.exception() is None:
                self._take(-turn.places)  # the permit came in the same turn of the loop in which the client left
            else:
                self._withdraw(turn)
                self._let_in()  # it may have been the first, and too large for the room that those behind it fit
            raise
        finally:
            timer.cancel()

    def _make_room(self, turn: _Turn) -> None:
        """Room in the queue, by pushing out whoever has the least right to wait. Raises Overloaded when that is the newcomer."""
        while (full := self._shedding.full(self._num_running, len(self._queue), self._queue.cost, turn)) is not None:
            reason, words = full
            drained_s = self._rate.wait_s(self._queue.cost)
            victim = self._queue.displaced_by(turn)
            if victim is None:
                raise self._shedding.overloaded(reason, words, turn, drained_s)
            words = f"{words}; others have a better right"
            self._withdraw(victim, self._shedding.overloaded("pushed_out", words, victim, drained_s))

    async def _expire(self, turn: _Turn, deadline: float) -> None:
        limit_s = self._config.max_wait_s
        last = deadline if limit_s is None else min(deadline, turn.since + limit_s)
        await self._clock.sleep(last - self._clock.now())
        if turn.given.done():
            return
        waited_s = self._clock.now() - turn.since
        if last < deadline:
            words = f"it has waited for {waited_s:.1f} s, and {limit_s:g} s is the limit"
            self._withdraw(turn, self._shedding.overloaded("wait", words, turn, self._rate.wait_s(self._queue.cost)))
        else:
            said = f"the request's time ran out after {waited_s:.1f} s in which it waited to be let in"
            self._withdraw(turn, DeadlineExceeded(said))
        self._let_in()  # it may have been the first, and too large for the room that those behind it fit

    def _withdraw(self, turn: _Turn, reason: DiptychError | None = None) -> None:
        """It waits no longer, and hears `reason` unless its client has left."""
        if turn.queued:
            turn.queued = False
            self._queue.remove(turn)
        if reason is not None and not turn.given.done():
            turn.given.set_exception(reason)

    def _take(self, places: int) -> None:
        """Negative places are given back."""
        self._num_running += places
        if places < 0:
            self._let_in()
        if self._num_running:
            self._idle.clear()
        else:
            self._idle.set()

    def _let_in(self) -> None:
        """Permits to those who wait, in their order, as far as there is room for the first."""
        while self._queue:
            now = self._clock.now()
            turn = self._queue.peek(now)
            if turn.given.done():  # its client has left
                self._withdraw(turn)
                continue
            if not self._fits(turn):
                return
            self._queue.pop(now)
            turn.queued = False
            self._seat(turn)
            turn.given.set_result(None)

    def _fits(self, turn: _Turn) -> bool:
        return self._num_running + min(turn.num_answers, self._places) <= self._places

    def _seat(self, turn: _Turn) -> None:
        turn.places = min(turn.num_answers, self._places)
        self._take(turn.places)
