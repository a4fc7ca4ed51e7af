"""A process that did not run has heard nobody, and calls nobody silent for that."""

import asyncio

from contracts.clock import VirtualClock
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from router.config import RegistryConfig
from router.workers.awake import AwakeTime
from router.workers.worker_table import WorkerTable

TTL_S = 5.0
INFO = WorkerInfo(
    WorkerRef("a", 1), WorkerKind.DECODE, "a:1", "m", KVLayout("m", "float32", 1, 1, 8, 16), ("local",), 100, 10
)


async def test_it_goes_with_the_clock_but_for_pauses(caplog):
    clock = VirtualClock()
    time = AwakeTime(clock, 1.0)
    running = asyncio.create_task(time.run())
    began = time.now()
    await clock.advance(10.0)
    assert time.now() - began == 10.0
    clock._now += 3600.0  # nothing runs: sleepers are late
    assert 10.5 <= time.now() - began <= 11.0, "whoever asks first, before any pulse"
    await clock.advance(2.0)
    assert 12.0 <= time.now() - began <= 13.0
    assert "did not run for a while" in caplog.text
    running.cancel()


async def test_a_stop_of_any_length_costs_no_worker_but_silence_afterwards_does():
    clock = VirtualClock()
    time = AwakeTime(clock, TTL_S / 5)
    table = WorkerTable(RegistryConfig(TTL_S), "m", time)
    running = asyncio.create_task(time.run())
    await clock.advance(1.0)
    table.announce(INFO, WorkerLoad())
    for _ in range(3):
        clock._now += 100.0
        table.expire()
        assert table.ready(WorkerKind.DECODE), "before anything is read"
        await clock.advance(0.5)
        table.announce(INFO, WorkerLoad())
    await clock.advance(TTL_S + 0.1)
    assert not table.workers()
    running.cancel()
