"""Waiting for a connection ends with a word that callers know, whatever became of the channel."""

from __future__ import annotations

import asyncio

import pytest

from contracts.errors import WorkerLost
from rpc.channel import open_channel, wait_connected

NOBODY = "127.0.0.1:1"


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
