"""Permits are given once, in order, within bounds, and come back however a request ends."""

import asyncio
from dataclasses import replace

import pytest

from contracts.clock import VirtualClock, settle
from contracts.errors import DeadlineExceeded, Overloaded, RateLimited, Unavailable
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.admission.capacity import FIRST_PLACES, places_for
from router.admission.permits import Admission, Demand
from router.caller import ANYBODY, Caller
from router.config import AdmissionConfig

LAYOUT = KVLayout("m", "float16", num_layers=1, num_kv_heads=1, head_size=64, block_size=16)


class Door:
    def __init__(self, max_running=1, max_waiting=2, **config):
        self.clock = VirtualClock()
        self.shed = []
        self.admission = Admission(AdmissionConfig(max_running, max_waiting, **config), self.clock, self.shed.append)
        self.entered = []

    def knock(self, name, priority=0, deadline=1e9, num_answers=1, caller=ANYBODY, tokens=1.0):
        """A request that stays until its event is set."""
        leave = asyncio.Event()
        demand = Demand(deadline=deadline, caller=caller, priority=priority, num_answers=num_answers, tokens=tokens)

        async def visit():
            async with self.admission.permit(demand) as permit:
                self.entered.append(name)
                await leave.wait()
                permit.tokens = tokens

        return asyncio.create_task(visit()), leave

    async def learn(self, seconds, tokens=1.0):
        """Let it see what requests of so many tokens take."""
        for _ in range(4):
            visit, leave = self.knock("learn", tokens=tokens)
            await self.clock.advance(seconds)
            leave.set()
            await visit
        self.entered.clear()


async def test_bounds_and_order_of_arrival():
    door = Door()
    visits = [door.knock(name) for name in "abc"]
    await settle()
    assert (door.admission.num_running, door.admission.num_waiting) == (1, 2)
    with pytest.raises(Overloaded) as full:
        async with door.admission.permit(Demand(deadline=100.0)):
            pass
    assert full.value.retry_after_s >= 1
    for _, leave in visits:
        leave.set()
        await settle()
    assert door.entered == ["a", "b", "c"]
    assert (door.admission.num_running, door.admission.num_waiting) == (0, 0)


async def test_lower_priority_runs_first():
    door = Door(max_waiting=3)
    visits = [door.knock(name, priority) for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5))]
    await settle()
    for _, leave in visits:
        leave.set()
    await settle()
    assert door.entered == ["a", "c", "b", "d"]


async def test_a_deadline_in_the_queue():
    door = Door()
    _, leave = door.knock("a")
    await settle()
    late, _ = door.knock("late", deadline=3.0)
    patient, _ = door.knock("patient")
    await door.clock.advance(3.5)
    with pytest.raises(DeadlineExceeded):
        await late
    leave.set()
    await settle()
    assert door.entered == ["a", "patient"]
    patient.cancel()
    await settle()
    assert door.admission.num_running == 0


async def test_who_gives_up_in_the_queue_or_inside_leaves_nothing_behind():
    door = Door()
    first, _leave = door.knock("a")
    waiting, _ = door.knock("b")
    await settle()
    waiting.cancel()
    await settle()
    assert door.admission.num_waiting == 0
    first.cancel()
    await settle()
    assert door.admission.num_running == 0
    third, _ = door.knock("c")
    await settle()
    assert door.entered == ["a", "c"]
    third.cancel()
    await settle()


async def test_a_permit_that_comes_while_its_client_leaves_is_not_lost():
    door = Door()
    _, leave = door.knock("a")
    second, _ = door.knock("b")
    third, _ = door.knock("c")
    await settle()
    leave.set()
    await asyncio.sleep(0)
    assert door.admission.num_waiting == 1, "a has left, b has its permit"
    assert door.entered == ["a"], "but has not run"
    second.cancel()
    await settle()
    assert door.entered[-1] == "c"
    third.cancel()
    await settle()
    assert (door.admission.num_running, door.admission.num_waiting) == (0, 0)


async def test_closing_lets_those_who_wait_finish():
    door = Door()
    visits = [door.knock(name) for name in "ab"]
    await settle()
    door.admission.close()
    with pytest.raises(Unavailable):
        async with door.admission.permit(Demand(deadline=100.0)):
            pass
    idle = asyncio.create_task(door.admission.wait_idle())
    for _, leave in visits:
        await settle()
        assert not idle.done()
        leave.set()
    await idle
    assert door.entered == ["a", "b"]


