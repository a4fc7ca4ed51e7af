"""Rate limits that routers share through a real Redis: one limit for all of them, and each its own while Redis is away."""

import asyncio
import json
import random
from contextlib import asynccontextmanager

import pytest

from contracts.clock import MonotonicClock, VirtualClock
from registry.config import RedisConfig, parse_redis_url
from registry.link import RedisLink
from router.admission.limits import Kind, LocalBuckets, Rate, Wanted
from router.admission.shared_limits import SharedBuckets
from router.config import AccessConfig, LimitsConfig
from router.keys import hash_of, new_key
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.scripted_workers import says
from tests.integration.slow_redis import SlowRedis

# One that is killed refuses at once; a slow machine is not taken for that.
QUICK = {"command_timeout_s": 5.0, "check_s": 0.1, "min_backoff_s": 0.02, "max_backoff_s": 0.1}
STEADY = {"command_timeout_s": 5.0}
SLOW = Rate(600)  # ten a second


@asynccontextmanager
async def router(process, patience_s=5.0, quick=QUICK):
    link = RedisLink(RedisConfig(parse_redis_url(process.url), **quick), MonotonicClock())
    link.start()
    buckets = SharedBuckets(link, MonotonicClock(), "diptych", lambda: buckets.alone.append(1), patience_s)
    buckets.alone, buckets.link = [], link
    try:
        async with asyncio.timeout(10):
            while not link.up:
                await asyncio.sleep(0.01)
        yield buckets
    finally:
        await link.close()


@asynccontextmanager
async def two_routers(config):
    """They wait for Redis however crowded the machine is: who does not may let through what the other has given already."""
    async with running_router(config) as one, running_router(config) as other:
        for running in (one, other):
            running.router._limits._buckets._patience_s = 5.0
        await one.cluster.pools(1, 1)
        async with asyncio.timeout(10):
            while (await other.http.get("/health")).status_code != 200:
                await asyncio.sleep(0.05)
        yield one, other


def wanted(amount, rate=SLOW):
    return [Wanted(Kind.REQUESTS, Rate(60_000), 1.0), Wanted(Kind.TOKENS, rate, amount)]


async def test_two_routers_share_one_limit(redis_process):
    async with router(redis_process) as one, router(redis_process) as other:
        began = asyncio.get_running_loop().time()
        verdicts = await asyncio.gather(
            *(buckets.take("a", wanted(10.0)) for _ in range(100) for buckets in (one, other))
        )
        took_s = asyncio.get_running_loop().time() - began
        num_granted = sum(verdict.granted for verdict in verdicts)
        assert 60 <= num_granted <= 60 + took_s + 1
        refused = next(verdict for verdict in verdicts if not verdict.granted)
        assert refused.lacking is Kind.TOKENS
        assert 0 < refused.retry_after_s <= 1.1
        assert (await other.take("b", wanted(600.0))).granted, "another caller has its own"
        await one.give("a", [Wanted(Kind.TOKENS, SLOW, 300.0)])
        assert (await other.take("a", wanted(290.0))).granted, "what one gives back the other has"
        assert not one.alone and not other.alone


async def test_it_is_the_arithmetic_of_one_process(redis_process):
    """The same draws on Redis and on a clock that follows it: the same answers, but for the time that draws take."""
    draws = random.Random(5)
    async with router(redis_process) as shared:
        clock = VirtualClock()
        local, began = LocalBuckets(clock), asyncio.get_running_loop().time()
        for _ in range(200):
            clock._now = asyncio.get_running_loop().time() - began
            amount = draws.choice([0.0, 1.0, 40.0, 5000.0])
            mine, theirs = await local.take("a", wanted(amount)), await shared.take("a", wanted(amount))
            if mine.granted != theirs.granted:
                assert max(mine.retry_after_s, theirs.retry_after_s) < 0.2
                await (local if mine.granted else shared).give("a", wanted(min(amount, 600.0)))
                continue
            assert theirs.retry_after_s == pytest.approx(mine.retry_after_s, abs=0.2)
            for ours, other in zip(mine.standings, theirs.standings, strict=True):
                assert other.reset_s == pytest.approx(ours.reset_s, abs=0.2)
                assert other.limit == ours.limit
            if mine.granted and draws.random() < 0.7:
                back = [Wanted(Kind.TOKENS, SLOW, draws.choice([amount, amount / 2, -3.0]))]
                await local.give("a", back)
                await shared.give("a", back)


async def test_nothing_is_kept_of_who_has_used_nothing_for_long(redis_process):
    async with router(redis_process) as buckets:
        quick = Rate(60_000, burst_s=0.2)
        await buckets.take("a", [Wanted(Kind.TOKENS, quick, 100.0)])
        assert redis_process.command("DBSIZE") not in (0, "0", b"0")
        await asyncio.sleep(0.4)
        await buckets.take("b", [Wanted(Kind.TOKENS, SLOW, 100.0)])
        await buckets.give("b", [Wanted(Kind.TOKENS, SLOW, 100.0)])
        async with asyncio.timeout(5):
            while await buckets.link.run("DBSIZE"):
                await asyncio.sleep(0.05)


