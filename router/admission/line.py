"""Who waits for places, and how that ends: a turn, sent away by another, out of time, or gone.

    wait ──▶ in the queue ──▶ places, in the order of `router.admission.fair_queue`: class, then a fair share per caller
       │         ├──▶ Overloaded, pushed out by one with a better right to wait, or after max_wait_s
       │         ├──▶ DeadlineExceeded
       │         └──▶ its client has left
       └──▶ Overloaded: no room to wait, or no use

Nobody overtakes the first in the queue, so a large request gets its turn. Does not know what a request is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from contracts.clock import Clock
from contracts.errors import DeadlineExceeded, DiptychError
from router.admission.fair_queue import FairQueue, QueueConfig, Waiting
from router.admission.service_rate import ServiceRate
from router.admission.shedding import Shedding
from router.config import AdmissionConfig


class Places:
    """For answers that are made at once. A request of more answers than there are places takes all of them."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def fit(self, num_answers: int) -> bool:
        """Whether a request of so many answers may run now."""
        return self.taken + min(num_answers, self.total) <= self.total

    def take(self, num_answers: int) -> int:
        """Those of a request, to be given back; it fits."""
        places = min(num_answers, self.total)
        self.taken += places
        self._idle.clear()
        return places

    def give_back(self, places: int) -> None:
        """What was taken."""
        self.taken -= places

    def settle(self) -> None:
        """Nobody who waited wants what was given back."""
        if not self.taken:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return when none is taken."""
        await self._idle.wait()


@dataclass(slots=True, kw_only=True, eq=False)
class Turn(Waiting):
    """One request's, from when it comes to when it goes. `places` are those that it holds: none while it waits."""

    num_answers: int
    given: asyncio.Future[None] = field(init=False)  # of one that waits
    places: int = 0
    began: float = 0.0  # an instant of the router's clock
    queued: bool = False


class Line:
    """Owns the queue; `places` are shared with those who need not wait."""

    def __init__(
        self, config: AdmissionConfig, clock: Clock, places: Places, rate: ServiceRate, shedding: Shedding
    ) -> None:
        self._limit_s = config.max_wait_s
        self._clock = clock
        self._places = places
        self._rate = rate
        self._shedding = shedding
        self._queue: FairQueue[Turn] = FairQueue(QueueConfig(config.ageing_s, config.ageing_turn))

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def cost(self) -> float:
        """Of all of them, in tokens."""
        return self._queue.cost

    async def wait(self, turn: Turn, deadline: float) -> None:
        """Until it has its places. Raises Overloaded, at once or when pushed out, and DeadlineExceeded."""
        places = min(turn.num_answers, self._places.total)
        self._shedding.check(turn, places, self._queue.ahead_of(turn), deadline)
        self._make_room(turn)
        turn.given = asyncio.get_running_loop().create_future()
        self._queue.push(turn)
        turn.queued = True
        self.let_in()  # a small one of better priority may have room where the first so far had none
        timer = asyncio.ensure_future(self._expire(turn, deadline))
        try:
            await turn.given
        except (asyncio.CancelledError, DiptychError):
            if turn.given.done() and not turn.given.cancelled() and turn.given.exception() is None:
                self.give_back(turn)  # the places came in the same turn of the loop in which the client left
            else:
                self._withdraw(turn)
                self.let_in()  # it may have been the first, and too large for the room that those behind it fit
            raise
        finally:
            timer.cancel()

    def leave(self, turn: Turn, tokens: float) -> None:
        """A turn is over, which took so many tokens: its places are the next one's."""
        self._queue.correct(turn, tokens)
        self.give_back(turn)

    def give_back(self, turn: Turn) -> None:
        """Its places, to whoever is next."""
        self._places.give_back(turn.places)
        self.let_in()
        self._places.settle()

    def let_in(self) -> None:
        """Places to those who wait, in their order, as far as there is room for the first."""
        while self._queue:
            now = self._clock.now()
            turn = self._queue.peek(now)
            if turn.given.done():  # its client has left
                self._withdraw(turn)
                continue
            if not self._places.fit(turn.num_answers):
                return
            self._queue.pop(now)
            turn.queued = False
            turn.places = self._places.take(turn.num_answers)
            turn.given.set_result(None)

    def send_away(self, reason: DiptychError) -> None:
        """All who wait hear `reason`."""
        for turn in list(self._queue):
            self._withdraw(turn, reason)

    def _make_room(self, turn: Turn) -> None:
        """Room in the queue, by pushing out whoever has the least right to wait. Raises Overloaded when that is the newcomer."""
        taken = self._places.taken
        while (full := self._shedding.full(taken, len(self._queue), self._queue.cost, turn)) is not None:
            reason, words = full
            drained_s = self._rate.wait_s(self._queue.cost)
            victim = self._queue.displaced_by(turn)
            if victim is None:
                raise self._shedding.overloaded(reason, words, turn, drained_s)
            words = f"{words}; others have a better right"
            self._withdraw(victim, self._shedding.overloaded("pushed_out", words, victim, drained_s))

    async def _expire(self, turn: Turn, deadline: float) -> None:
        limit_s = self._limit_s
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
        self.let_in()  # it may have been the first, and too large for the room that those behind it fit

    def _withdraw(self, turn: Turn, reason: DiptychError | None = None) -> None:
        """It waits no longer, and hears `reason` unless its client has left."""
        if turn.queued:
            turn.queued = False
            self._queue.remove(turn)
        if reason is not None and not turn.given.done():
            turn.given.set_exception(reason)
