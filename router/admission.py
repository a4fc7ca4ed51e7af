"""The outermost layer: how many requests run at once, how many wait, who is next, and when a client is told to come back.

    permit() ──▶ running                       while there is room within max_running
             ──▶ waiting ──▶ running           in the order of `router.fair_queue`: class, then a fair share per caller
             │      ├──▶ DeadlineExceeded      its time ran out in the queue
             │      └──▶ Overloaded            pushed out by one with a better right to wait
             ──▶ Overloaded(retry_after_s)     the queue is full; or the wait would be longer than max_wait_s; or, with its
             │                                 own answer, than the time that the request has left
             ──▶ Unavailable                   after close(); those who wait already: after halt()

A request of n answers takes n places with one permit, all at once: taken one by one, requests that each hold some and wait
for the rest would wait for each other for ever. One of more answers than there are places takes all of them. Nobody overtakes
the first in the queue, so a large request gets its turn. A permit is given back once, when its `async with` block ends.
When to come back follows from how fast places were given back (`router.service_rate`), and each who is sent away gets a later
time than the one before, as if they stood in a line outside: else all would come back at once.
Knows nothing of a request but what `Demand` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, DiptychError, Overloaded, Unavailable
from router.caller import ANYBODY, Caller
from router.config import AdmissionConfig
from router.fair_queue import FairQueue, QueueConfig, Waiting
from router.service_rate import ServiceRate

_LEAST_RETRY_AFTER_S = 1.0


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
        best = self.caller.best_priority
        return self.priority if best is None else max(self.priority, best)


@dataclass(slots=True)
class Permit:
    """A running request's. `tokens` is what prompt and answers took in the end: say it before the block ends."""

    tokens: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn(Waiting):
    places: int
    given: asyncio.Future[None]
    queued: bool = False


