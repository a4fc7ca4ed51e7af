"""The engine thread: commands between steps, sleep when idle, faults said aloud, nobody left waiting."""

import asyncio
import math
import threading
from contextlib import contextmanager

import pytest

from contracts.clock import MonotonicClock, VirtualClock
from contracts.errors import InvalidRequest, Unavailable
from contracts.request import FinishReason
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.fake import FakeRunner, expected_tokens
from engine.loop import EngineLoop, LoopProgress


class Gate(FakeRunner):
    """A runner whose steps can be held up."""

    def __init__(self, model):
        super().__init__(model, 16)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def execute(self, batch):
        self.entered.set()
        assert self.open.wait(10)
        return super().execute(batch)


class Rig:
    def __init__(self, model):
        self.runner = Gate(model)
        self.engine = Engine(self.runner, EngineConfig(), MonotonicClock())
        self.outputs = []
        self.fatal = []
        self.fatal_seen = threading.Event()
        self.started = []
        self.event_loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self.loop = EngineLoop(self.engine, self.on_output, self.on_fatal, self.started.append)

    def on_output(self, output):
        assert threading.current_thread().name == "engine"
        self.outputs.append(output)
        self.event_loop.call_soon_threadsafe(self.news.set)

    def on_fatal(self, error):
        self.fatal.append(error)
        self.event_loop.call_soon_threadsafe(self.news.set)

    def deltas(self):
        return [delta for output in self.outputs for delta in output.deltas]

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                await self.news.wait()
                self.news.clear()


@pytest.fixture
async def rig(model):
    rig = Rig(model)
    rig.loop.start()
    yield rig
    rig.runner.open.set()
    rig.loop.stop()


async def test_a_request_runs_to_its_end(rig, make_request, model):
    request = make_request()
    await rig.loop.call(lambda engine: engine.admit(request))
    await rig.until(lambda: rig.deltas() and rig.deltas()[-1].finish_reason)
    assert tuple(t for d in rig.deltas() for t in d.token_ids) == expected_tokens(request, model)
    assert rig.loop.progress.num_steps == 5
    assert not rig.fatal


async def test_started_is_told_before_the_first_chunk_is_computed(rig, make_request):
    rig.runner.open.clear()
    await rig.loop.call(lambda engine: engine.admit(make_request(), retain_kv=True))
    await asyncio.to_thread(rig.runner.entered.wait, 10)
    assert rig.started == [("r",)]
    assert not rig.outputs


async def test_errors_of_a_call_are_its_callers(rig, make_request):
    with pytest.raises(InvalidRequest):
        await rig.loop.call(lambda engine: engine.admit(make_request(num_prompt=0)))
    with pytest.raises(ZeroDivisionError):
        await rig.loop.call(lambda engine: 1 / 0)
    assert await rig.loop.call(lambda engine: engine.has_work) is False
    assert not rig.fatal


async def test_it_sleeps_while_all_work_waits_for_blocks_held_outside(rig, make_request):
    def fill_then_admit(engine):
        lease = engine.reserve("h", 64, ())
        engine.admit(make_request())
        return lease

    lease = await rig.loop.call(fill_then_admit)
    await rig.loop.call(lambda engine: None)
    num_steps = rig.loop.progress.num_steps
    assert num_steps <= 2, "one look after each command, then sleep"
    assert not rig.outputs
    await rig.loop.call(lambda engine: engine.release(lease))
    await rig.until(lambda: rig.deltas() and rig.deltas()[-1].finish_reason)


async def test_a_deadline_wakes_it(rig, make_request):
    def fill_then_admit(engine):
        engine.reserve("h", 64, ())
        engine.admit(make_request(deadline_s=0.02))

    await rig.loop.call(fill_then_admit)
    await rig.until(lambda: rig.deltas())
    assert rig.deltas()[0].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("deadline_s", [1e10, 1e300, math.inf])
