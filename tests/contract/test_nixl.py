"""What is particular to `nixl`: reads that are fenced to their end, and a process of its own that may die."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import ConfigError, TransferFailed
from contracts.worker import ConnectorAddress
from kv_transfer import nixl, nixl_life
from kv_transfer.connector import ByteRange, Write
from kv_transfer.listener import TargetLimits
from kv_transfer.nixl import NixlConnector
from kv_transfer.nixl_agent import Place, has_rdma, why_not
from kv_transfer.nixl_target import PIECE_BYTES, pieces
from kv_transfer.nixl_wire import (
    MAX_WRITES,
    Introduction,
    pack_ask,
    pack_introduction,
    receive_ask,
    receive_introduction,
)
from kv_transfer.region import SharedRegion
from kv_transfer.tcp_wire import HEADER_BYTES, BadFrame
from tests.contract.test_connector import (
    BIG,
    ROOT,
    SIZE,
    child,
    end,
    go_on,
    of_session,
    quiesced,
    said,
    snapshot,
    stop,
    stopped_writer,
)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
QUICK = TargetLimits(stall_s=2.0)


@pytest.fixture(params=["tcp,self", "all"])
def ways(request, monkeypatch):
    """What UCX may use: sockets alone, where the source's CPU takes part in every read, or whatever is best."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return request.param


def connector():
    return NixlConnector(limits=QUICK)


@pytest.mark.long  # once, on a crowded machine, it did not end within two minutes: not known yet why
def test_agents_in_one_process():
    """In a process of its own, which UCX may end."""
    file = Path(__file__).with_name("nixl_agents.py")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(file)], cwd=ROOT, stdout=-1, stderr=subprocess.STDOUT, text=True
    )
    assert ran.returncode == 0, ran.stdout


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
        go_on(process)
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
        go_on(process)
        assert (await said(process))[0] == "failed"
        assert np.array_equal(after, snapshot(target))


async def test_a_cancelled_write_ends_when_its_target_is_stopped(ways):
    async with end(connector, BIG) as source, child("target", "nixl", BIG) as process:
        address, key = await said(process)
        where = ConnectorAddress("nixl", address)
        await source.connector.connect(where)
        stop(process)
        writing = asyncio.ensure_future(source.connector.write(where, int(key), [Write(0, 0, BIG)]))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(writing, 10)
        go_on(process)


def its_process(connector):
    """The process in which a connector has NIXL now."""
    return connector._exposed.lives.life._process


async def next_life(connector, before):
    """Wait until another process than `before` takes orders."""
    while True:
        try:
            life = connector._exposed.lives.life
        except TransferFailed:
            life = None
        if life is not None and life._process.pid != before.pid and life._ready:
            return
        await asyncio.sleep(0.01)


async def landed(source, target):
    """A write from one to the other lands."""
    key = target.connector.open_window([ByteRange(0, 10)])
    await source.connector.write(target.address, key, [Write(0, 0, 10)])
    assert target.connector.close_window(key)


def has_ucx(pid):
    return "libucp" in Path(f"/proc/{pid}/maps").read_text()


async def test_no_ucx_is_loaded_here():
    """So there is none that could end this process."""
    async with end(connector) as target, end(connector) as source:
        await landed(source, target)
        assert has_ucx(its_process(target.connector).pid)
        assert not has_ucx("self")


async def test_closing_waits_for_what_is_under_way():
    async with end(connector, BIG) as target, end(connector, BIG) as source:
        key = target.connector.open_window([ByteRange(0, BIG)])
        writing = asyncio.ensure_future(source.connector.write(target.address, key, [Write(0, 0, BIG)]))
        await asyncio.sleep(0)
        await source.connector.close()
        assert writing.done()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
@pytest.mark.parametrize("whose", ["source", "target"])
async def test_its_process_dies_while_idle_and_the_next_takes_over(whose, number, caplog):
    async with end(connector) as target, end(connector, fill=lambda n: b"\x07" * n) as source:
        key = target.connector.open_window([ByteRange(0, SIZE)])
        await source.connector.write(target.address, key, [Write(0, 0, 10)])
        dying = (source if whose == "source" else target).connector
        address, before = target.address, its_process(dying)
        before.send_signal(number)
        await next_life(dying, before)
        assert f"was ended by {signal.Signals(number).name}" in caplog.text
        assert target.address == address
        await source.connector.write(address, key, [Write(0, 10, 10)])  # a window outlives it
        assert target.memory[:20] == b"\x07" * 20
        assert target.connector.close_window(key)


@pytest.mark.parametrize("whose", ["source", "target"])
async def test_its_process_dies_in_mid_write(ways, whose):
    """The write fails, the window is quiesced at once, nothing lands any more, and the pair goes on."""
    async with end(connector, BIG) as target, end(connector, BIG) as source:
        np.frombuffer(source.memory, dtype=np.uint8)[:] = 1
        dying = (source if whose == "source" else target).connector
        for _ in range(10):  # on a busy machine a write may be over before we look
            target.memory[0] = target.memory[BIG - 1] = 0
            key = target.connector.open_window([ByteRange(0, BIG)])
            writing = asyncio.ensure_future(source.connector.write(target.address, key, [Write(0, 0, BIG)]))
            while not target.memory[0]:
                await asyncio.sleep(0)
            before = its_process(dying)
            before.kill()
            await asyncio.wait([writing])
            await quiesced(target.connector, key)
            after = snapshot(target)
            await next_life(dying, before)
            await landed(source, target)
            assert np.array_equal(after[10:], snapshot(target)[10:])
            if isinstance(writing.exception(), TransferFailed):
                return
        pytest.fail("it never died in mid-write")


