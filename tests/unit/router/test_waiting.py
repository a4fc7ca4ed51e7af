"""Requests that wait for workers: woken by what changes, looked for once however many they are, nothing left when they go."""

import asyncio

import pytest

from contracts.clock import VirtualClock, settle
from router.halt import Halt
from router.serving.waiting import LOOK_S, Waiting


class World:
    def __init__(self):
        self.clock, self.halt = VirtualClock(), Halt()
        self.offer, self.num_looks = ("nobody",), 0
        self.waiting = Waiting(self._look, self.clock, self.halt)

    def _look(self):
        self.num_looks += 1
        return self.offer

    async def waits(self, count, at_most_s=60.0):
        tasks = [asyncio.ensure_future(self.waiting.news(at_most_s)) for _ in range(count)]
        await settle()
        return tasks


@pytest.fixture
async def world():
    return World()


async def test_a_look_finds_what_has_changed_and_wakes_all(world):
    tasks = await world.waits(3)
    await world.clock.advance(1.0)
    assert not any(task.done() for task in tasks), "nothing has changed"
    world.offer = ("a",)
    await world.clock.advance(LOOK_S)
    assert all(task.done() for task in tasks)


async def test_who_is_told_need_not_wait_for_a_look(world):
    tasks = await world.waits(2)
    world.offer = ("a",)
    world.waiting.look()
    await settle()
    assert all(task.done() for task in tasks)


async def test_a_hundred_that_wait_cost_one_look(world):
    tasks = await world.waits(100)
    before = world.num_looks
    await world.clock.advance(1.0)
    assert world.num_looks - before == pytest.approx(1.0 / LOOK_S, abs=1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("end", ["change", "cancel", "time"])
async def test_nobody_looks_when_nobody_waits(world, end):
    tasks = await world.waits(2, at_most_s=0.5)
    if end == "cancel":
        for task in tasks:
            task.cancel()
    elif end == "change":
        world.offer = ("a",)
    await world.clock.advance(0.5)
    assert all(task.done() for task in tasks)
    before = world.num_looks
    await world.clock.advance(10.0)
    assert world.num_looks == before
    assert not world.clock.skip(), "no timer is left"


async def test_each_goes_when_its_own_time_is_over(world):
    (short,), (long,) = await world.waits(1, at_most_s=0.3), await world.waits(1)
    await world.clock.advance(0.3)
    assert (short.done(), long.done()) == (True, False)
    world.halt.now()
    await settle()
    assert long.done(), "the router goes down"


async def test_what_changes_and_changes_back_between_two_looks_wakes_who_saw_it(world):
    (early,) = await world.waits(1)
    world.offer = ("a",)
    (late,) = await world.waits(1)
    assert early.done(), "whoever comes finds it for all"
    world.offer = ("nobody",)
    await world.clock.advance(LOOK_S)
    assert late.done()
