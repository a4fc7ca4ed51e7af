"""A worker whose engine does not move is out of routing within five seconds, everybody says so, and it comes back."""

import asyncio
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.clock import MonotonicClock
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerState
from engine.execution.fake import FakeRunner
from router.config import RegistryConfig
from rpc.announce import Announcer, GrpcRegistryClient
from rpc.channel import open_channel
from rpc.lifecycle import Lifecycle, honest_load
from rpc.process import StopSignals
from rpc.server import RpcServer, ServerConfig
from tests.integration.pools import RealModel, Setup, pools, until
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.test_router_pools import FAKE, tokens

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LIMIT_S = 5.0


class Gated(FakeRunner):
    """A model whose steps can be held up."""

    def __init__(self, num_blocks, buffer):
        super().__init__(FAKE, num_blocks, buffer, step_s=0.005)
        self.open = threading.Event()
        self.open.set()
        self.inside = threading.Event()

    def execute(self, batch):
        self.inside.set()
        assert self.open.wait(30)
        return super().execute(batch)


class Life:
    """A worker with all that its process has around it: health, announcements, the watch on its engine."""

    def __init__(self, running, kind, served, runner, signals):
        self.served, self.runner = served, runner
        self.server = RpcServer(ServerConfig(), ())
        info = WorkerInfo(served.ref, kind, served.address, MODEL, FAKE.layout, ("local",), 512, 128)
        clock = MonotonicClock()
        client, load = GrpcRegistryClient(running.target), partial(honest_load, served.worker)
        lifecycle = Lifecycle(served.worker, self.server, [Announcer(client, info, load, clock)], clock)
        self.task = asyncio.create_task(lifecycle.run(signals))

    async def says(self):
        return await health_of(f"127.0.0.1:{self.server.port}")

    async def stop(self):
        self.runner.open.set()
        self.task.cancel()
        await asyncio.wait((self.task,))


async def health_of(target):
    async with open_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)).status


@asynccontextmanager
async def lives(tmp_path, num_prefill, num_decode):
    """A router and workers, those of the decode pool first."""
    runners = []

    def runner(num_blocks, buffer):
        runners.append(Gated(num_blocks, buffer))
        return runners[-1]

    setup = Setup(model=FAKE, num_prefill=num_prefill, num_decode=num_decode, real=RealModel(FAKE.layout, runner))
    config = router_config(tmp_path, registry=RegistryConfig())  # as it is in production
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_router(config))
        workers = await stack.enter_async_context(pools(setup))
        signals = await stack.enter_async_context(StopSignals())
        pool = [(WorkerKind.DECODE, w) for w in workers.decode] + [(WorkerKind.PREFILL, w) for w in workers.prefill]
        made = [Life(running, kind, w, one, signals) for (kind, w), one in zip(pool, runners, strict=True)]
        for life in made:
            stack.push_async_callback(life.stop)
        await until(partial(ready, running, num_decode))
        await until(partial(ready, running, num_prefill, "prefill"))
        yield running, made


async def ready(running, count, pool="decode"):
    return (await running.http.get("/health")).json()["ready"][pool] == count


async def test_an_engine_that_is_stuck_is_out_within_five_seconds_and_comes_back(tmp_path):
    async with lives(tmp_path, num_prefill=0, num_decode=1) as (running, (life,)):
        expected = (await tokens(running, max_tokens=24))["choices"][0]["token_ids"]

        async def all_well():
            return await life.says() == await health_of(running.target) == SERVING

        await until(all_well)
        life.runner.open.clear()
        life.runner.inside.clear()
        asking = asyncio.create_task(tokens(running, max_tokens=24))
        await asyncio.to_thread(life.runner.inside.wait, 10)
        stuck_at = time.monotonic()

        async def all_say_so():
            response = await running.http.get("/health")
            told = await life.says(), await health_of(running.target)
            return response.status_code == 503 and told == (NOT_SERVING, NOT_SERVING)

        await until(all_say_so)
        assert time.monotonic() - stuck_at < LIMIT_S
        assert (await running.http.get("/health")).json()["missing"][-1] == "no decode worker is ready (1 stalled)"
        life.runner.open.set()
        assert (await asking)["choices"][0]["token_ids"] == expected, "what was there goes on"
        await until(partial(ready, running, 1))
        await until(all_well)