async def test_a_peer_that_is_killed_in_mid_write_costs_this_process_nothing(monkeypatch):
    """Where UCX reads through memory that its source fills, the source's UCX ends its process now and then. Not this one."""
    monkeypatch.setenv("UCX_TLS", "posix,sysv,tcp,self")
    async with end(connector, BIG) as source, end(connector) as other:
        for turn in range(5):
            async with child("target", "nixl", BIG) as process:
                address, key = await said(process)
                where = ConnectorAddress("nixl", address)
                writing = asyncio.ensure_future(source.connector.write(where, int(key), [Write(0, 0, BIG)]))
                await asyncio.sleep(0.005 * turn)
                process.kill()
                await asyncio.wait([writing])
                await process.wait()
        while True:  # between two lives it refuses
            try:
                await landed(source, other)
                break
            except TransferFailed:
                await asyncio.sleep(0.05)


async def test_its_process_ends_with_its_worker():
    async with child("target", "nixl", SIZE) as process:
        await said(process)
        (mine,) = [pid for pid, _ in of_session(process.pid) if pid != process.pid]
        stop(process)  # even so
        process.kill()
        await process.wait()
        while any(pid == mine for pid, _ in of_session(process.pid)):
            await asyncio.sleep(0.01)


async def test_a_process_that_hangs_is_killed_when_a_write_is_given_up(monkeypatch):
    monkeypatch.setattr(nixl, "_CANCEL_PATIENCE_S", 0.05)
    async with end(connector) as target, end(connector) as source:
        await landed(source, target)
        key, before = target.connector.open_window([ByteRange(0, 10)]), its_process(source.connector)
        before.send_signal(signal.SIGSTOP)
        writing = asyncio.ensure_future(source.connector.write(target.address, key, [Write(0, 0, 10)]))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert before.returncode == -signal.SIGKILL
        await next_life(source.connector, before)
        await landed(source, target)


async def test_a_process_that_takes_no_orders_is_killed(monkeypatch, caplog):
    monkeypatch.setattr(nixl_life, "_SEND_TIMEOUT", nixl_life.struct.pack("ll", 0, 50_000))
    async with end(connector) as target, end(connector) as source:
        before = its_process(source.connector)
        before.send_signal(signal.SIGSTOP)
        many = [Write(0, 0, 0)] * 500_000
        with pytest.raises(TransferFailed, match="its process was ended by SIGKILL"):
            await source.connector.write(target.address, 1, many)
        assert "takes no orders" in caplog.text


async def test_it_closes_though_its_process_hangs(monkeypatch):
    monkeypatch.setattr(nixl, "_CLOSE_PATIENCE_S", 0.05)
    async with end(connector) as one:
        before = its_process(one.connector)
        before.send_signal(signal.SIGSTOP)
        await one.connector.close()
        assert before.returncode == -signal.SIGKILL


async def test_what_cannot_start_is_a_config_error(monkeypatch):
    monkeypatch.setattr(nixl_life, "_MODULE", "json.tool")  # which takes these arguments for files
    with SharedRegion(SIZE) as region, pytest.raises(ConfigError, match="does not start"):
        connector().expose(region)


async def test_memory_that_is_refused_is_a_config_error(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "none such")
    with SharedRegion(SIZE) as region, pytest.raises(ConfigError, match="cannot register DRAM memory"):
        connector().expose(region)


async def test_memory_of_this_process_alone_is_a_config_error():
    def no_memfd(name):
        raise OSError

    with SharedRegion(SIZE, make_memfd=no_memfd) as region, pytest.raises(ConfigError, match="memfd"):
        connector().expose(region)


async def test_while_none_can_be_started_writes_fail_and_then_they_do_not(monkeypatch, caplog):
    async with end(connector) as target, end(connector) as source:
        with monkeypatch.context() as broken:
            broken.setattr(nixl_life, "_MODULE", "json.tool")
            its_process(source.connector).kill()
            while "cannot start" not in caplog.text:
                await asyncio.sleep(0.01)
            with pytest.raises(TransferFailed, match="is being started"):
                while True:
                    await source.connector.write(target.address, 1, [])
        while True:
            try:
                await landed(source, target)
                return
            except TransferFailed:
                await asyncio.sleep(0.05)


async def test_it_closes_between_two_lives_and_before_the_first_order(monkeypatch):
    for wait in (False, True):
        async with end(connector) as one:
            its_process(one.connector).kill()
            while wait:
                try:
                    its_process(one.connector)
                    await asyncio.sleep(0)
                except TransferFailed:
                    break
            await one.connector.close()


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
        one.sendall(pack_ask(1, [Write(0, 0, 0)] * (MAX_WRITES + 1))[:HEADER_BYTES])
        with pytest.raises(BadFrame, match="beyond all limits"):
            receive_ask(other, 1, 1.0)
        who = Introduction("it", b"metadata", Place(2**40, 2**30, "VRAM", 3))
        one.sendall(pack_introduction(who))
        assert receive_introduction(other, 1.0) == who
        one.sendall(pack_introduction(Introduction("it", b"", Place(0, 1, "DISK"))))
        with pytest.raises(BadFrame, match="'DISK' cannot be read"):
            receive_introduction(other, 1.0)
        one.sendall(b"x" * 100)
        with pytest.raises(BadFrame, match="introduce"):
            receive_introduction(other, 1.0)


def test_rdma_is_looked_for(tmp_path):
    assert not has_rdma(tmp_path / "none")
    assert not has_rdma(tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert has_rdma(tmp_path)