async def test_a_request_of_several_answers_gets_all_its_places_at_once():
    door = Door(max_running=3, max_waiting=9)
    visits = {name: door.knock(name, num_answers=n) for name, n in (("a", 2), ("b", 2), ("c", 1), ("d", 500))}
    await settle()
    assert door.entered == ["a"], "b has no room yet, and nobody overtakes it"
    assert (door.admission.num_running, door.admission.num_waiting) == (2, 3)
    visits["a"][1].set()
    await settle()
    assert door.entered == ["a", "b", "c"]
    assert door.admission.num_running == 3
    for name in "bc":
        visits[name][1].set()
        await settle()
    assert door.entered == ["a", "b", "c", "d"], "more than there are places takes them all"
    assert door.admission.num_running == 3
    visits["d"][1].set()
    await door.admission.wait_idle()


@pytest.mark.parametrize("how", ["leaves", "is late"])
async def test_a_large_request_that_gives_up_lets_those_behind_it_in(how):
    door = Door(max_running=3)
    first, leave = door.knock("a", num_answers=2)
    large, _ = door.knock("large", num_answers=3, deadline=3.0 if how == "is late" else 1e9)
    await settle()
    small, small_leave = door.knock("small")
    await settle()
    assert door.entered == ["a"]
    if how == "leaves":
        large.cancel()
        await settle()
    else:
        await door.clock.advance(3.5)
        with pytest.raises(DeadlineExceeded):
            await large
        await settle()
    assert door.entered == ["a", "small"]
    leave.set()
    small_leave.set()
    await first
    await small
    assert (door.admission.num_running, door.admission.num_waiting) == (0, 0)


async def test_a_better_priority_does_not_wait_for_a_large_request_that_has_no_room():
    door = Door(max_running=3)
    visits = [door.knock("a", num_answers=2), door.knock("large", num_answers=3)]
    await settle()
    visits.append(door.knock("urgent", priority=-1))
    await settle()
    assert door.entered == ["a", "urgent"]
    for _, leave in visits:
        leave.set()
    await door.admission.wait_idle()
    await settle()
    assert door.entered == ["a", "urgent", "large"]


async def test_places_follow_what_the_workers_run():
    door = Door(max_running=None, max_waiting=20)
    assert door.admission.num_places == FIRST_PLACES
    door.admission.resize(2)
    visits = {name: door.knock(name) for name in "abcd"}
    large = door.knock("large", num_answers=7)
    await settle()
    assert door.entered == ["a", "b"]
    door.admission.resize(3)
    await settle()
    assert door.entered == ["a", "b", "c"], "room that comes is used at once"
    door.admission.resize(2)
    door.admission.resize(0)
    visits["a"][1].set()
    await settle()
    assert (door.admission.num_running, door.entered) == (2, ["a", "b", "c"]), "more ran than now may"
    for name in "bcd":
        visits[name][1].set()
        await settle()
    assert (door.admission.num_running, door.entered[-1]) == (2, "large"), "as many as there are, not as there were"
    door.admission.resize(5)
    small, leave = door.knock("small")
    await settle()
    assert (door.admission.num_running, door.entered[-1]) == (3, "small")
    for done in (large[1], leave):
        done.set()
    await door.admission.wait_idle()
    await small
    set_by_hand = Door(max_running=7).admission
    set_by_hand.resize(9)
    assert set_by_hand.num_places == 7


def test_the_places_of_workers_are_a_quarter_more_than_they_run_at_once():
    info = WorkerInfo(WorkerRef("a", 1), WorkerKind.DECODE, "h:1", "m", LAYOUT, ("local",), 1024, 64, max_num_seqs=8)
    assert places_for([info, replace(info, max_num_seqs=1)]) == 10 + 2
    assert places_for([]) == 0
    assert places_for([replace(info, max_num_seqs=0)]) == 256, "one that does not say it"


async def refusal(visit):
    with pytest.raises(Overloaded) as caught:
        await visit
    return caught.value


async def test_a_thousand_requests_of_one_key_do_not_delay_the_one_of_another():
    door = Door(max_running=2, max_waiting=2000)
    heavy = [door.knock(f"a{i}", caller=Caller(name="a"), tokens=100) for i in range(1000)]
    await settle()
    light = door.knock("b", caller=Caller(name="b"), tokens=100)
    visits = [*heavy, light]
    for _, leave in heavy:
        leave.set()
        await settle()
        if "b" in door.entered:
            break
    assert door.entered.index("b") <= 4
    for _, leave in visits:
        leave.set()
    await door.admission.wait_idle()
    assert len(door.entered) == 1001


