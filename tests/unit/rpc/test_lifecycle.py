"""One life of a worker: serve, drain, stop; and the ways it can go wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.clock import MonotonicClock
from contracts.errors import ConfigError
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef, WorkerState
from rpc.announce import AnnounceConfig, Announcer
from rpc.channel import open_channel
from rpc.lifecycle import Lifecycle, LifecycleConfig, honest_load
from rpc.process import FatalError, StopSignals
from rpc.server import RpcServer, ServerConfig

INFO = WorkerInfo(WorkerRef("w", 1), WorkerKind.DECODE, "h:1", "m", KVLayout("m", "float32", 1, 1, 4, 4), (), 8, 8)


class Worker:
    """A worker that does what the test says."""

    def __init__(self) -> None:
        self.fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.stalled = 0.0
        self.draining = asyncio.Event()
        self.done = asyncio.Event()
        self.stopped = 0
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.patience_s = -1.0

    def load(self) -> WorkerLoad:
        return WorkerLoad()

    def stalled_s(self) -> float:
        return self.stalled

    async def drain(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.draining.set()
        await self.done.wait()

    async def stop(self) -> None:
        self.stopped += 1
        await self.may_stop.wait()


class Registry:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.num_others = 0
        self.states: list[WorkerState] = []
        self.heard = asyncio.Event()

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        self.words.append("here")
        self.states.append(load.state)
        self.heard.set()
        return 1.0

    async def leave(self, ref: WorkerRef) -> int:
        self.words.append("left")
        return self.num_others

    async def close(self) -> None:
        self.words.append("closed")


class Life:
    def __init__(self, config: LifecycleConfig) -> None:
        self.worker = Worker()
        self.registry = Registry()
        self.server = RpcServer(ServerConfig(), ())
        load = partial(honest_load, self.worker)
        announcer = Announcer(self.registry, INFO, load, MonotonicClock(), AnnounceConfig(interval_s=3600.0))
        self.lifecycle = Lifecycle(self.worker, self.server, [announcer], MonotonicClock(), config)


@asynccontextmanager
async def living(config: LifecycleConfig) -> AsyncIterator[tuple[Life, asyncio.Task[None]]]:
    life = Life(config)
    async with StopSignals() as signals:
        task = asyncio.create_task(life.lifecycle.run(signals))
        await asyncio.wait_for(life.registry.heard.wait(), 10)
        yield life, task
        await asyncio.wait((task,), timeout=10)
        assert task.done()
    assert life.worker.stopped == 1
    assert life.registry.words[-2:] == ["left", "closed"]
    assert life.registry.words.count("left") == 1


CONFIG = LifecycleConfig(grace_s=0.0, linger_s=0.0, stall_check_s=60)


async def test_a_signal_drains_then_stops() -> None:
    async with living(CONFIG) as (life, task):
        assert await health(life) == health_pb2.HealthCheckResponse.SERVING
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(life.worker.draining.wait(), 10)
        assert life.registry.words[-1] == "closed"
        assert await health(life) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not task.done()
        life.worker.done.set()
        await asyncio.wait_for(task, 10)


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
async def test_a_drain_is_cut_short_by_its_limit_or_a_second_signal(limit_s: float) -> None:
    async with living(LifecycleConfig(drain_limit_s=limit_s, grace_s=0.0, stall_check_s=60)) as (life, task):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(life.worker.draining.wait(), 10)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 10)


@pytest.mark.parametrize(("num_others", "patience_s"), [(0, 36.0), (1, 10.0)])
async def test_work_may_end_here_for_a_share_of_the_limit_and_longer_where_nobody_could_take_it(
    num_others: int, patience_s: float
) -> None:
    config = LifecycleConfig(
        drain_limit_s=40.0, finish_share=0.25, drain_margin_s=4.0, grace_s=0.0, linger_s=0.0, stall_check_s=60
    )
    async with living(config) as (life, _):
        life.registry.num_others = num_others
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(life.worker.draining.wait(), 10)
        assert patience_s - 2 < life.worker.patience_s <= patience_s
        life.worker.done.set()


@pytest.mark.parametrize("limit_s", [0.0, 0.5, 2.0, 3.0, 100.0])
@pytest.mark.parametrize("num_others", [0, 1])
def test_patience_always_leaves_time_to_send_work_away(limit_s: float, num_others: int) -> None:
    config = LifecycleConfig(drain_limit_s=limit_s, finish_share=1.0)
    assert config.patience_s(num_others) == limit_s - config.margin_s
    assert config.margin_s == min(2.0, limit_s / 4)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="finish_share"):
        LifecycleConfig(finish_share=share)


async def test_a_drain_without_end_is_over_by_its_limit_with_all_that_follows() -> None:
    config = LifecycleConfig(drain_limit_s=1.0, grace_s=60.0, stall_check_s=60)
    async with living(config) as (life, task), open_channel(f"127.0.0.1:{life.server.port}") as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watching.read()  # a call that does not end by itself
        began = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(task), 10)
        assert 0.7 < asyncio.get_running_loop().time() - began < 2.0


@pytest.mark.parametrize("dies", [False, True])
async def test_a_step_that_never_ends_is_left_behind_with_its_process(dies: bool) -> None:
    async with living(LifecycleConfig(drain_limit_s=0.5, grace_s=0.1, stall_check_s=60)) as (life, task):
        codes: list[int] = []
        life.lifecycle.abandon = codes.append
        life.worker.may_stop.clear()
        if dies:
            life.worker.fatal.set_result(MemoryError())
            with pytest.raises(FatalError):
                await asyncio.wait_for(asyncio.shield(task), 5)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(asyncio.shield(task), 5)
        assert codes == [1 if dies else 0]
        life.worker.may_stop.set()


async def test_after_a_second_signal_no_call_is_waited_for() -> None:
    config = LifecycleConfig(drain_limit_s=60.0, grace_s=60.0, stall_check_s=60)
    async with living(config) as (life, task), open_channel(f"127.0.0.1:{life.server.port}") as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watching.read()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(life.worker.draining.wait(), 10)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asyncio.shield(task), 5)


async def test_an_idle_worker_refuses_for_a_while_those_who_have_not_heard_its_farewell() -> None:
    config = LifecycleConfig(grace_s=0.0, linger_s=0.2, stall_check_s=60)
    async with living(config) as (life, task):
        life.worker.done.set()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(life.worker.draining.wait(), 10)
        began = asyncio.get_running_loop().time()
        assert await health(life) == health_pb2.HealthCheckResponse.NOT_SERVING
        await asyncio.wait_for(asyncio.shield(task), 10)
        assert asyncio.get_running_loop().time() - began > 0.15


@pytest.mark.parametrize("while_draining", [False, True])
async def test_a_dead_engine_ends_the_process_at_once(while_draining: bool) -> None:
    async with living(CONFIG) as (life, task):
        if while_draining:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(life.worker.draining.wait(), 10)
        life.worker.fatal.set_result(MemoryError("out of blocks"))
        with pytest.raises(FatalError, match="MemoryError: out of blocks"):
            await asyncio.wait_for(asyncio.shield(task), 10)


async def test_what_an_engine_died_of_is_said_without_what_it_worked_on() -> None:
    async with living(CONFIG) as (life, task):
        life.worker.fatal.set_result(ValueError("Dear Anna, …"))
        with pytest.raises(FatalError, match=r"^the engine died: ValueError$"):
            await asyncio.wait_for(asyncio.shield(task), 10)


async def test_health_follows_progress() -> None:
    async with living(CONFIG) as (life, _):
        for stalled_s, expected in ((3.1, "NOT_SERVING"), (0.0, "SERVING"), (0.1, "NOT_SERVING"), (0.0, "SERVING")):
            life.worker.stalled = stalled_s
            life.registry.heard.clear()
            await life.lifecycle.check_progress()
            await asyncio.wait_for(life.registry.heard.wait(), 10)  # at once: the next word would come in an hour
            assert life.registry.states[-1] is (WorkerState.STALLED if stalled_s else WorkerState.READY)
            assert health_pb2.HealthCheckResponse.ServingStatus.Name(await health(life)) == expected
        num_words = len(life.registry.words)
        await life.lifecycle.check_progress()
        await asyncio.sleep(0.02)
        assert len(life.registry.words) == num_words, "what did not change is said at its time"
        life.worker.done.set()
        os.kill(os.getpid(), signal.SIGINT)


async def health(life: Life) -> int:
    async with open_channel(f"127.0.0.1:{life.server.port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return int(answer.status)


async def test_a_worker_that_does_not_move_says_so_to_registries() -> None:
    worker = Worker()
    assert honest_load(worker).state is WorkerState.READY
    worker.stalled = 3.1
    assert honest_load(worker).state is WorkerState.STALLED
