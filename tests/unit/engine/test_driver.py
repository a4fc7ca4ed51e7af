"""An engine's thread as a service sees it: news on the event loop in order, death as a future, load without waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest

from contracts.clock import Clock, MonotonicClock, VirtualClock
from contracts.errors import Unavailable
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerState
from engine.config import EngineConfig
from engine.driver import EngineDriver
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner
from engine.execution.interface import SampledToken, ScheduledBatch
from engine.output import StepOutput
from engine.pace import Pace

MODEL = FakeModel(max_model_len=256)


class Heard:
    """What came, in order, and in which threads."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: set[int] = set()
        self.ended = asyncio.Event()

    def started(self, request_ids: tuple[str, ...]) -> None:
        self._note(*(f"started {request_id}" for request_id in request_ids))

    def output(self, output: StepOutput) -> None:
        self._note(*(f"progress {p.num_computed_tokens}" for p in output.progress))
        self._note(*("token" for _ in output.deltas))
        if output.deltas:
            self.ended.set()

    def _note(self, *names: str) -> None:
        self.names.extend(names)
        self.threads.add(threading.get_ident())


class Gated(FakeRunner):
    """Waits in each step until told to go on; raises what it is told to."""

    gate: threading.Event
    entered: threading.Event
    error: BaseException | None = None

    def execute(self, batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        self.entered.set()
        self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return super().execute(batch)


def made(clock: Clock | None = None, pace: Pace | None = None) -> tuple[Gated, EngineDriver, Heard]:
    runner, heard = Gated(MODEL, 16), Heard()
    runner.gate, runner.entered = threading.Event(), threading.Event()
    runner.gate.set()
    engine = Engine(runner, EngineConfig(), clock or MonotonicClock(), pace)
    return runner, EngineDriver(engine, heard.output, heard.started), heard


async def asleep(driver: EngineDriver) -> None:
    """Until the thread has done all that it was asked: from then on the clock may jump."""
    async with asyncio.timeout(10):
        await driver.call(lambda engine: None)
        while driver._loop.progress.busy:
            await asyncio.sleep(0)


def asked() -> GenerationRequest:
    return GenerationRequest("r", tuple(range(1, 21)), SamplingParams(max_tokens=1))


async def test_news_come_in_order_on_the_event_loop() -> None:
    _, driver, heard = made()
    steps: list[StepOutput] = []
    driver.on_step = steps.append
    driver.start()
    await driver.call(lambda engine: engine.admit(asked(), retain_kv=True))
    await asyncio.wait_for(heard.ended.wait(), 10)
    assert heard.names == ["started r", "progress 20", "token"]
    assert heard.threads == {threading.get_ident()}
    assert [step.num_scheduled_tokens for step in steps] == [20]
    assert driver.num_steps == 1
    await driver.stop()
    await driver.stop()


async def test_death_is_a_future_and_callers_are_told() -> None:
    runner, driver, _ = made()
    runner.error = MemoryError("gone")
    driver.start()
    await driver.call(lambda engine: engine.admit(asked()))
    assert isinstance(await asyncio.wait_for(driver.fatal, 10), MemoryError)
    driver.die(ValueError("later"))
    assert isinstance(driver.fatal.result(), MemoryError)
    with pytest.raises(Unavailable):
        await driver.call(lambda engine: None)
    await driver.stop()


async def test_load_is_known_while_a_step_runs() -> None:
    runner, driver, heard = made()
    runner.gate.clear()
    driver.start()
    await driver.call(lambda engine: engine.admit(asked()))
    await asyncio.to_thread(runner.entered.wait, 10)
    assert driver.load(WorkerState.DRAINING).state is WorkerState.DRAINING
    runner.gate.set()
    await asyncio.wait_for(heard.ended.wait(), 10)
    await driver.call(lambda engine: None)
    assert driver.load(WorkerState.READY).num_running == 0
    await driver.stop()


@pytest.mark.parametrize(
    ("known", "limit_s"),
    [
        ((), 3.0),
        (((1, 0.02), (64, 0.9)), 3.0),  # far below: the floor
        (((20, 4.0),), 12.0),  # a machine that took so long before is slow, not stuck
        (((5, 1.0),), 12.0),  # a first step larger than those of warm-up is given more
        (((1, 0.01), (512, 2.0)), 6.0),
    ],
)
async def test_a_step_stalls_when_it_takes_too_long_for_its_size_here(
    known: tuple[tuple[int, float], ...], limit_s: float
) -> None:
    clock, pace = VirtualClock(), Pace()
    for num_tokens, step_s in known:
        pace.begin(num_tokens)
        pace.end(step_s)
    runner, driver, heard = made(clock, pace)
    runner.gate.clear()
    driver.start()
    await asleep(driver)
    await clock.advance(1000.0)
    assert driver.stalled_s() == 0.0, "idle is no stall"
    await driver.call(lambda engine: engine.admit(asked()))
    await asyncio.to_thread(runner.entered.wait, 10)
    await clock.advance(limit_s)
    assert driver.stalled_s() == 0.0
    await clock.advance(0.1)
    assert driver.stalled_s() == pytest.approx(limit_s + 0.1)
    runner.gate.set()
    await asyncio.wait_for(heard.ended.wait(), 10)
    await asleep(driver)
    assert driver.stalled_s() == 0.0
    await clock.advance(1000.0)
    assert driver.stalled_s() == 0.0
    await driver.stop()


async def test_a_command_that_does_not_end_is_a_stall() -> None:
    clock = VirtualClock()
    _, driver, _ = made(clock)
    entered, gate = threading.Event(), threading.Event()

    def stuck(engine: Engine) -> None:
        del engine
        entered.set()
        gate.wait(20)

    driver.start()
    driver.post(stuck)
    await asyncio.to_thread(entered.wait, 10)
    await clock.advance(3.1)
    assert driver.stalled_s() == pytest.approx(3.1)
    gate.set()
    await driver.stop()
    assert driver.stalled_s() == 0.0


async def test_work_that_can_never_run_is_a_stall_once_no_hand_off_can_hold_its_blocks_any_more() -> None:
    clock = VirtualClock()
    _, driver, heard = made(clock)
    driver.start()
    lease = await driver.call(lambda engine: engine.reserve("h", 16 * 16, ()))
    assert lease is not None
    await driver.call(lambda engine: engine.admit(asked()))
    for _ in range(6):
        await asleep(driver)  # it has looked whether the request can run; looking again is no progress
        await clock.advance(10.0)
        assert driver.stalled_s() == 0.0
    await clock.advance(0.1)
    assert driver.stalled_s() == pytest.approx(60.1)
    await driver.call(lambda engine: engine.release(lease))
    await asyncio.wait_for(heard.ended.wait(), 10)
    await asleep(driver)
    assert driver.stalled_s() == 0.0
    await driver.stop()


async def test_work_that_is_taken_back_leaves_no_stall() -> None:
    clock = VirtualClock()
    _, driver, _ = made(clock)
    driver.start()
    lease = await driver.call(lambda engine: engine.reserve("h", 16 * 16, ()))
    await driver.call(lambda engine: engine.admit(asked()))
    await driver.call(lambda engine: engine.abort("r"))
    await asleep(driver)
    await clock.advance(100.0)
    assert lease is not None
    assert driver.stalled_s() == 0.0
    await driver.stop()


async def test_a_driver_that_was_never_started_can_be_stopped() -> None:
    await made()[1].stop()