async def test_nobody_is_let_in_at_a_better_priority_than_its_key_allows():
    door = Door(max_waiting=9)
    visits = [door.knock("a"), door.knock("b")]
    visits.append(door.knock("clamped", priority=-5, caller=Caller(name="c", best_priority=3)))
    visits.append(door.knock("says nothing of it", priority=-(2**31), caller=Caller(name="d")))
    visits.append(door.knock("granted", priority=-5, caller=Caller(name="e", best_priority=-5)))
    await settle()
    for _, leave in visits:
        leave.set()
    await door.admission.wait_idle()
    assert door.entered == ["a", "granted", "b", "says nothing of it", "clamped"]


async def test_a_full_queue_still_has_room_for_who_asks_little():
    door = Door(max_waiting=3)
    heavy = [door.knock(f"a{i}", caller=Caller(name="a")) for i in range(4)]
    await settle()
    light, leave = door.knock("b", caller=Caller(name="b"))
    pushed_out = await refusal(heavy[-1][0])
    assert "others have a better right" in pushed_out.message
    assert door.admission.num_waiting == 3
    again, _ = door.knock("a4", caller=Caller(name="a"))
    assert "which is the limit" in (await refusal(again)).message
    assert door.shed == ["pushed_out", "full"]
    leave.set()
    for _, done in heavy:
        done.set()
    await door.admission.wait_idle()
    await light
    assert door.entered == ["a0", "b", "a1", "a2"] or door.entered == ["a0", "a1", "b", "a2"]


async def test_a_better_class_does_not_fill_the_queue_either():
    """A key that may go before others has most of the places to wait; who waits behind it makes no room for more of that."""
    door = Door(max_waiting=4)
    first = Caller(name="first", best_priority=-5)
    heavy = [door.knock(f"a{i}", priority=-5, caller=first) for i in range(3)]
    await settle()
    light, leave = door.knock("light", priority=5, caller=Caller(name="b"))
    others = [door.knock("c", caller=Caller(name="c"))]
    await settle()
    assert door.admission.num_waiting == 4
    again = await refusal(door.knock("a3", priority=-5, caller=first)[0])
    assert "which is the limit" in again.message
    equal, equal_leave = door.knock("d", priority=0, caller=Caller(name="d"))
    assert "a better right" in (await refusal(light)).message, "of equals the worse class makes room"
    for _, done in (*heavy, *others, (equal, equal_leave)):
        done.set()
    leave.set()
    await door.admission.wait_idle()
    assert door.entered == ["a0", "a1", "a2", "c", "d"]


async def test_a_better_priority_pushes_a_worse_one_out_and_never_the_other_way():
    door = Door(max_waiting=1)
    _, leave = door.knock("running")
    worse, _ = door.knock("worse", priority=5)
    await settle()
    better, better_leave = door.knock("better", priority=1)
    await refusal(worse)
    third, _ = door.knock("third", priority=5, caller=Caller(name="other"))
    await refusal(third)
    leave.set()
    better_leave.set()
    await better


async def test_who_is_sent_away_is_told_when_the_queue_has_moved_and_each_a_later_time():
    door = Door(max_running=2, max_waiting=4)
    await door.learn(10.0, tokens=100)
    visits = [door.knock(str(i), tokens=100) for i in range(6)]
    await settle()
    assert door.admission.backlog.wait_s == pytest.approx(20.0, rel=0.01), "four of 10 s on two places"
    told = [(await refusal(door.knock("late", tokens=100)[0])).retry_after_s for _ in range(12)]
    assert told[:3] == [pytest.approx(20.0), pytest.approx(25.0), pytest.approx(30.0)]
    assert told == sorted(told)
    assert told[-1] == 60.0, "and nobody is sent away for ever"
    for _, leave in visits:
        leave.set()
    await door.admission.wait_idle()


