"""The loop without a thread: same promises as the thread's, and its steps take time on a clock that is told what to do."""

import asyncio

import pytest

from contracts.clock import VirtualClock, settle
from contracts.errors import InvalidRequest, Unavailable
from contracts.request import FinishReason
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.fake import FakeRunner, expected_tokens
from engine.inline import InlineLoop

STEP_S = 0.5


class Rig:
    def __init__(self, model):
        self.clock = VirtualClock()
        self.engine = Engine(FakeRunner(model, 16), EngineConfig(), self.clock)
        self.outputs, self.fatal, self.started = [], [], []
        self.loop = InlineLoop(
            self.engine,
            self.hear,
            self.fatal.append,
            self.started.append,
            lambda output: STEP_S if output.deltas else 0,
        )

    def hear(self, output):
        self.outputs.append((self.clock.now(), output))

    def deltas(self):
        return [delta for _, output in self.outputs for delta in output.deltas]


@pytest.fixture
async def rig(model):
    rig = Rig(model)
    rig.loop.start()
    yield rig
    closing = asyncio.ensure_future(rig.loop.aclose())
    await rig.clock.advance(STEP_S)
    await closing


async def test_each_step_takes_its_time_on_the_clock(rig, make_request, model):
    request = make_request()
    await rig.loop.call(lambda engine: engine.admit(request))
    await rig.clock.advance(STEP_S * 5 - 0.01)
    assert len(rig.outputs) == 4
    await rig.clock.advance(0.02)
    assert [now for now, _ in rig.outputs] == [STEP_S * (i + 1) for i in range(5)]
    assert tuple(t for d in rig.deltas() for t in d.token_ids) == expected_tokens(request, model)
    assert rig.loop.progress.num_steps == 5
    assert not rig.loop.progress.busy
    assert not rig.fatal


async def test_commands_wait_for_the_running_step(rig, make_request):
    request = make_request()
    await rig.loop.call(lambda engine: engine.admit(request))
    await settle()
    aborting = asyncio.ensure_future(rig.loop.call(lambda engine: engine.abort(request.request_id)))
    await rig.clock.advance(STEP_S - 0.01)
    assert not aborting.done()
    assert rig.loop.progress.busy
    await rig.clock.advance(0.02)
    assert await aborting
    await rig.clock.advance(10)
    assert len(rig.outputs) == 1


async def test_an_idle_loop_wakes_for_a_deadline(rig, make_request):
    hog = await rig.loop.call(lambda engine: engine.reserve("hog", 64, ()))
    request = make_request(deadline_s=3.0)
    await rig.loop.call(lambda engine: engine.admit(request))
    await rig.clock.advance(2.9)
    assert not rig.outputs
    await rig.clock.advance(0.2 + STEP_S)
    assert rig.deltas()[-1].finish_reason is FinishReason.ERROR
    await rig.loop.call(lambda engine: engine.release(hog))


async def test_what_a_command_raises_is_its_callers(rig, make_request):
    with pytest.raises(InvalidRequest):
        await rig.loop.call(lambda engine: engine.admit(make_request(num_prompt=10_000)))
    assert not rig.fatal


async def test_a_result_that_nobody_takes_is_undone(rig):
    undone = []
    calling = asyncio.ensure_future(
        rig.loop.call(lambda engine: engine.reserve("r", 16, ()), lambda engine, lease: undone.append(lease))
    )
    await asyncio.sleep(0)
    rig.loop.post(lambda engine: calling.cancel())  # runs right after it, before its result is taken
    await settle()
    assert len(undone) == 1
    await rig.loop.call(lambda engine: engine.release(undone[0]))


async def test_a_fault_is_fatal_and_told_to_those_who_wait(rig):
    fault = ZeroDivisionError()

    def fail(engine):
        raise fault

    rig.loop.post(fail)
    with pytest.raises(Unavailable):
        await rig.loop.call(lambda engine: engine.load())
    assert rig.fatal == [fault]
    with pytest.raises(Unavailable):
        await rig.loop.call(lambda engine: engine.load())


async def test_after_its_end_nothing_runs(rig, make_request):
    await rig.loop.call(lambda engine: engine.admit(make_request()))
    await settle()
    closing = asyncio.ensure_future(rig.loop.aclose())
    waiting = asyncio.ensure_future(rig.loop.call(lambda engine: engine.load()))
    await rig.clock.advance(STEP_S)
    await closing
    with pytest.raises(Unavailable):
        await waiting
    rig.loop.post(lambda engine: rig.fatal.append("ran"))
    await rig.clock.advance(10)
    assert len(rig.outputs) == 1
    assert not rig.fatal
