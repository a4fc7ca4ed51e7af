"""Waiting for a connection ends with a word that callers know, whatever became of the channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from contracts.errors import WorkerLost
from rpc.channel import open_channel, wait_connected, watch_connection
from rpc.server import RpcServer, ServerConfig

NOBODY = "127.0.0.1:1"


@pytest.fixture
async def connected() -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer(ServerConfig(), ())
    async with open_channel(f"127.0.0.1:{await server.start()}") as channel:
        await channel.channel_ready()
        yield channel
    await server.stop(0)


async def test_nobody_there() -> None:
    async with open_channel(NOBODY) as channel:
        with pytest.raises(WorkerLost, match="cannot connect within"):
            await wait_connected(channel, NOBODY, 0.05)


async def test_closed_before() -> None:
    channel = open_channel(NOBODY)
    await channel.close()
    with pytest.raises(WorkerLost, match="closed"):
        await wait_connected(channel, NOBODY, 5.0)


async def test_closed_while_it_waits() -> None:
    """A worker's next life is announced while a leg to its last one still connects."""
    channel = open_channel(NOBODY)
    waiting = asyncio.ensure_future(wait_connected(channel, NOBODY, 5.0))
    await asyncio.sleep(0)
    await channel.close()
    with pytest.raises(WorkerLost, match="closed"):
        await waiting


async def test_a_cancellation_is_never_lost(connected: grpc.aio.Channel) -> None:
    """A client may leave in the very turn in which its leg finds the connection there: `wait_for` would go on then."""
    for turns in range(6):
        waiting = asyncio.ensure_future(wait_connected(connected, "here", 5.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled() == cancelled, f"after {turns} turns"


async def test_a_peer_that_is_slow_to_answer_is_waited_for() -> None:
    """On a busy machine the first word may take long: an attempt that is given up early is only begun again, and again."""
    server = RpcServer(ServerConfig(), ())
    port = await server.start()
    attempts = 0

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0.4)
        there, to = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pass_on(reader, to), _pass_on(there, writer))

    async with await asyncio.start_server(late, "127.0.0.1", 0) as front:
        address = f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
        async with open_channel(address) as channel:
            await wait_connected(channel, address, 5.0)
            assert attempts == 1
    await server.stop(0)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
    writer.close()


async def test_a_connection_that_is_watched_is_not_closed_for_want_of_calls() -> None:
    """Such an end looks like a death: a worker that nobody had asked for five minutes got nothing for a second."""
    server, broken = RpcServer(ServerConfig(idle_s=0.3), ()), {"used": 0, "idle": 0}

    async def watch(name: str, use_every_s: float) -> None:
        def count() -> None:
            broken[name] += 1

        async with open_channel(address) as channel:
            await watch_connection(channel, count, use_every_s)

    address = f"127.0.0.1:{await server.start()}"
    watching = [asyncio.ensure_future(watch("used", 0.1)), asyncio.ensure_future(watch("idle", 60.0))]
    async with asyncio.timeout(10):
        while broken["idle"] < 2:
            await asyncio.sleep(0.05)
    assert broken["used"] == 0
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)
    await server.stop(0)