async def test_a_prefill_engine_that_is_stuck_is_out_within_five_seconds_and_its_requests_go_elsewhere(tmp_path):
    async with lives(tmp_path, num_prefill=1, num_decode=1) as (running, (decode, life)):
        expected = await tokens(running, max_tokens=24, diptych={"stages": True})
        assert expected["diptych"]["route"] == "disaggregated"
        life.runner.open.clear()
        life.runner.inside.clear()
        asking = asyncio.create_task(tokens(running, max_tokens=24, diptych={"stages": True}))
        await asyncio.to_thread(life.runner.inside.wait, 10)
        stuck_at = time.monotonic()

        async def all_say_so():
            missing = (await running.http.get("/health")).json()["missing"]
            return missing == ["no prefill worker is ready (1 stalled)"] and await life.says() == NOT_SERVING

        await until(all_say_so)
        assert time.monotonic() - stuck_at < LIMIT_S
        assert (await running.http.get("/health")).status_code == 200, "decode workers run requests alone"
        assert await decode.says() == await health_of(running.target) == SERVING, "the other pool is well"
        answer = await asking
        assert answer["diptych"]["route"] == "colocated"
        assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        life.runner.open.set()
        await until(partial(ready, running, 1, "prefill"))
        await life.served.idle()
        assert await life.says() == SERVING


async def test_health_follows_what_workers_say_of_themselves_at_once(tmp_path):
    """No time but that of a message: whatever the worker's own reason is."""
    async with running_router(router_config(tmp_path)) as running:
        _, decode = await running.cluster.pools(0, 2)
        grpc = partial(health_of, running.target)

        async def grpc_says(status):
            return await grpc() == status

        await until(partial(grpc_says, SERVING))
        decode[0].load = WorkerLoad(state=WorkerState.STALLED)
        await until(partial(ready, running, 1))
        assert (await running.http.get("/health")).status_code == 200
        for _ in range(4):
            await tokens(running, max_tokens=2)
        assert decode[0].seen == [], "it is left out"
        decode[1].load = WorkerLoad(state=WorkerState.STALLED)
        await until(partial(ready, running, 0))
        assert (await running.http.get("/health")).status_code == 503
        await until(partial(grpc_says, NOT_SERVING))
        decode[0].load = WorkerLoad()
        await until(partial(grpc_says, SERVING))
        assert (await running.http.get("/health")).status_code == 200


async def test_a_worker_that_falls_silent_is_left_out_before_it_is_lost(tmp_path):
    """What is stopped, or blocked as a whole, says nothing: a share of the time for which it is believed is enough."""
    config = router_config(tmp_path, registry=RegistryConfig(ttl_s=10.0, quiet=0.08))
    async with running_router(config) as running:
        (worker,) = (await running.cluster.pools(0, 1))[1]
        await until(partial(ready, running, 1))
        await worker.mute()
        began = time.monotonic()
        await until(partial(ready, running, 0))
        assert time.monotonic() - began < 5.0, "half of the time for which it is believed"
        assert "no decode worker is ready (1 silent)" in (await running.http.get("/health")).json()["missing"]


STALLED = WorkerLoad(state=WorkerState.STALLED)


def held(pool):
    """The worker of a pool that has a request and does not go on with it."""
    return next((worker for worker in pool if worker.running), None)


@pytest.mark.parametrize(
    ("stuck", "num_prefill", "num_decode", "route"),
    [
        ("decode", 0, 2, "colocated"),
        ("decode", 1, 2, "disaggregated"),
        ("prefill", 2, 1, "disaggregated"),
        ("prefill", 1, 1, "colocated"),
    ],
)
async def test_requests_leave_a_worker_that_is_stalled(tmp_path, stuck, num_prefill, num_decode, route):
    async with running_router(router_config(tmp_path)) as running:
        pools_of = dict(zip(("prefill", "decode"), await running.cluster.pools(num_prefill, num_decode), strict=True))
        expected = (await tokens(running))["choices"][0]["token_ids"]
        pool = pools_of[stuck]
        running.cluster.step_s = 0.01
        if stuck == "decode":  # after some tokens
            asking = asyncio.create_task(tokens(running, diptych={"stages": True}))
            await until(lambda: held(pool))
            await asyncio.sleep(0.05)
        for worker in pool:
            worker.faults.hold.clear()
        if stuck == "prefill":
            asking = asyncio.create_task(tokens(running, diptych={"stages": True}))
            await until(lambda: held(pool))
        lazy = held(pool)
        for worker in pool:
            if worker is not lazy:
                worker.faults.hold.set()
        lazy.load = STALLED
        answer = await asyncio.wait_for(asking, 10)
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["diptych"]["route"] == route
        await until(lambda: not lazy.running)
        assert lazy.cancelled, "it is told, for when it moves again"


async def test_requests_stay_on_a_stalled_worker_where_no_other_would_take_them(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        _, (only,) = await running.cluster.pools(0, 1)
        only.faults.hold.clear()
        asking = asyncio.create_task(tokens(running))
        await until(lambda: only.running)
        only.load = STALLED
        await until(partial(ready, running, 0))
        await asyncio.sleep(1.2)  # two looks of the router
        assert only.running
        assert not only.cancelled
        only.load = WorkerLoad()
        only.faults.hold.set()
        assert len((await asking)["choices"][0]["token_ids"]) == 24
        assert len(only.seen) == 1, "it was not begun again"
