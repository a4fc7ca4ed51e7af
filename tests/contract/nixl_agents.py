"""What is particular to one end of `nixl`, with its agent in this process: sources that linger, come and go, and strangers.

Not collected by itself: UCX may end the process that it is in. `test_nixl.py` runs this file in one of its own.
"""

import asyncio
import os
import socket

import numpy as np
import pytest

from contracts.errors import TransferFailed
from kv_transfer.connector import ByteRange, Write
from kv_transfer.listener import TargetLimits, listening
from kv_transfer.nixl_agent import Agent, Place
from kv_transfer.nixl_end import KIND, NixlEnd
from kv_transfer.nixl_wire import Introduction, pack_ask, pack_introduction
from kv_transfer.region import SharedRegion
from kv_transfer.sessions import reached_at
from kv_transfer.tcp_wire import greet, shut, wait_readable
from kv_transfer.windows import WindowTable
from tests.contract.test_connector import BIG, SIZE, end, quiesced

QUICK = TargetLimits(stall_s=2.0)


def place_of(region):
    memory = np.frombuffer(region.buffer, dtype=np.uint8)
    return Place(memory.ctypes.data, memory.nbytes)


class Alone:
    """As much of a Connector as these tests need, around an end whose windows are here."""

    def __init__(self):
        self.windows = WindowTable()

    def expose(self, region):
        door = listening(("127.0.0.1", 0))
        self.port = door.getsockname()[1]
        self.end = NixlEnd(place_of(region), door, self.windows, (QUICK, None))
        self.write, self.close = self.end.write, self.end.close

    def address(self):
        return reached_at(KIND, ("127.0.0.1", self.port), (None, None))

    def open_window(self, ranges):
        return self.windows.open(tuple(ranges))

    def close_window(self, key):
        return self.windows.close(key)


@pytest.fixture(params=["tcp,self", "all"])
def ways(request, monkeypatch):
    """What UCX may use: sockets alone, where the source's CPU takes part in every read, or whatever is best."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return request.param


async def test_a_source_lingers_when_its_connection_ends_in_mid_read(ways):
    """Nobody waits for these reads at the source; their target must get to their end all the same."""
    async with end(Alone, BIG) as target, end(Alone, BIG) as source:
        np.frombuffer(source.memory, dtype=np.uint8)[:] = 1
        for _ in range(3):
            target.memory[0] = 0
            key = target.connector.open_window([ByteRange(0, BIG)])
            writing = asyncio.ensure_future(source.connector.write(target.address, key, [Write(0, 0, BIG)]))
            while not target.memory[0]:
                await asyncio.sleep(0)
            for connection in tuple(target.connector.end.target._listener._connections):
                shut(connection)
            await asyncio.wait([writing])
            assert isinstance(writing.exception(), TransferFailed)
            assert source.connector.end.agent.lingers
            await quiesced(target.connector, key)
        key = target.connector.open_window([ByteRange(0, 10)])
        await source.connector.write(target.address, key, [Write(0, 0, 10)])  # and the pair goes on


async def test_sources_that_come_and_go_leave_nothing(ways):
    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    async with end(Alone) as target:
        before = None
        for _ in range(6):
            async with end(Alone) as source:
                key = target.connector.open_window([ByteRange(0, 10)])
                await asyncio.gather(
                    *(source.connector.write(target.address, key, [Write(0, 0, 10)]) for _ in range(4))
                )
                assert target.connector.close_window(key)
            for _ in range(500):
                if not target.connector.end.agent._remotes and not target.connector.end.target._listener._connections:
                    break
                await asyncio.sleep(0.01)
            assert not target.connector.end.agent._remotes
            before = before or held()
        after = held()
        assert after[0] <= before[0] + 2 and after[1] <= before[1] + 1


def test_an_idle_agent_has_no_thread_that_makes_progress():
    before = set(os.listdir("/proc/self/task"))
    with SharedRegion(SIZE) as region:
        agent = Agent(place_of(region))
        mine = set(os.listdir("/proc/self/task")) - before
        # UCX's own, which sleeps until a socket wakes it.
        assert len(mine) <= 1
        agent.close()
        agent.close()


def introduced(target, first):
    host, port = target.address.address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=5)
    greet(sock, None, 2.0)
    sock.sendall(first)
    return sock


def ended(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_strangers_cost_their_own_connection_only():
    async with end(Alone) as target, end(Alone, fill=lambda n: b"\x07" * n) as source:
        agent = source.connector.end.agent
        for first in (
            b"GET / HTTP/1.1\r\n\r\n" * 4,
            pack_introduction(Introduction("nobody", b"no metadata of an agent", agent.place)),
            pack_introduction(Introduction("another", agent.metadata, agent.place)),
        ):
            with introduced(target, first) as sock:
                assert await asyncio.to_thread(ended, sock)
        assert not any(target.memory)
        key = target.connector.open_window([ByteRange(0, 10)])
        await source.connector.write(target.address, key, [Write(0, 0, 10)])
        assert target.memory[:10] == b"\x07" * 10


async def test_a_region_that_is_claimed_but_not_registered_is_not_read():
    async with end(Alone) as target, end(Alone) as source:
        agent, place = source.connector.end.agent, source.connector.end.agent.place
        key = target.connector.open_window([ByteRange(0, SIZE)])
        claimed = Introduction(agent.name, agent.metadata, type(place)(place.address, place.num_bytes << 10))
        with introduced(target, pack_introduction(claimed)) as sock:
            await asyncio.to_thread(lambda: [agent.progress() for _ in iter(lambda: wait_readable(sock, 0), True)])
            sock.recv(100)
            sock.sendall(pack_ask(key, [Write(place.num_bytes, 0, SIZE)]))
            answer = await asyncio.to_thread(sock.recv, 100)
            assert answer and await asyncio.to_thread(ended, sock)
        await quiesced(target.connector, key)
        assert not any(target.memory)
