"""The virtual clock moves only when told and wakes sleepers in the order of their deadlines."""

import asyncio

import pytest

from contracts.clock import MonotonicClock, VirtualClock, settle


async def test_sleepers_wake_in_order_at_their_own_instants():
    clock, woken = VirtualClock(), []

    async def sleeper(delay):
        await clock.sleep(delay)
        woken.append((delay, clock.now()))

    tasks = [asyncio.create_task(sleeper(delay)) for delay in (3.0, 1.0, 2.0)]
    await clock.advance(0.5)
    assert woken == []
    await clock.advance(2.0)
    assert woken == [(1.0, 1.0), (2.0, 2.0)]
    await clock.advance(1.0)
    await asyncio.gather(*tasks)
    assert woken[-1] == (3.0, 3.0)
    assert clock.now() == 3.5


async def test_a_chain_of_sleeps_runs_within_one_advance():
    clock, ticks = VirtualClock(), []

    async def ticker():
        for _ in range(3):
            await clock.sleep(1.0)
            ticks.append(clock.now())

    task = asyncio.create_task(ticker())
    await clock.advance(0.0)
    await clock.advance(5.0)
    await task
    assert ticks == [1.0, 2.0, 3.0]


async def test_a_cancelled_sleeper_does_no_harm():
    clock = VirtualClock()
    task = asyncio.create_task(clock.sleep(1.0))
    await clock.advance(0.0)
    task.cancel()
    await clock.advance(2.0)
    assert task.cancelled()


async def test_zero_sleep_yields_on_both_clocks():
    await VirtualClock().sleep(0)
    clock = MonotonicClock()
    before = clock.now()
    await clock.sleep(0)
    assert clock.now() >= before


async def test_skipping_goes_from_sleeper_to_sleeper():
    clock, woken = VirtualClock(), []

    async def sleeper(delay):
        await clock.sleep(delay)
        woken.append(clock.now())

    tasks = [asyncio.create_task(sleeper(delay)) for delay in (1.0, 2.0, 3.0)]
    await settle()
    tasks[1].cancel()
    assert clock.skip()
    await settle()
    assert (woken, clock.now()) == ([1.0], 1.0)
    assert clock.skip(0.5)
    assert (woken, clock.now()) == ([1.0], 1.5)
    assert clock.skip(1.5)
    await settle()
    assert woken == [1.0, 3.0]
    assert not clock.skip()
    assert clock.now() == 3.0
    assert not clock.skip(1.0)
    assert clock.now() == 4.0


async def test_who_is_called_later_is_called_at_its_instant_among_sleepers_and_once():
    clock, called = VirtualClock(), []

    async def sleeper():
        await clock.sleep(2.0)
        called.append(("slept", clock.now()))

    task = asyncio.create_task(sleeper())
    await settle()
    for delay in (3.0, 1.0, 2.0):
        clock.call_later(delay, lambda delay=delay: called.append((delay, clock.now())))
    silenced = clock.call_later(1.5, lambda: called.append("silenced"))
    silenced()
    await clock.advance(10.0)
    await task
    assert called == [(1.0, 1.0), ("slept", 2.0), (2.0, 2.0), (3.0, 3.0)]
    silenced()


async def test_skipping_calls_who_is_due_and_passes_by_who_was_silenced():
    clock, called = VirtualClock(), []
    clock.call_later(1.0, lambda: called.append(1))()
    clock.call_later(2.0, lambda: called.append(2))
    assert clock.skip()
    assert (called, clock.now()) == ([2], 2.0)
    assert not clock.skip()


@pytest.mark.parametrize("clock", [VirtualClock(), MonotonicClock()])
async def test_at_once_is_the_next_turn_on_both_clocks(clock):
    called = []
    clock.call_later(0, lambda: called.append("rung"))
    clock.call_later(0, lambda: called.append("silenced"))()
    assert called == []
    await settle()
    assert called == ["rung"]