async def test_a_deadline_beyond_what_a_thread_can_wait_for_ends_nothing(rig, make_request, deadline_s):
    def fill_then_admit(engine):
        lease = engine.reserve("elsewhere", 64, ())
        engine.admit(make_request(deadline_s=deadline_s))
        return lease

    lease = await rig.loop.call(fill_then_admit)
    await rig.loop.call(lambda engine: None)  # after a step in which nothing could run: now it waits for the deadline
    await rig.loop.call(lambda engine: engine.release(lease))
    await rig.until(lambda: rig.fatal or (rig.deltas() and rig.deltas()[-1].finish_reason))
    assert not rig.fatal


async def test_a_fault_in_a_step_is_fatal_and_nobody_is_left_waiting(rig, make_request, monkeypatch):
    rig.runner.open.clear()
    rig.loop.post(lambda engine: engine.admit(make_request()))
    await asyncio.to_thread(rig.runner.entered.wait, 10)
    waiting = [asyncio.create_task(rig.loop.call(lambda engine: 1)) for _ in range(2)]
    await asyncio.sleep(0)
    rig.runner._rule = None  # a bug, put there by hand
    rig.runner.open.set()
    await rig.until(lambda: rig.fatal)
    assert isinstance(rig.fatal[0], AttributeError)
    for task in waiting:
        with pytest.raises(Unavailable):
            await task
    with pytest.raises(Unavailable):
        await rig.loop.call(lambda engine: 1)
    assert not rig.loop.progress.busy


async def test_a_fault_in_a_posted_command_is_fatal_and_later_commands_are_told(rig, make_request):
    rig.runner.open.clear()
    rig.loop.post(lambda engine: engine.admit(make_request()))
    await asyncio.to_thread(rig.runner.entered.wait, 10)
    rig.loop.post(lambda engine: 1 / 0)
    later = asyncio.create_task(rig.loop.call(lambda engine: 1))
    await asyncio.sleep(0)
    rig.runner.open.set()
    with pytest.raises(Unavailable):
        await later
    await rig.until(lambda: rig.fatal)
    assert isinstance(rig.fatal[0], ZeroDivisionError)


async def test_broken_books_are_found_when_it_goes_idle(rig, make_request):
    def leak(engine):
        engine._kv.lease("leaked", 4, (), 0)
        engine.admit(make_request())

    await rig.loop.call(leak)
    await rig.until(lambda: rig.fatal)
    assert "leases live" in str(rig.fatal[0])


async def test_broken_books_are_found_while_it_is_idle(rig, monkeypatch):
    """Nothing runs and nothing ends: a lease that nobody owns came by a command."""
    looks, look = [], rig.engine.check_integrity

    def noted():
        looks.append(look())
        rig.event_loop.call_soon_threadsafe(rig.news.set)

    monkeypatch.setattr(rig.engine, "check_integrity", noted)
    loop = EngineLoop(rig.engine, rig.on_output, rig.on_fatal, idle_check_s=0.02)
    loop.start()
    await loop.call(lambda engine: engine.reserve("h", 16, ()))
    await rig.until(lambda: len(looks) >= 3)
    assert not rig.fatal, "a lease that is lent out is no fault"
    await loop.call(lambda engine: engine._kv.lease("nobody", 16, (), 0))
    await rig.until(lambda: rig.fatal)
    assert "leases live" in str(rig.fatal[0])
    with pytest.raises(Unavailable):
        await loop.call(lambda engine: None)
    loop.stop()


async def test_looking_at_the_books_takes_a_small_share_of_the_time(model, monkeypatch):
    clock = VirtualClock()
    engine = Engine(FakeRunner(model, 16), EngineConfig(), clock)
    loop = EngineLoop(engine, print, print, idle_check_s=5.0)
    for took_s, next_at in ((0.0, 5.0), (0.01, 5.01), (0.2, 20.21)):
        monkeypatch.setattr(engine, "check_integrity", lambda took_s=took_s: clock.skip(took_s))
        loop._check_books()
        assert loop._check_at == pytest.approx(next_at)


@contextmanager
def held(rig):
    """Hold the engine thread inside a command."""
    go, inside = threading.Event(), threading.Event()

    def hold(engine):
        inside.set()
        assert go.wait(10)

    rig.loop.post(hold)
    assert inside.wait(10)
    yield
    go.set()


