"""Waiting that ends in a known state."""

import asyncio
import gc

import pytest

from contracts.clock import VirtualClock, settle
from contracts.errors import NoRoom, UnknownHandoff
from kv_transfer.endings import report, run_to_end, until_done, within


async def test_run_to_end_gives_the_result_or_the_error():
    async def work(fail):
        await asyncio.sleep(0)
        if fail:
            raise ValueError("no")
        return 5

    assert await run_to_end(asyncio.ensure_future(work(False)), lambda: None) == 5
    with pytest.raises(ValueError, match="no"):
        await run_to_end(asyncio.ensure_future(work(True)), lambda: None)


async def test_a_cancelled_caller_asks_once_to_stop_and_waits():
    end, stops = asyncio.Event(), []
    work = asyncio.ensure_future(end.wait())
    caller = asyncio.ensure_future(run_to_end(work, lambda: stops.append(1)))
    await settle()
    for _ in range(3):  # however often it is cancelled
        caller.cancel()
        await settle()
        assert not caller.done()
    assert stops == [1]
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.done()


async def test_work_that_was_cancelled_itself_is_not_asked_to_stop():
    work = asyncio.ensure_future(asyncio.sleep(100))
    caller = asyncio.ensure_future(run_to_end(work, lambda: pytest.fail("asked to stop")))
    await settle()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_until_done_swallows_what_became_of_the_work():
    async def fail():
        raise ValueError("nobody's business")

    await until_done(asyncio.ensure_future(fail()))
    gone = asyncio.ensure_future(asyncio.sleep(100))
    gone.cancel()
    await until_done(gone)


async def test_within_its_time_and_not():
    clock = VirtualClock()

    async def work(s):
        await clock.sleep(s)
        return "done"

    quick = asyncio.ensure_future(within(clock, 2.0, work(1.0)))
    slow = asyncio.ensure_future(within(clock, 2.0, work(3.0)))
    await clock.advance(2.5)
    assert await quick == "done"
    with pytest.raises(TimeoutError):
        await slow


async def test_within_hands_on_errors_and_cancellation_and_the_work_is_over():
    clock = VirtualClock()
    seen = []

    async def fail():
        raise NoRoom("none")

    async def stubborn():
        try:
            await clock.sleep(100)
        finally:
            seen.append("over")

    with pytest.raises(NoRoom):
        await within(clock, 1.0, fail())
    caller = asyncio.ensure_future(within(clock, 50.0, stubborn()))
    await settle()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert seen == ["over"]


async def test_report_tells_only_of_faults_that_are_ours():
    fatal = []

    async def end(error):
        if error:
            raise error

    for error in (None, NoRoom("a peer's"), KeyError("ours")):
        task = asyncio.ensure_future(end(error))
        report(task, fatal.append)
        await settle()
    task = asyncio.ensure_future(asyncio.sleep(100))
    report(task, fatal.append)
    task.cancel()
    await settle()
    assert [type(error) for error in fatal] == [KeyError]


async def test_what_failed_as_its_caller_left_is_not_reported_as_unseen():
    loop, unseen = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    answer = loop.create_future()

    async def work():
        return await answer

    caller = asyncio.ensure_future(within(VirtualClock(), 5.0, work()))
    await settle()
    answer.set_exception(UnknownHandoff("gone"))
    loop.call_soon(caller.cancel)  # in the turn in which the work ends, before its caller hears of it
    await asyncio.wait((caller,))
    assert caller.cancelled()
    caller = None  # with all that it holds
    gc.collect()
    await settle()
    assert not unseen
