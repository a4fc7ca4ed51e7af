"""Routers that share a Redis warn each other of failing workers; with Redis away each goes on alone."""

import asyncio
import contextlib
import json

from contracts.clock import MonotonicClock
from contracts.errors import InternalError, WorkerLost
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from registry.config import RedisConfig, parse_redis_url
from registry.link import RedisLink
from router.config import BreakerConfig
from router.workers.breaker_news import CHANNEL, KEPT, BreakerNews
from router.workers.breakers import Breakers, BreakerState
from router.workers.registry import Change, ChangeKind
from tests.integration.test_redis_link import QUICK, until
from tests.integration.test_redis_registry import ask, deployment, health, ready

REF = WorkerRef("d0", 3)
INFO = WorkerInfo(REF, WorkerKind.DECODE, "h:1", "m", KVLayout("m", "float32", 1, 1, 8, 16), (), 64, 64)


@contextlib.asynccontextmanager
async def router(process, name, workers=(INFO,)):
    clock = MonotonicClock()
    link = RedisLink(RedisConfig(parse_redis_url(process.url), **QUICK), clock)
    link.start()
    breakers = Breakers(BreakerConfig(failures_in_a_row=2, open_s=30.0, max_open_s=60.0), clock)
    for info in workers:
        breakers.on_change(Change(ChangeKind.JOINED, info))
    news = BreakerNews(link, clock, name, breakers.warn)
    breakers.on_trip.append(news.tripped)
    running = asyncio.ensure_future(news.run())
    try:
        await link.presence.wait_up()
        yield breakers
    finally:
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled()
        await link.close()


def listeners(process):
    return dict(zip(*[iter(process.command("PUBSUB", "NUMSUB", CHANNEL))] * 2, strict=True))[CHANNEL.encode()]


def fail(breakers):
    for _ in range(2):
        breakers.begin(REF).failed(WorkerLost("gone"))


async def test_a_trip_on_one_router_makes_the_others_careful_and_comes_back_to_nobody(redis_process):
    async with (
        router(redis_process, "a") as ours,
        router(redis_process, "b") as theirs,
        router(redis_process, "c") as third,
    ):
        await until(lambda: listeners(redis_process) == 3)
        fail(ours)
        await until(lambda: theirs.state(REF) is BreakerState.HALF_OPEN and third.state(REF) is BreakerState.HALF_OPEN)
        assert theirs.report()[0].reason == "another router: gone"
        assert ours.state(REF) is BreakerState.OPEN
        theirs.begin(REF).worked()  # the way from there is whole
        await asyncio.sleep(0.05)
        assert theirs.state(REF) is BreakerState.CLOSED
        assert ours.state(REF) is BreakerState.OPEN


async def test_a_router_that_starts_later_hears_of_what_is_open(redis_process):
    async with router(redis_process, "a") as ours:
        fail(ours)
        await until(lambda: redis_process.command("ZCARD", KEPT) == 1)
        async with router(redis_process, "b") as late, router(redis_process, "c", workers=()) as early:
            await until(lambda: late.state(REF) is BreakerState.HALF_OPEN)
            early.on_change(Change(ChangeKind.JOINED, INFO))
            await until(lambda: early.state(REF) is BreakerState.HALF_OPEN)
            assert early.report()[0].reason == "another router: gone"
        assert 0 < redis_process.command("PTTL", KEPT) <= 60_000
        redis_process.command("SET", KEPT, "something else")
        ours.begin(REF).worked()
        fail(ours)
        await until(lambda: redis_process.command("TYPE", KEPT) == b"zset")


async def test_without_redis_each_goes_on_alone_and_afterwards_they_talk_again(redis_process):
    async with router(redis_process, "a") as ours, router(redis_process, "b") as theirs:
        await until(lambda: listeners(redis_process) == 2)
        redis_process.kill()
        fail(ours)
        assert ours.state(REF) is BreakerState.OPEN
        await asyncio.sleep(0.1)
        assert theirs.state(REF) is BreakerState.CLOSED
        redis_process.start()
        await until(lambda: listeners(redis_process) == 2)
        assert theirs.state(REF) is BreakerState.CLOSED, "old news is no news"
        fail(theirs)
        ours.begin(REF).worked()
        assert ours.state(REF) is BreakerState.CLOSED
        fail(ours)
        theirs.begin(REF).worked()
        fail(theirs)
        await until(lambda: theirs.state(REF) is BreakerState.OPEN)


async def test_rubbish_on_the_channel_is_survived(redis_process):
    good = {"router": "x", "worker": "d0", "epoch": 3, "reason": "gone"}
    async with router(redis_process, "a") as ours:
        await until(lambda: listeners(redis_process) == 1)
        for bad in (b"\xff\x00", b"[" * 4000, b"{}", b"null", json.dumps({**good, "epoch": "3"}).encode(), b" " * 9000):
            redis_process.command("PUBLISH", CHANNEL, bad)
        assert ours.state(REF) is BreakerState.CLOSED
        redis_process.command("PUBLISH", CHANNEL, json.dumps(good).encode())
        await until(lambda: ours.state(REF) is BreakerState.HALF_OPEN)


async def test_whole_routers_warn_each_other(redis_process, tmp_path):
    async with deployment(redis_process.url, tmp_path) as made:
        first, second = made.routers
        bad, good = await made.decode("d0"), await made.decode("d1")
        for running in made.routers:
            await ready(running, 2)
        await until(lambda: listeners(redis_process) == 2)
        bad.faults.refuse = [InternalError("broken") for _ in range(100)]
        async with asyncio.timeout(20):
            while await first.metric("diptych_worker_breaker_state", worker_id="d0") != 2:
                await ask(first)
        said = []
        async with asyncio.timeout(5):
            while not said:
                said = (await health(second))["breakers"]
        assert (said[0]["worker"], said[0]["state"]) == ("d0", "half_open")
        assert said[0]["reason"].startswith("another router: ")
        assert await second.metric("diptych_worker_breaker_openings_total", pool="decode", cause="warned") == 1
        before = len(bad.seen)
        await ask(second, 8)
        assert len(bad.seen) <= before + 1, "one probe"
        assert good.seen
