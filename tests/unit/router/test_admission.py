"""Permits are given once, in order, within bounds, and come back however a request ends."""

import asyncio

import pytest

from contracts.clock import VirtualClock, settle
from contracts.errors import DeadlineExceeded, Overloaded, Unavailable
from router.admission import Admission
from router.config import AdmissionConfig


class Door:
    def __init__(self, max_running=1, max_waiting=2):
        self.clock = VirtualClock()
        self.admission = Admission(AdmissionConfig(max_running, max_waiting), self.clock)
        self.entered = []

    def knock(self, name, priority=0, deadline=100.0, num_answers=1):
        """A request that stays until its event is set."""
        leave = asyncio.Event()

        async def visit():
            async with self.admission.permit(priority, deadline, num_answers):
                self.entered.append(name)
                await leave.wait()

        return asyncio.create_task(visit()), leave


async def test_bounds_and_order_of_arrival():
    door = Door()
    visits = [door.knock(name) for name in "abc"]
    await settle()
    assert (door.admission.num_running, door.admission.num_waiting) == (1, 2)
    with pytest.raises(Overloaded) as full:
        async with door.admission.permit(0, 100.0):
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
    await asyncio.sleep(0)  # a has left, b has its permit but has not run
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
        async with door.admission.permit(0, 100.0):
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
    large, _ = door.knock("large", num_answers=3, deadline=3.0 if how == "is late" else 100.0)
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
