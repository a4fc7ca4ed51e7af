"""An engine's thread as a service sees it: news on the event loop in order, death as a future, load without waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest

from contracts.clock import MonotonicClock
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
    error: BaseException | None = None

    def execute(self, batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return super().execute(batch)


def made() -> tuple[Gated, EngineDriver, Heard]:
    runner, heard = Gated(MODEL, 16), Heard()
    runner.gate = threading.Event()
    runner.gate.set()
    engine = Engine(runner, EngineConfig(), MonotonicClock())
    return runner, EngineDriver(engine, heard.output, heard.started), heard


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


async def test_load_and_stall_are_known_while_a_step_runs() -> None:
    runner, driver, heard = made()
    runner.gate.clear()
    driver.start()
    assert driver.stalled_s() == 0.0
    await driver.call(lambda engine: engine.admit(asked()))
    while driver.stalled_s() == 0.0:
        await asyncio.sleep(0)
    assert driver.load(WorkerState.DRAINING).state is WorkerState.DRAINING
    runner.gate.set()
    await asyncio.wait_for(heard.ended.wait(), 10)
    await driver.call(lambda engine: None)
    assert driver.load(WorkerState.READY).num_running == 0
    assert driver.stalled_s() == 0.0
    await driver.stop()


async def test_a_driver_that_was_never_started_can_be_stopped() -> None:
    await made()[1].stop()