async def test_without_redis_each_router_goes_on_with_its_own(redis_process):
    async with router(redis_process) as one, router(redis_process) as other:
        assert (await one.take("a", wanted(600.0))).granted
        redis_process.kill()
        for buckets in (one, other):
            began = asyncio.get_running_loop().time()
            granted = (await buckets.take("a", wanted(600.0))).granted
            assert granted is (buckets is other), "from where it last was: what this router has used is used"
            assert not (await buckets.take("a", wanted(600.0))).granted, "its own is a limit, too"
            assert asyncio.get_running_loop().time() - began < 4.0, "nobody waits for a Redis that is not there"
            assert buckets.alone
        redis_process.start()
        async with asyncio.timeout(10):
            while not (one.link.up and other.link.up):
                await asyncio.sleep(0.01)
        alone = len(one.alone)
        assert (await one.take("a", wanted(600.0))).granted, "this Redis has forgotten"
        assert not (await other.take("a", wanted(600.0))).granted, "and they share again"
        assert len(one.alone) == alone


async def test_a_slow_redis_costs_a_request_nothing_once_it_is_known_and_the_limit_stays_one(redis_process):
    loop = asyncio.get_running_loop()
    slowest = Rate(6, burst_s=6000.0)  # 600 at once as well, and one draw's worth again after 100 s

    async def takes(number, owner="a"):
        async def timed(buckets):
            began = loop.time()
            return (await buckets.take(owner, wanted(10.0, slowest))).granted, loop.time() - began

        return await asyncio.gather(*(timed(buckets) for _ in range(number) for buckets in (one, other)))

    async with (
        SlowRedis(redis_process.port) as slow,
        router(slow, 0.05, STEADY) as one,
        router(slow, 0.05, STEADY) as other,
    ):
        came_and_went = []
        one.link.presence.subscribe(came_and_went.append)
        slow.late_s = 0.1
        first = await takes(200)
        assert all(took_s < 5.0 for _, took_s in first), "they wait for it, but not one after the other"
        assert 60 <= sum(granted for granted, _ in first) <= 125, "each by itself until the first word came"
        async with asyncio.timeout(10):
            while one._telling or other._telling:  # words come and go
                await asyncio.sleep(0.01)
        alone = len(one.alone)
        began = loop.time()
        second = await takes(200)
        assert loop.time() - began < 2.0, "nobody waits any more"
        assert not any(granted for granted, _ in second), "what the other has given is known"
        assert len(one.alone) >= alone + 200
        await one.give("a", [Wanted(Kind.TOKENS, slowest, 5000.0)])
        await other.give("a", [Wanted(Kind.TOKENS, slowest, 5000.0)])
        assert any(granted for granted, _ in await takes(1)), "what is given back can be had"
        slow.late_s = 0.0
        async with asyncio.timeout(10):
            while one.alone:
                one.alone.clear()
                await one.take("b", wanted(1.0))
                await asyncio.sleep(0.05)
        assert came_and_went == [], "slow is not away"


async def test_who_leaves_while_redis_is_asked_has_taken_nothing(redis_process):
    async with SlowRedis(redis_process.port) as slow, router(slow) as buckets:
        slow.late_s = 0.05
        taking = asyncio.ensure_future(buckets.take("a", wanted(600.0)))
        await asyncio.sleep(0.02)
        taking.cancel()
        await asyncio.wait((taking,))
        async with asyncio.timeout(5):
            while not (await buckets.take("a", wanted(590.0))).granted:
                await asyncio.sleep(0.05)


async def test_a_router_with_a_redis_shares_its_limits_with_others(redis_process, tmp_path):
    config = router_config(
        tmp_path,
        limits=LimitsConfig(requests_per_minute=4),
        redis=RedisConfig(parse_redis_url(redis_process.url), **QUICK),
    )
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4}
    async with two_routers(config) as (one, other):
        codes = [(await router.http.post("/v1/completions", json=body)).status_code for router in (one, other) * 3]
        assert codes == [200] * 4 + [429] * 2


async def test_a_key_has_one_limit_of_tokens_at_all_routers(redis_process, tmp_path):
    """In tokens that were made, not in those that might have been; 1000 a minute are 17 a second, so time gives little back."""
    limited, free, path = new_key(), new_key(), tmp_path / "keys.json"
    owners = {"name": "a", "hash": hash_of(limited), "tokens_per_minute": 1000}, {"name": "b", "hash": hash_of(free)}
    path.write_text(json.dumps({"keys": owners}))
    redis = RedisConfig(parse_redis_url(redis_process.url), **QUICK)
    config = router_config(tmp_path, access=AccessConfig(api_keys=path), redis=redis)

    async def ask(router, key, max_tokens):
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": max_tokens == 450}
        return await router.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

    async with two_routers(config) as (one, other):
        whole, one.cluster.script = one.cluster.script, says([7])
        first = await ask(one, limited, 600)
        assert (first.status_code, first.headers["x-ratelimit-remaining-tokens"]) == (200, "397")
        assert first.json()["usage"]["completion_tokens"] < 5
        async with asyncio.timeout(8):  # by itself it would have enough after twelve seconds
            while (second := await ask(other, limited, 600)).status_code == 429:
                await asyncio.sleep(0.02)  # what the first did not use is given back beside it
        assert second.status_code == 200
        one.cluster.script = whole
        async with asyncio.timeout(8):
            while (third := await ask(one, limited, 450)).status_code == 429:
                await asyncio.sleep(0.02)
        assert third.json()["usage"]["completion_tokens"] == 450
        over = await ask(other, limited, 900)
        assert (over.status_code, over.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "1000 tokens per minute for 'a'" in over.json()["error"]["message"]
        assert (await ask(other, free, 900)).status_code == 200, "who has no limit is not in the way of who has one"