class Admission:
    """Owns the permits. All methods are called on the event loop. `on_shed` hears why somebody was sent away."""

    def __init__(self, config: AdmissionConfig, clock: Clock, on_shed: Callable[[str], None] | None = None) -> None:
        self._config = config
        self._clock = clock
        self._on_shed = on_shed
        self._queue: FairQueue[_Turn] = FairQueue(QueueConfig(config.ageing_s, config.ageing_turn))
        self._rate = ServiceRate(config.max_running)
        self._num_running = 0
        self._promised = 0.0  # the instant that the last who was sent away was told
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
    def waiting_tokens(self) -> float:
        """About how many tokens they are for."""
        return self._queue.cost

    @property
    def wait_s(self) -> float:
        """About how long the queue needs to empty; 0 while nothing is known of how long requests take."""
        return self._rate.wait_s(self._queue.cost)

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
            self._send_away(turn, reason)

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
            places=min(demand.num_answers, self._config.max_running),
            given=asyncio.get_running_loop().create_future(),
        )
        if not self._queue and self._num_running + turn.places <= self._config.max_running:
            self._take(turn.places)
        else:
            await self._wait(turn, demand.deadline)
        since, permit = self._clock.now(), Permit()
        try:
            yield permit
        finally:
            self._rate.note(turn.cost, turn.places * (self._clock.now() - since))
            self._queue.correct(turn, permit.tokens)
            self._give_back(turn.places)

    async def _wait(self, turn: _Turn, deadline: float) -> None:
        self._shed_hopeless(turn, deadline)
        self._make_room(turn)
        self._queue.push(turn)
        turn.queued = True
        self._let_in()  # a small one of better priority may have room where the first so far had none
        timer = asyncio.ensure_future(self._expire(turn, deadline))
        try:
            await turn.given
        except (asyncio.CancelledError, DiptychError):
            if turn.given.done() and not turn.given.cancelled() and turn.given.exception() is None:
                self._give_back(turn.places)  # the permit came in the same turn of the loop in which the client left
            else:
                self._leave(turn)
                self._let_in()  # it may have been the first, and too large for the room that those behind it fit
            raise
        finally:
            timer.cancel()

    def _shed_hopeless(self, turn: _Turn, deadline: float) -> None:
        """Raise Overloaded when waiting cannot help: whoever would be too late only keeps others waiting."""
        wait_s = self._rate.wait_s(self._queue.ahead_of(turn))
        left_s = deadline - turn.since
        needed_s = wait_s + self._rate.service_s(turn.cost, turn.places)
        if needed_s > left_s:
            what = f"about {wait_s:.1f} s of waiting and the answer after it would take longer than the {left_s:.1f} s"
            raise self._overloaded("deadline", f"{what} that the request has left", turn, needed_s - left_s)
        limit_s = self._config.max_wait_s
        if limit_s is not None and wait_s > limit_s:
            what = f"it would wait for about {wait_s:.1f} s, and {limit_s:g} s is the limit"
            raise self._overloaded("wait", what, turn, wait_s - limit_s)

    def _make_room(self, turn: _Turn) -> None:
        """Room in the queue, by pushing out whoever has the least right to wait. Raises Overloaded when that is the newcomer."""
        while (full := self._full(turn)) is not None:
            reason, words = full
            if not self._queue or not self._queue.displaces(turn, self._queue.worst()):
                raise self._overloaded(reason, words, turn, self._rate.wait_s(self._queue.cost))
            victim = self._queue.worst()
            after_s = self._rate.wait_s(self._queue.cost)
            self._send_away(
                victim, self._overloaded("pushed_out", f"{words}; others have a better right", victim, after_s)
            )

    def _full(self, turn: _Turn) -> tuple[str, str] | None:
        config = self._config
        if len(self._queue) >= config.max_waiting:
            words = (
                f"{self._num_running} answers are being made and {len(self._queue)} requests wait, which is the limit"
            )
            return "full", words
        limit = config.max_waiting_tokens
        if limit is not None and len(self._queue) and self._queue.cost + turn.cost > limit:
            return "full_tokens", f"requests for about {self._queue.cost:.0f} tokens wait, and {limit} is the limit"
        return None

    def _overloaded(self, reason: str, words: str, turn: Waiting, after_s: float) -> Overloaded:
        """The refusal, with a time to come back that is not before `after_s`, nor when others were told to."""
        if self._on_shed is not None:
            self._on_shed(reason)
        now, longest_s = self._clock.now(), self._config.max_retry_after_s
        begin = max(now + after_s, self._promised)
        self._promised = min(begin + self._rate.wait_s(turn.cost), now + longest_s)
        return Overloaded(words, min(max(_LEAST_RETRY_AFTER_S, begin - now), longest_s))

    async def _expire(self, turn: _Turn, deadline: float) -> None:
        await self._clock.sleep(deadline - self._clock.now())
        if not turn.given.done():
            waited_s = self._clock.now() - turn.since
            said = f"the request's time ran out after {waited_s:.1f} s in which it waited to be let in"
            self._send_away(turn, DeadlineExceeded(said))

    def _send_away(self, turn: _Turn, reason: DiptychError) -> None:
        self._leave(turn)
        if not turn.given.done():  # else its client has left
            turn.given.set_exception(reason)

    def _leave(self, turn: _Turn) -> None:
        if turn.queued:
            turn.queued = False
            self._queue.remove(turn)

    def _take(self, places: int) -> None:
        self._num_running += places
        self._idle.clear()

    def _give_back(self, places: int) -> None:
        self._num_running -= places
        self._let_in()
        if self._num_running == 0:
            self._idle.set()

    def _let_in(self) -> None:
        """Permits to those who wait, in their order, as far as there is room for the first."""
        while self._queue:
            now = self._clock.now()
            turn = self._queue.peek(now)
            if turn.given.done():  # its client has left
                self._leave(turn)
                continue
            if self._num_running + turn.places > self._config.max_running:
                return
            self._queue.pop(now)
            turn.queued = False
            self._take(turn.places)
            turn.given.set_result(None)
