"""Whatever comes, waits, runs, leaves, is late or is pushed out: places are bounded, none is lost, and nobody is forgotten."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.clock import VirtualClock, settle
from contracts.errors import DeadlineExceeded, Overloaded, Unavailable
from router.admission.permits import Admission, Demand
from router.caller import Caller
from router.config import AdmissionConfig

CALLERS = [Caller(name="a"), Caller(name="b", weight=3.0), Caller(name="c", best_priority=1)]
KINDS = ["come", "come", "come", "come", "end", "leave", "wait", "end and leave"]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 20),  # who
        st.integers(0, 5),  # how many more
        st.tuples(
            st.sampled_from(CALLERS),
            st.integers(-1, 2),  # priority
            st.integers(1, 5),  # answers
            st.floats(0.5, 40.0),  # seconds that it has
            st.floats(1.0, 500.0),  # tokens
        ),
    ),
    min_size=10,
    max_size=60,
)


class Crowd:
    def __init__(self, config):
        self.config, self.clock = config, VirtualClock()
        self.admission = Admission(config, self.clock)
        self.inside, self.places, self.told = {}, 0, []
        self.visits = []

    async def visit(self, demand, leave):
        try:
            async with self.admission.permit(demand) as permit:
                assert self.clock.now() <= demand.deadline
                places = min(demand.num_answers, self.config.max_running)
                self.places += places
                self.inside[asyncio.current_task()] = leave
                try:
                    await leave.wait()
                    permit.tokens = demand.tokens / 2
                finally:
                    del self.inside[asyncio.current_task()]
                    self.places -= places
        except Overloaded as error:
            self.told.append(error.retry_after_s)
        except (DeadlineExceeded, Unavailable):
            pass

    def come(self, caller, priority, answers, seconds, tokens):
        deadline = self.clock.now() + seconds
        demand = Demand(deadline=deadline, caller=caller, priority=priority, num_answers=answers, tokens=tokens)
        self.visits.append(asyncio.create_task(self.visit(demand, asyncio.Event())))

    def check(self):
        waiting = sum(not visit.done() for visit in self.visits) - len(self.inside)
        assert self.admission.num_running == self.places <= self.config.max_running
        assert self.admission.num_waiting == waiting <= self.config.max_waiting
        assert all(1.0 <= told <= self.config.max_retry_after_s for told in self.told)
        if not waiting:
            assert self.admission.backlog.tokens == 0
        elif not self.places:
            raise AssertionError("they wait, and nobody runs")


@settings(max_examples=120, deadline=None)
@given(
    max_running=st.integers(1, 4),
    max_waiting=st.integers(0, 6),
    limits=st.tuples(st.one_of(st.none(), st.integers(1, 1000)), st.one_of(st.none(), st.floats(0.0, 20.0))),
    acts=ACTS,
    last=st.sampled_from(["drain", "halt"]),
)
async def test_no_place_is_lost(max_running, max_waiting, limits, acts, last):
    config = AdmissionConfig(
        max_running, max_waiting, max_waiting_tokens=limits[0], max_wait_s=limits[1], ageing_turn=2
    )
    crowd = Crowd(config)
    for kind, who, more, asked in acts:
        inside = list(crowd.inside)
        pending = [visit for visit in crowd.visits if not visit.done()]
        match kind:
            case "come":
                crowd.come(*asked)
            case "end" if inside:
                crowd.inside[inside[who % len(inside)]].set()
            case "leave" if pending:
                pending[who % len(pending)].cancel()
            case "wait":
                await crowd.clock.advance(asked[3] / 3)
            case "end and leave" if inside:  # the permit comes in the same turn of the loop
                crowd.inside[inside[who % len(inside)]].set()
                await asyncio.sleep(0)
                for visit in [visit for visit in pending if visit not in inside][:more]:
                    visit.cancel()
        await settle()
        crowd.check()
    if last == "halt":
        crowd.admission.halt(Unavailable("stopping"))
    else:
        crowd.admission.close()
    for _ in range(len(crowd.visits) + 1):
        for leave in list(crowd.inside.values()):
            leave.set()
        await settle()
    async with asyncio.timeout(1):
        await crowd.admission.wait_idle()
    assert all(visit.done() for visit in crowd.visits)
    assert (crowd.admission.num_running, crowd.admission.num_waiting, crowd.admission.backlog.tokens) == (0, 0, 0)
    assert not any(visit.exception() for visit in crowd.visits if not visit.cancelled())
