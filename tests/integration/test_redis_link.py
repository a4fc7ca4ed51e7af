"""The link to a real Redis: deadlines, coming and going, and a subscription that says when it may have missed something."""

import asyncio
import contextlib
import time

import pytest

from contracts.clock import MonotonicClock
from contracts.errors import Unavailable
from registry.config import RedisConfig, parse_redis_url
from registry.link import RedisLink, Script
from registry.subscription import Message, Signal, Subscription

QUICK = {
    "connect_timeout_s": 1.0,
    "command_timeout_s": 0.8,
    "check_s": 0.1,
    "min_backoff_s": 0.02,
    "max_backoff_s": 0.1,
}


@contextlib.asynccontextmanager
async def linked(process):
    link = RedisLink(RedisConfig(parse_redis_url(process.url), **QUICK), MonotonicClock())
    link.start()
    try:
        yield link
    finally:
        await link.close()


async def until(condition, limit_s=10.0):
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_commands_and_scripts_answer_as_redis_does(redis_process):
    async with linked(redis_process) as link:
        await link.presence.wait_up()
        assert await link.run("SET", "a", b"\x00\xff") == b"OK"
        assert await link.run("GET", "a") == b"\x00\xff"
        assert await link.run("GET", "b") is None
        both = Script("return {redis.call('INCR', KEYS[1]), ARGV[1]}")
        assert await link.script(both, ["n"], [b"x"]) == [1, b"x"]
        redis_process.command("SCRIPT", "FLUSH")
        assert await link.script(both, ["n"], ["y"]) == [2, b"y"], "brought back"
        with pytest.raises(Unavailable, match="WRONGTYPE"):
            await link.run("LPUSH", "a", "x")
        assert link.up, "a refusal is no absence"


async def test_while_redis_is_away_nobody_waits_and_afterwards_it_is_there_again(redis_process):
    async with linked(redis_process) as link:
        told = []
        link.presence.subscribe(told.append)
        await link.presence.wait_up()
        redis_process.kill()
        await until(lambda: not link.up)
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(Unavailable, match="away"):
                await link.run("PING")
        assert time.monotonic() - began < 0.2
        assert link.presence.problem
        assert link.presence.away_s > 0
        redis_process.start()
        await link.presence.wait_up()
        assert await link.run("PING") == b"PONG"
        assert told == [True, False, True]


async def test_a_redis_that_hangs_costs_a_deadline_and_is_away(redis_process):
    async with linked(redis_process) as link:
        await link.presence.wait_up()
        redis_process.pause()
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await link.run("PING")
        assert time.monotonic() - began < 3
        await until(lambda: not link.up)
        redis_process.resume()
        await link.presence.wait_up()
        assert await link.run("ECHO", "hello") == b"hello", "no answer of before is taken for this one"


async def test_a_caller_that_gives_up_leaves_no_answer_to_the_next(redis_process):
    async with linked(redis_process) as link:
        await link.presence.wait_up()
        for n in range(200):
            task = asyncio.ensure_future(link.run("ECHO", f"lost-{n}"))
            await asyncio.sleep(0.0002 * (n % 7))
            task.cancel()
            assert await link.run("ECHO", str(n)) == str(n).encode()
            await asyncio.gather(task, return_exceptions=True)


async def test_many_at_once_share_the_connections(redis_process):
    async with linked(redis_process) as link:
        await link.presence.wait_up()
        answers = await asyncio.gather(*(link.run("INCR", "n", timeout_s=5.0) for _ in range(500)))
        assert sorted(answers) == list(range(1, 501))
        clients = redis_process.command("CLIENT", "LIST")
        assert clients.count(b" addr=") <= 3


async def test_no_redis_at_first_then_one(redis_process):
    redis_process.kill()
    async with linked(redis_process) as link:
        await until(
            lambda: "refused" in link.presence.problem.lower() or "Connect call failed" in link.presence.problem
        )
        assert not link.up
        redis_process.start()
        await link.presence.wait_up()


async def test_a_subscription_outlives_redis_and_says_what_it_may_have_missed(redis_process):
    async with linked(redis_process) as link:
        heard = Subscription(link, ["c", "d"], MonotonicClock())
        assert await anext(heard) is Signal.LISTENING
        redis_process.command("PUBLISH", "c", b"\xff1")
        redis_process.command("PUBLISH", "d", "2")
        assert [await anext(heard), await anext(heard)] == [Message("c", b"\xff1"), Message("d", b"2")]
        redis_process.kill()
        assert await anext(heard) is Signal.DEAF
        assert not heard.listening
        redis_process.start()
        assert await anext(heard) is Signal.LISTENING
        redis_process.pause()
        assert await anext(heard) is Signal.DEAF, "a PING went unanswered"
        redis_process.resume()
        assert await anext(heard) is Signal.LISTENING
        redis_process.command("PUBLISH", "c", "3")
        assert await anext(heard) == Message("c", b"3")
        await heard.close()
        assert [event async for event in heard] == [Signal.DEAF]


async def test_a_reader_that_is_too_slow_starts_anew(redis_process):
    async with linked(redis_process) as link:
        heard = Subscription(link, ["c"], MonotonicClock(), most_waiting=3)
        assert await anext(heard) is Signal.LISTENING
        for n in range(10):
            redis_process.command("PUBLISH", "c", str(n))
        await asyncio.sleep(0.2)
        events = []
        while heard._events:
            events.append(await anext(heard))
        assert events[0] is Signal.LISTENING, "what it lost is said before what is kept"
        assert len(events) <= 4
        await heard.close()


async def test_links_that_are_closed_under_their_users_leave_no_connection_behind(redis_process, caplog):
    links = []  # what they forgot would be closed with them
    for turns in range(150):
        link = RedisLink(RedisConfig(parse_redis_url(redis_process.url), **QUICK), MonotonicClock())
        links.append(link)
        link.start()
        for _ in range(turns % 30):
            await asyncio.sleep(0)
        asked = [asyncio.ensure_future(link.run("PING")) for _ in range(3)]
        for task in asked[: turns % 4]:
            await asyncio.sleep(0)
            task.cancel()
        await link.close()
        await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(Unavailable, match="closed"):
            await link.run("PING")
    await links[0].close()
    async with asyncio.timeout(5):
        while redis_process.command("CLIENT", "LIST").count(b" addr=") > 1:  # the one that asks
            await asyncio.sleep(0.01)
    assert "away" not in caplog.text
