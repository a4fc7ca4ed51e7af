"""Who answers at Redis's address is no Redis, or a damaged one: nothing of it ends what looks for Redis and listens to it."""

import asyncio
import contextlib

import pytest

from contracts.clock import MonotonicClock
from contracts.errors import InternalError, Unavailable
from registry.config import RedisConfig, parse_redis_url
from registry.link import RedisLink
from registry.subscription import Signal, Subscription
from router.workers.breaker_news import BreakerNews
from tests.integration.test_redis_link import QUICK, until

NONSENSE = (
    b":many\r\n",
    b"$many\r\n",
    b"*many\r\nx",
    b"-\xff\xfe\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"*1\r\n" * 5000 + b":1\r\n",
    b"$-9\r\n",
    b"\r\n",
)


class Impostor:
    """Answers whatever it is asked with `answer`; None: as a Redis that knows PING and SUBSCRIBE."""

    def __init__(self, answer):
        self.answer = answer
        self.num_asked = 0

    async def serve(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while asked := await reader.read(65536):
                self.num_asked += 1
                listened = b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n" if b"SUBSCRIBE" in asked else b"+PONG\r\n"
                writer.write(listened if self.answer is None else self.answer)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def linked(impostor):
    server = await asyncio.start_server(impostor.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    link = RedisLink(RedisConfig(parse_redis_url(f"redis://127.0.0.1:{port}/0"), **QUICK), MonotonicClock())
    link.start()
    try:
        yield link
    finally:
        await link.close()
        server.close()


@pytest.mark.parametrize("nonsense", NONSENSE, ids=repr)
async def test_a_link_that_heard_nonsense_is_there_again_when_redis_is(nonsense):
    impostor = Impostor(None)
    async with linked(impostor) as link:
        await until(lambda: link.up)
        impostor.answer = nonsense
        with pytest.raises(Unavailable):
            await link.run("GET", "x")
        asked = impostor.num_asked
        await until(lambda: impostor.num_asked > asked + 3)
        impostor.answer = None
        await until(lambda: link.up)
        assert await link.run("PING") == b"PONG"


@pytest.mark.parametrize("nonsense", NONSENSE, ids=repr)
async def test_a_subscription_that_heard_nonsense_listens_again(nonsense):
    impostor = Impostor(None)
    async with linked(impostor) as link:
        heard = Subscription(link, ["c"], MonotonicClock())
        assert await anext(heard) is Signal.LISTENING
        impostor.answer = nonsense
        assert await anext(heard) is Signal.DEAF
        impostor.answer = None
        assert await anext(heard) is Signal.LISTENING
        await heard.close()


class BrokenClock(MonotonicClock):
    """Lets nobody rest."""

    async def sleep(self, delay: float) -> None:
        raise RuntimeError(f"no rest of {delay} s")


async def test_news_that_nobody_listens_to_any_more_are_begun_anew_by_who_keeps_them_up():
    impostor = Impostor(None)
    async with linked(impostor) as link:
        await until(lambda: link.up)
        impostor.answer = NONSENSE[0]
        running = asyncio.ensure_future(BreakerNews(link, BrokenClock(), "r", lambda ref, reason: None).run())
        await asyncio.wait((running,), timeout=10)
        assert running.done(), "it goes on, deaf"
        (error,) = running.exception().exceptions
        assert isinstance(error, InternalError)
