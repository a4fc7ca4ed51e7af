"""Overload on virtual time: what is offered above capacity must not cost what could be served, and nobody hangs.

Requests come at random (an open loop: they do not wait for each other), each with a deadline of its own. Behind the gate
is a pool of workers that computes so many tokens a second, divided over what runs. Goodput is answers within their deadline.
"""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from contracts.errors import DeadlineExceeded, Overloaded
from router.admission.permits import Admission, Demand
from router.caller import ANYBODY, Caller
from router.config import AdmissionConfig
from tests.faults.virtual_time import run

LOADS = (0.5, 1.0, 1.5, 3.0)
TOKENS_PER_S = 2000.0
ALONE_TOKENS_PER_S = 100.0  # one request gets no more, however little runs
DURATION_S = 60.0
TICK_S = 0.05


@dataclass
class Load:
    """`spread` 0 makes all answers alike. All have the same time, or in times of what each takes when it is alone. Who does not
    say its time is let wait for as long as anybody is; it counts all the same.
    """

    name: str
    mean_tokens: float = 100.0
    spread: float = 0.0
    time_s: float = 5.0
    patience: float | None = None
    says_more: bool = False  # max_tokens are a guess: up to four times what is needed
    returns: bool = False  # who was sent away comes back when told, once
    says_time: bool = True

    def tokens(self, chance):
        return max(5.0, self.mean_tokens * chance.lognormvariate(-(self.spread**2) / 2, self.spread))

    def limit_s(self, tokens):
        return self.time_s if self.patience is None else self.patience * tokens / ALONE_TOKENS_PER_S


@dataclass
class Outcome:
    offered: int = 0
    in_time: int = 0
    useful_tokens: float = 0.0
    late: int = 0  # ran, and its time ran out
    expired: int = 0  # in the queue
    refused: list[float] = field(default_factory=list)  # how long each was told to wait


class Late(Exception):
    """Its time ran out while it ran."""


class Workers:
    """All that runs is computed at once, each a fair share; what is given up was computed for nothing."""

    def __init__(self, clock):
        self._clock = clock
        self._running = {}

    async def run(self):
        while True:
            await self._clock.sleep(TICK_S)
            share = TICK_S * min(ALONE_TOKENS_PER_S, TOKENS_PER_S / max(1, len(self._running)))
            for ended, (done, tokens, deadline) in list(self._running.items()):
                self._running[ended] = (done + share, tokens, deadline)
                if done + share >= tokens or self._clock.now() > deadline:
                    del self._running[ended]
                    ended.set_result(min(done + share, tokens))

    async def answer(self, tokens, deadline, permit):
        """Raises Late."""
        ended = asyncio.get_running_loop().create_future()
        self._running[ended] = (0.0, tokens, deadline)
        permit.tokens = await ended
        if self._clock.now() > deadline:
            raise Late


class Visit:
    def __init__(self, clock, config, load, seed=7):
        self.clock = clock
        self.admission = Admission(config, clock)
        self.workers = Workers(clock)
        self.load = load
        self.chance = random.Random(seed)
        self.priorities = {}  # that requests of a caller ask for; 0 where it is not said

    async def one(self, tokens, outcome, caller=ANYBODY, again=True):
        due = self.clock.now() + self.load.limit_s(tokens)
        deadline = due if self.load.says_time else self.clock.now() + 600.0
        said = tokens * (self.chance.uniform(1.0, 4.0) if self.load.says_more else 1.0)
        demand = Demand(deadline=deadline, tokens=said, caller=caller, priority=self.priorities.get(caller.name, 0))
        try:
            async with self.admission.permit(demand) as permit:
                await self.workers.answer(tokens, deadline, permit)
        except Overloaded as error:
            outcome.refused.append(error.retry_after_s)
            if self.load.returns and again:
                await self.clock.sleep(error.retry_after_s)
                await self.one(tokens, outcome, caller, again=False)
        except DeadlineExceeded:
            outcome.expired += 1
        except Late:
            outcome.late += 1
        else:
            if self.clock.now() > due:
                outcome.late += 1
                return
            outcome.in_time += 1
            outcome.useful_tokens += tokens

    async def offer(self, factor, caller=ANYBODY):
        """All of it, to its end."""
        outcome, rate, visits = Outcome(), factor * TOKENS_PER_S / self.load.mean_tokens, []
        while self.clock.now() < DURATION_S:
            await self.clock.sleep(self.chance.expovariate(rate))
            outcome.offered += 1
            visits.append(asyncio.ensure_future(self.one(self.load.tokens(self.chance), outcome, caller)))
        await asyncio.gather(*visits)
        return outcome

    async def together(self, *offers):
        """The outcome of each offer; nothing is left when they are over."""
        computing = asyncio.ensure_future(self.workers.run())
        outcomes = await asyncio.gather(*offers)
        computing.cancel()
        assert (self.admission.num_running, self.admission.num_waiting) == (0, 0)
        return outcomes


