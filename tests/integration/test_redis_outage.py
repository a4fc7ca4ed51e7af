"""Redis is away for half a minute, as users meet it: every setting is the default, requests come all the while, none fails."""

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest

from contracts.clock import MonotonicClock
from contracts.worker import WorkerKind
from registry import keys
from registry.client import RedisRegistryClient
from registry.config import LeaseConfig, RedisConfig, parse_redis_url
from registry.link import RedisLink
from router.config import LimitsConfig, RegistryConfig, RetryConfig
from tests.integration.router_harness import MODEL, router_config, running_router

OUTAGE_S, BEFORE_S, AFTER_S, RATE_HZ = 30.0, 2.0, 6.0, 5.0
BODY = {"model": MODEL, "prompt": "It is", "max_tokens": 4, "seed": 3}


async def asks(running, until, failed):
    """RATE_HZ requests a second, whatever becomes of those before; how many."""
    asked = []

    async def ask():
        answer = await running.http.post("/v1/completions", json=BODY)
        if answer.status_code != 200:
            failed.append(answer.text)

    while time.monotonic() < until:
        asked.append(asyncio.create_task(ask()))
        await asyncio.sleep(1 / RATE_HZ)
    await asyncio.gather(*asked)
    return len(asked)


async def health(running):
    return (await running.http.get("/health")).json()


async def until_ready(running, registry, prefill, decode, limit_s=10.0):
    began = time.monotonic()
    async with asyncio.timeout(limit_s):
        while True:
            report = await health(running)
            if report["registry"].startswith(registry) and report["ready"] == {"prefill": prefill, "decode": decode}:
                return time.monotonic() - began
            await asyncio.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "hung"])
async def test_thirty_seconds_without_redis_cost_two_routers_no_request(redis_process, tmp_path, how):
    config = RedisConfig(parse_redis_url(redis_process.url))
    async with contextlib.AsyncExitStack() as stack:
        link = RedisLink(config, MonotonicClock())
        link.start()
        stack.push_async_callback(link.close)
        routers = []
        for _ in range(2):
            whole = replace(
                router_config(tmp_path, redis=config, limits=LimitsConfig(requests_per_minute=100_000)),
                registry=RegistryConfig(),
                retry=RetryConfig(),
            )
            routers.append(await stack.enter_async_context(running_router(whole)))
        first, second = routers
        door = first.cluster.registry_client
        first.cluster.registry_client = lambda: RedisRegistryClient(link, LeaseConfig())
        workers = [await first.cluster.add(WorkerKind.PREFILL, "p0")]
        workers += [await first.cluster.add(WorkerKind.DECODE, f"d{i}") for i in range(2)]
        for running in routers:
            await until_ready(running, "ok", 1, 2)

        failed = []
        until = time.monotonic() + BEFORE_S + OUTAGE_S + AFTER_S
        asking = [asyncio.create_task(asks(running, until, failed)) for running in routers]
        await asyncio.sleep(BEFORE_S)
        redis_process.kill() if how == "killed" else redis_process.pause()
        gone_at = time.monotonic()
        for running in routers:
            await until_ready(running, "away", 1, 2)
        await asyncio.sleep(OUTAGE_S / 3)
        first.cluster.registry_client = door
        came = await first.cluster.add(WorkerKind.DECODE, "d2")
        assert await until_ready(first, "away", 1, 3) < 1.0, "it joins at a door"
        at_once = await asyncio.gather(*(first.http.post("/v1/completions", json=BODY) for _ in range(16)))
        assert [answer.status_code for answer in at_once] == [200] * 16
        assert came.seen or came.attached
        await workers[1].stop()  # without a word
        assert await until_ready(first, "away", 1, 2) < 5.0
        assert await until_ready(second, "away", 1, 1) < 5.0
        await asyncio.sleep(gone_at + OUTAGE_S - time.monotonic())
        assert not failed

        redis_process.start() if how == "killed" else redis_process.resume()
        back = [await until_ready(running, "ok", 1, 2) for running in routers]
        assert sum(back) < 3.0, "both hear again, and both know who came meanwhile"
        assert sum(await asyncio.gather(*asking)) > 1.5 * (BEFORE_S + OUTAGE_S + AFTER_S) * RATE_HZ
        assert not failed
        assert redis_process.command("EXISTS", keys.worker("d2")) == 1
        for running in routers:
            await until_ready(running, "ok", 1, 2, 0.5)
