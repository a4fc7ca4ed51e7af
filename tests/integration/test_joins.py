"""A worker that joins a busy cluster gets traffic within a second: real workers, both pools, both registries, two routers."""

import asyncio
import contextlib
import time

import pytest

from contracts.clock import MonotonicClock
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad
from engine.execution.fake import FakeModel
from registry.client import RedisRegistryClient
from registry.config import LeaseConfig, RedisConfig, parse_redis_url
from registry.link import RedisLink
from router.config import PolicyConfig, RegistryConfig
from rpc.announce import Announcer, GrpcRegistryClient
from tests.integration.pools import Setup, pools
from tests.integration.router_harness import MODEL, router_config, running_router

FAKE = FakeModel(vocab_size=500, max_model_len=256)
STREAMS = 4  # of each router, all the while


class Load:
    """Requests through one router without a pause, and when it first gave one to each worker."""

    def __init__(self, running):
        self.running = running
        self.first_at = {}
        self.tasks = [asyncio.create_task(self.ask(index)) for index in range(STREAMS)]
        self.tasks.append(asyncio.create_task(self.watch()))

    async def ask(self, index):
        number = 0
        while True:
            number += 1
            body = {"model": MODEL, "prompt": [5 + index, 6 + number % 400, 7], "max_tokens": 8, "ignore_eos": True}
            answer = await self.running.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text

    async def watch(self):
        while True:
            for ref, claims in self.running.router._pools.claims.items():
                if claims:
                    self.first_at.setdefault(ref, time.monotonic())
            await asyncio.sleep(0.002)

    async def stop(self):
        for task in self.tasks:
            if not task.done():
                task.cancel()
        for ended in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended


class Joining:
    """Has workers of `pools` announce themselves, and sees when each computed something first."""

    def __init__(self, clients, stack):
        self.clients, self.stack = clients, stack
        self.computed_at = {}

    def join(self, served, kind):
        def on_step(output):
            if output.num_scheduled_requests:
                self.computed_at.setdefault(served.ref, time.monotonic())

        served.worker.driver.on_step = on_step
        info = WorkerInfo(served.ref, kind, served.address, MODEL, FAKE.layout, ("local",), FAKE.max_model_len, 128)
        for client in self.clients():
            announcer = Announcer(client, info, WorkerLoad, MonotonicClock())
            running = asyncio.create_task(announcer.run())
            self.stack.push_async_callback(announcer.leave)
            self.stack.callback(running.cancel)
        return time.monotonic()


@pytest.mark.parametrize("registry", ["embedded", "redis"])
async def test_a_worker_that_joins_a_busy_cluster_gets_traffic_within_a_second(request, tmp_path, registry):
    async with contextlib.AsyncExitStack() as stack:
        redis = None
        if registry == "redis":
            redis = RedisConfig(parse_redis_url(request.getfixturevalue("redis_process").url))
        setup = Setup(num_prefill=2, num_decode=2, model=FAKE, step_s=0.002)
        made = await stack.enter_async_context(pools(setup))
        policies = PolicyConfig(prefill="round_robin", decode="round_robin")
        config = router_config(tmp_path, redis=redis, policies=policies, registry=RegistryConfig())
        routers = [await stack.enter_async_context(running_router(config)) for _ in range(2)]
        link = RedisLink(redis, MonotonicClock()) if redis is not None else None
        if link is not None:
            link.start()
            stack.push_async_callback(link.close)
            await link.presence.wait_up()

        def clients():
            if link is not None:
                return [RedisRegistryClient(link, LeaseConfig())]
            return [GrpcRegistryClient(running.target) for running in routers]

        joining = Joining(clients, stack)
        joining.join(made.prefill[0], WorkerKind.PREFILL)
        joining.join(made.decode[0], WorkerKind.DECODE)
        for running in routers:
            async with asyncio.timeout(10):
                while (await running.http.get("/health")).json()["ready"] != {"prefill": 1, "decode": 1}:
                    await asyncio.sleep(0.01)
        loads = [Load(running) for running in routers]
        await asyncio.sleep(0.3)
        for served, kind in ((made.prefill[1], WorkerKind.PREFILL), (made.decode[1], WorkerKind.DECODE)):
            began = joining.join(served, kind)
            async with asyncio.timeout(10):
                while not (served.ref in joining.computed_at and all(served.ref in load.first_at for load in loads)):
                    await asyncio.sleep(0.005)
            took = [load.first_at[served.ref] - began for load in loads]
            assert max(*took, joining.computed_at[served.ref] - began) < 1.0, (kind, took)
        for load in loads:
            await load.stop()