def offered(config, load, factor):
    async def world(clock):
        visit = Visit(clock, config, load)
        return (await visit.together(visit.offer(factor)))[0]

    return run(world)


CASES = [
    Load("says no time, as OpenAI's clients", spread=0.5, time_s=40.0, says_time=False),
    Load("alike"),
    Load("unlike", spread=1.0, time_s=10.0),
    Load("unlike and as patient as they are large", spread=1.0, patience=5.0),
    Load("max_tokens is a guess", spread=0.5, says_more=True, time_s=8.0),
    Load("hardly any patience", time_s=3.5),
    Load("who is refused comes back", spread=0.5, returns=True, time_s=8.0),
]


@pytest.mark.parametrize("load", CASES, ids=lambda load: load.name)
@pytest.mark.parametrize("max_running", [20, 40])
def test_goodput_at_three_times_capacity_is_that_of_its_peak(load, max_running):
    """Also where more may run than the workers do well: 20 run at full speed, 40 at half of it."""
    config = AdmissionConfig(max_running=max_running, max_waiting=1000)
    outcomes = {factor: offered(config, load, factor) for factor in LOADS}
    print({f: (o.in_time, round(o.useful_tokens), o.late, o.expired, len(o.refused)) for f, o in outcomes.items()})
    useful = {factor: outcome.useful_tokens for factor, outcome in outcomes.items()}
    assert useful[3.0] >= 0.9 * max(useful.values())
    if load.patience is None:
        in_time = {factor: outcome.in_time for factor, outcome in outcomes.items()}
        assert in_time[3.0] >= 0.9 * max(in_time.values())
    assert all(1.0 <= told <= 60.0 for outcome in outcomes.values() for told in outcome.refused)
    assert len(outcomes[0.5].refused) <= 0.02 * outcomes[0.5].offered


def test_without_shedding_goodput_collapses():
    """So the test above can fail: a queue that takes everybody serves each of them too late."""
    load = Load("alike")

    async def world(clock):
        visit = Visit(clock, AdmissionConfig(max_running=20, max_waiting=1000), load)
        visit.admission._shedding.check = lambda *given: None
        return (await visit.together(visit.offer(3.0)))[0]

    assert run(world).in_time < 0.5 * DURATION_S * TOKENS_PER_S / load.mean_tokens


@pytest.mark.parametrize("priority", [0, -5])
def test_a_key_that_floods_costs_another_nothing(priority):
    """One key offers three times what there is, the other a tenth of it: nearly all of the other's are in time, whatever
    priority the flood gives itself."""

    async def world(clock):
        visit = Visit(clock, AdmissionConfig(max_running=20, max_waiting=200), Load("alike"))
        visit.priorities["flood"] = priority
        return await visit.together(visit.offer(3.0, Caller(name="flood")), visit.offer(0.1, Caller(name="quiet")))

    flood, quiet = run(world)
    print(flood.in_time, quiet)
    assert quiet.in_time >= 0.95 * quiet.offered
    assert flood.in_time >= 0.8 * DURATION_S * TOKENS_PER_S / 100.0, "which has the rest"