async def test_a_call_cancelled_before_its_turn_does_not_run(rig):
    ran = []
    with held(rig):
        task = asyncio.create_task(rig.loop.call(ran.append))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await rig.loop.call(lambda engine: None)
    assert ran == []


async def test_the_lease_of_a_call_cancelled_in_its_turn_is_undone(rig):
    go, inside = threading.Event(), threading.Event()

    def reserve(engine):
        lease = engine.reserve("h", 64, ())
        inside.set()
        assert go.wait(10)
        return lease

    task = asyncio.create_task(rig.loop.call(reserve, undo=lambda engine, lease: engine.release(lease)))
    await asyncio.to_thread(inside.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    await rig.loop.call(lambda engine: None)
    await asyncio.sleep(0)
    assert (await rig.loop.call(lambda engine: engine.load())).kv_usage == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_a_call_cancelled_with_its_answer_on_the_way(rig, fails):
    """The answer has arrived, but the caller is cancelled before it runs again."""
    answered = threading.Event()

    def reserve(engine):
        lease = engine.reserve("h", 64, ())
        if fails:
            engine.release(lease)
            raise ZeroDivisionError
        return lease

    with held(rig):
        task = asyncio.create_task(rig.loop.call(reserve, undo=lambda engine, lease: engine.release(lease)))
        await asyncio.sleep(0)
        rig.loop.post(lambda engine: answered.set())
    assert answered.wait(10)  # this holds up the event loop, so that the next line comes right behind the answer
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await rig.loop.call(lambda engine: engine.load())).kv_usage == 0


async def test_a_call_cancelled_in_its_turn_that_owns_nothing_needs_no_undo(rig):
    ran = threading.Event()
    with held(rig):
        task = asyncio.create_task(rig.loop.call(lambda engine: ran.set()))
        await asyncio.sleep(0)
    assert ran.wait(10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.loop.call(lambda engine: None)
    assert not rig.fatal


async def test_a_cancelled_caller_is_not_told_that_the_loop_has_ended(rig):
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: rig.fatal.append(context))
    with held(rig):
        task = asyncio.create_task(rig.loop.call(lambda engine: 1))
        await asyncio.sleep(0)
        stopper = threading.Thread(target=rig.loop.stop)
        stopper.start()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(stopper.join, 10)
    await asyncio.sleep(0)
    assert not rig.fatal


async def test_the_error_of_a_call_whose_caller_left_is_heard(rig):
    heard = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.set_result(context["exception"]))
    go, inside = threading.Event(), threading.Event()

    def fail(engine):
        inside.set()
        assert go.wait(10)
        return 1 / 0

    task = asyncio.create_task(rig.loop.call(fail))
    await asyncio.to_thread(inside.wait, 10)
    task.cancel()
    go.set()
    assert isinstance(await asyncio.wait_for(heard, 10), ZeroDivisionError)


async def test_stop_tells_those_who_wait_and_is_idempotent(rig):
    with held(rig):
        waiting = asyncio.create_task(rig.loop.call(lambda engine: 1))
        await asyncio.sleep(0)
        stopper = threading.Thread(target=rig.loop.stop)
        stopper.start()
        while not rig.loop._stopping:
            await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await waiting
    stopper.join(10)
    rig.loop.stop()
    rig.loop.post(lambda engine: 1 / 0)
    assert not rig.fatal


async def test_stop_before_start_is_clean(model):
    rig = Rig(model)
    rig.loop.stop()
    with pytest.raises(Unavailable):
        await rig.loop.call(lambda engine: 1)


async def test_a_step_that_hangs_is_visible_and_sleep_is_not(rig, make_request):
    rig.runner.open.clear()
    await rig.loop.call(lambda engine: engine.admit(make_request()))
    await asyncio.to_thread(rig.runner.entered.wait, 10)
    progress = rig.loop.progress
    assert progress.stalled_s(progress.last_progress_s + 30) == 30
    assert LoopProgress(3, 1.0, busy=False).stalled_s(99.0) == 0.0
