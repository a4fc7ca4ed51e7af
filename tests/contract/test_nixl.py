"""What is particular to `nixl`: reads that are fenced to their end, sources that linger, strangers, and peers that come back."""

import asyncio
import os
import signal
import socket

import numpy as np
import pytest

from contracts.errors import ConfigError, TransferFailed
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Write
from kv_transfer.listener import TargetLimits
from kv_transfer.nixl import NixlConnector, host_memory
from kv_transfer.nixl_agent import Agent, has_rdma, why_not
from kv_transfer.nixl_target import PIECE_BYTES, pieces
from kv_transfer.nixl_wire import Introduction, pack_ask, pack_introduction, receive_ask, receive_introduction
from kv_transfer.region import SharedRegion
from kv_transfer.tcp_wire import BadFrame, greet, shut, wait_readable
from tests.contract.test_connector import BIG, SIZE, child, end, quiesced, said, snapshot, stopped_writer

# Long, because UCX may end the whole process, and with it the tests that share it.
pytestmark = [pytest.mark.long, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
QUICK = TargetLimits(stall_s=2.0)


@pytest.fixture(params=["tcp,self", "all"])
def ways(request, monkeypatch):
    """What UCX may use: sockets alone, where the source's CPU takes part in every read, or whatever is best."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return request.param


def connector():
    return NixlConnector(limits=QUICK)


async def test_nothing_of_a_stopped_source_lands_once_its_window_is_quiesced(monkeypatch):
    """Over sockets a read needs its source: what has not reached this machine is under way for as long as that is stopped."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with end(connector, BIG) as target, stopped_writer(target, "nixl") as (process, key):
        before = (
            snapshot(target) if target.connector.close_window(key) else None
        )  # what was on its way may have been all
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert before is None or target.connector.close_window(key)
        os.kill(process.pid, signal.SIGCONT)
        await quiesced(target.connector, key)
        after = snapshot(target)
        assert before is None or np.array_equal(before, after)
        assert (await said(process))[0] == "failed"
        assert after[-1] == 0
        assert np.array_equal(after, snapshot(target))


async def test_a_target_closes_while_a_stopped_source_is_being_read(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with end(connector, BIG) as target, stopped_writer(target, "nixl") as (process, key):
        await asyncio.wait_for(target.connector.close(), 10)
        assert target.connector.close_window(key)
        after = snapshot(target)
        os.kill(process.pid, signal.SIGCONT)
        assert (await said(process))[0] == "failed"
        assert np.array_equal(after, snapshot(target))


async def test_a_source_lingers_when_its_connection_ends_in_mid_read(ways):
    """Nobody waits for these reads at the source; their target must get to their end all the same."""
    async with end(connector, BIG) as target, end(connector, BIG) as source:
        np.frombuffer(source.memory, dtype=np.uint8)[:] = 1
        for _ in range(3):
            target.memory[0] = 0
            key = target.connector.open_window([ByteRange(0, BIG)])
            writing = asyncio.ensure_future(source.connector.write(target.address, key, [Write(0, 0, BIG)]))
            while not target.memory[0]:
                await asyncio.sleep(0)
            for connection in tuple(target.connector._target._listener._connections):
                shut(connection)
            await asyncio.wait([writing])
            assert isinstance(writing.exception(), TransferFailed)
            assert source.connector._agent.lingers
            await quiesced(target.connector, key)
        key = target.connector.open_window([ByteRange(0, 10)])
        await source.connector.write(target.address, key, [Write(0, 0, 10)])  # and the pair goes on


async def test_a_cancelled_write_ends_when_its_target_is_stopped(ways):
    async with end(connector, BIG) as source, child("target", "nixl", BIG) as process:
        address, key = await said(process)
        where = ConnectorAddress("nixl", address)
        await source.connector.connect(where)
        os.kill(process.pid, signal.SIGSTOP)
        writing = asyncio.ensure_future(source.connector.write(where, int(key), [Write(0, 0, BIG)]))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(writing, 10)
        os.kill(process.pid, signal.SIGCONT)


async def test_sources_that_come_and_go_leave_nothing(ways):
    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    async with end(connector) as target:
        before = None
        for _ in range(6):
            async with end(connector) as source:
                key = target.connector.open_window([ByteRange(0, 10)])
                await asyncio.gather(
                    *(source.connector.write(target.address, key, [Write(0, 0, 10)]) for _ in range(4))
                )
                assert target.connector.close_window(key)
            for _ in range(500):
                if not target.connector._agent._remotes and not target.connector._target._listener._connections:
                    break
                await asyncio.sleep(0.01)
            assert not target.connector._agent._remotes
            before = before or held()
        after = held()
        assert after[0] <= before[0] + 2 and after[1] <= before[1] + 1


def test_an_idle_agent_has_no_thread_that_makes_progress():
    before = set(os.listdir("/proc/self/task"))
    with SharedRegion(SIZE) as region:
        agent = Agent(host_memory(region))
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
    async with end(connector) as target, end(connector, fill=lambda n: b"\x07" * n) as source:
        agent = source.connector._agent
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
    async with end(connector) as target, end(connector) as source:
        agent, place = source.connector._agent, source.connector._agent.place
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


async def test_a_busy_port_is_a_config_error():
    async with end(connector) as target:
        port = int(target.address.address.split(":")[1])
        with SharedRegion(SIZE) as region, pytest.raises(ConfigError, match="cannot listen"):
            NixlConnector(("127.0.0.1", port)).expose(region)


@pytest.mark.parametrize("lengths", [[], [0], [1, 0, 2], [PIECE_BYTES + 1, 5], [300] * 3000, [3 * PIECE_BYTES]])
def test_pieces_are_the_writes_and_no_larger_than_they_may_be(lengths):
    writes, at = [], 0
    for length in lengths:
        writes.append(Write(at + 7, at, length))
        at += length
    made = list(pieces(writes))
    assert all(0 < sum(w.length for w in piece) <= PIECE_BYTES and len(piece) <= 1024 for piece in made)
    flat = [w for piece in made for w in piece]
    covered = 0
    for w in flat:
        assert w.length and w.target_offset == covered and w.source_offset == covered + 7
        covered += w.length
    assert covered == at


def test_frames_round_trip_and_refuse_what_is_none():
    one, other = socket.socketpair()
    with one, other:
        writes = (Write(5, 6, 7), Write(0, 2**40, 0))
        one.sendall(pack_ask(2**62 + 1, writes))
        assert receive_ask(other, 2**41, 1.0) == (2**62 + 1, writes)
        bad = bytearray(pack_ask(1, writes))
        bad[-8] ^= 1
        one.sendall(bad)
        with pytest.raises(BadFrame, match="do not add up"):
            receive_ask(other, 2**41, 1.0)
        one.sendall(b"x" * 100)
        with pytest.raises(BadFrame, match="introduce"):
            receive_introduction(other, 1.0)


def test_rdma_is_looked_for(tmp_path):
    assert not has_rdma(tmp_path / "none")
    assert not has_rdma(tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert has_rdma(tmp_path)