async def test_who_comes_again_and_again_makes_only_itself_wait():
    door = Door(max_running=1, max_waiting=2)
    await door.learn(10.0, tokens=100)
    quiet, other = Caller(name="quiet"), Caller(name="other")
    names = ("runs", ANYBODY), ("b", quiet), ("c", other)
    visits = [door.knock(name, caller=caller, tokens=100) for name, caller in names]
    await settle()
    hammering = [door.knock("again", caller=quiet, tokens=100)[0] for _ in range(9)]
    assert [(await refusal(visit)).retry_after_s for visit in hammering][-1] == 60.0
    told = [(await refusal(door.knock("d", caller=other, tokens=100)[0])).retry_after_s for _ in range(2)]
    assert told == [pytest.approx(20.0), pytest.approx(30.0)], (
        "when the queue has moved, as if the other were not there"
    )
    for _, leave in visits:
        leave.set()
    await door.admission.wait_idle()


async def test_when_workers_have_no_room_is_no_sooner_than_they_serve_one():
    door = Door(max_running=2, max_waiting=4)
    await door.learn(10.0, tokens=100)
    told = []
    for name in ("quiet", "quiet", "other"):
        with pytest.raises(Overloaded) as caught:
            async with door.admission.permit(Demand(deadline=1e9, caller=Caller(name=name), tokens=100)):
                raise Overloaded("1024 requests wait, the queue takes 1024")
        told.append(caught.value.retry_after_s)
    assert told == [pytest.approx(10.0, rel=0.1), pytest.approx(15.0, rel=0.1), pytest.approx(10.0, rel=0.1)]
    with pytest.raises(RateLimited) as limited:
        async with door.admission.permit(Demand(deadline=1e9)):
            raise RateLimited("not a worker's", 3.0, {})
    assert limited.value.retry_after_s == 3.0


async def test_who_cannot_be_in_time_is_told_so_at_once():
    door = Door(max_running=1, max_waiting=9)
    await door.learn(10.0, tokens=100)
    visits = [door.knock(str(i), tokens=100) for i in range(3)]
    await settle()
    now = door.clock.now()
    late, _ = door.knock("late", deadline=now + 49.0, tokens=100)
    error = await refusal(late)
    assert "20.0 s of waiting" in error.message
    assert error.retry_after_s == pytest.approx(1.0)
    visits.append(door.knock("in time", deadline=now + 51.0, tokens=100))
    await settle()
    assert door.admission.num_waiting == 3
    small, _ = door.knock("small", deadline=now + 5.0, tokens=1)
    await refusal(small)
    assert door.shed == ["deadline", "deadline"]
    for _, leave in visits:
        leave.set()
    await door.admission.wait_idle()


async def test_a_longer_wait_than_the_limit_is_refused():
    door = Door(max_running=1, max_waiting=9, max_wait_s=15.0)
    await door.learn(10.0)
    visits = [door.knock(str(i)) for i in range(3)]
    await settle()
    error = await refusal(door.knock("fourth")[0])
    assert "15 s is the limit" in error.message
    assert error.retry_after_s == pytest.approx(5.0)
    for _, leave in visits:
        leave.set()
    await door.admission.wait_idle()


async def test_nobody_waits_longer_than_the_limit_whatever_was_expected():
    """Nothing is known yet of what requests take, so that all are let wait; who has a shorter time hears that it ran out."""
    door = Door(max_running=1, max_waiting=9, max_wait_s=15.0)
    _, leave = door.knock("runs for ever")
    late, _ = door.knock("late", deadline=14.0)
    waits, _ = door.knock("waits", num_answers=5)
    await settle()
    await door.clock.advance(14.5)
    with pytest.raises(DeadlineExceeded):
        await late
    assert not waits.done()
    await door.clock.advance(1.0)
    assert "waited for 15.0 s, and 15 s is the limit" in (await refusal(waits)).message
    assert (door.shed, door.admission.num_waiting) == (["wait"], 0)
    leave.set()
    await door.admission.wait_idle()


async def test_those_that_wait_are_bounded_in_tokens():
    door = Door(max_running=1, max_waiting=9, max_waiting_tokens=100)
    visits = [door.knock("runs"), door.knock("huge", tokens=500, caller=Caller(name="a"))]
    await settle()
    assert door.admission.num_waiting == 1, "one alone may wait, whatever its size"
    error = await refusal(door.knock("more", tokens=1, caller=Caller(name="a"))[0])
    assert "about 500 tokens" in error.message
    for _, leave in visits:
        leave.set()
    await door.admission.wait_idle()
    assert door.shed == ["full_tokens"]


async def test_an_idle_router_lets_everybody_try():
    door = Door()
    await door.learn(10.0, tokens=1.0)
    visit, leave = door.knock("large", deadline=door.clock.now() + 1.0, tokens=1000.0)
    await settle()
    leave.set()
    await visit
    assert door.entered == ["large"]
