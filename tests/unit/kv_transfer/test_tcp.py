"""What is particular to `tcp`: strangers and garbage on its port, limits, and lines that break."""

import asyncio
import socket
import struct

import psutil
import pytest

from contracts.errors import ConfigError, TransferFailed
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Write
from kv_transfer.lines import split_address
from kv_transfer.listener import TargetLimits
from kv_transfer.region import SharedRegion
from kv_transfer.tcp import TcpConnector
from kv_transfer.tcp_wire import (
    HELLO,
    BadFrame,
    Status,
    check_ack,
    pack_ack,
    pack_write,
    receive_exactly,
    send_all,
    shut,
    unpack_header,
    unpack_ranges,
    wait_readable,
)

SIZE = 1 << 16
HEADER = struct.Struct("<IIQQ")
MAGIC = HEADER.unpack_from(pack_write(0, []))[0]


@pytest.fixture
async def target():
    with SharedRegion(SIZE) as region:
        connector = TcpConnector(limits=TargetLimits(max_connections=4, stall_s=0.3))
        connector.expose(region)
        connector.region = region
        yield connector
        await connector.close()


@pytest.fixture
async def source():
    with SharedRegion(SIZE) as region:
        region.buffer[:] = b"\x07" * SIZE
        connector = TcpConnector()
        connector.expose(region)
        yield connector
        await connector.close()


def port_of(target):
    return int(target.address().address.rpartition(":")[2])


def stranger(target, *, hello=True):
    sock = socket.create_connection(("127.0.0.1", port_of(target)), timeout=5)
    if hello:
        sock.sendall(HELLO)
        assert sock.recv(100) == HELLO
    return sock


def ended(sock):
    """Whether the target has ended this connection, within a second."""
    sock.settimeout(1.0)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


async def still_serves(target, source):
    key = target.open_window([ByteRange(0, 8)])
    await source.write(target.address(), key, [Write(0, 0, 8)])
    assert target.region.buffer[:8] == b"\x07" * 8
    assert target.close_window(key)


GARBAGE = {
    "no hello": (False, b"GET / HTTP/1.1\r\n\r\n"),
    "another version": (False, HELLO[:-1] + b"\x01"),
    "random": (True, bytes(range(1, 25))),
    "huge range count": (True, HEADER.pack(MAGIC, 2**32 - 1, 1, 0)),
    "huge length": (True, HEADER.pack(MAGIC, 1, 1, 2**63)),
    "does not add up": (True, HEADER.pack(MAGIC, 1, 1, 10) + struct.pack("<QQ", 0, 11)),
    "overflowing ranges": (True, HEADER.pack(MAGIC, 2, 1, 0) + struct.pack("<4Q", 0, 2**63, 0, 2**63)),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_costs_its_own_connection_only(target, source, what):
    hello, data = GARBAGE[what]
    with stranger(target, hello=hello) as sock:
        sock.sendall(data)
        assert await asyncio.to_thread(ended, sock)
    assert not any(target.region.buffer)
    await still_serves(target, source)


@pytest.mark.parametrize("data", [b"", HELLO[:3]])
async def test_a_silent_stranger_is_ended_and_blocks_nobody(target, source, data):
    with stranger(target, hello=False) as sock:
        sock.sendall(data)
        await still_serves(target, source)
        assert await asyncio.to_thread(ended, sock)


async def test_a_stall_within_a_frame_is_ended_but_silence_between_frames_is_not(target, source):
    key = target.open_window([ByteRange(100, 100)])
    with stranger(target) as idle, stranger(target) as header, stranger(target) as body, stranger(target) as refused:
        header.sendall(pack_write(key, [ByteRange(100, 10)])[:10])
        body.sendall(pack_write(key, [ByteRange(100, 10)]) + b"12345")
        refused.sendall(pack_write(key + 1, [ByteRange(100, 10)]) + b"12345")
        for sock in (header, body, refused):
            assert await asyncio.to_thread(ended, sock)
        idle.sendall(pack_write(key, [ByteRange(150, 2)]) + b"ok")
        assert await asyncio.to_thread(idle.recv, 100) == pack_ack(Status.LANDED, key)
    assert bytes(target.region.buffer[100:106]) == b"12345\0"
    assert target.close_window(key)


@pytest.mark.parametrize("key_offset", [0, 1])
async def test_a_writer_that_leaves_in_mid_write(target, source, key_offset):
    key = target.open_window([ByteRange(0, SIZE)])
    with stranger(target) as sock:
        sock.sendall(pack_write(key + key_offset, [ByteRange(0, 1000)]) + b"x" * 500)
        sock.shutdown(socket.SHUT_WR)
        assert await asyncio.to_thread(ended, sock)
    assert target.close_window(key)
    await still_serves(target, source)


async def test_late_bytes_go_to_scratch_and_the_line_stays_in_step(target):
    key = target.open_window([ByteRange(0, SIZE)])
    other = target.open_window([ByteRange(0, SIZE)])
    with stranger(target) as sock:
        sock.sendall(pack_write(key, [ByteRange(0, 10), ByteRange(10, SIZE - 10)]) + b"12345")
        while target.region.buffer[4] == 0:
            await asyncio.sleep(0.001)
        assert target.close_window(key)  # the writer waits in mid-write: nobody is inside
        sock.sendall(b"6" * (SIZE - 5))
        assert await asyncio.to_thread(sock.recv, 100) == pack_ack(Status.CLOSED, key)
        assert bytes(target.region.buffer[:10]) == b"12345\0\0\0\0\0"
        sock.sendall(pack_write(other, [ByteRange(0, 1)]) + b"!")
        assert await asyncio.to_thread(sock.recv, 100) == pack_ack(Status.LANDED, other)


async def test_an_empty_frame_asks_whether_the_window_is_open(target):
    key = target.open_window([])
    window = target._windows.get(key)
    with stranger(target) as sock:
        sock.sendall(pack_write(key, []))
        assert await asyncio.to_thread(sock.recv, 100) == pack_ack(Status.LANDED, key)
        assert window.enter()
        assert not target.close_window(key)  # closing, with somebody inside
        sock.sendall(pack_write(key, []))
        assert await asyncio.to_thread(sock.recv, 100) == pack_ack(Status.CLOSED, key)
        window.leave()


async def test_connections_are_bounded(target, source, caplog):
    guests = [stranger(target) for _ in range(4)]
    with stranger(target, hello=False) as late:
        assert await asyncio.to_thread(ended, late)
    assert "turned away: 4 connections" in caplog.text
    with pytest.raises(TransferFailed):
        await source.connect(target.address())
    for guest in guests:
        guest.close()
    for _ in range(100):
        try:
            await source.connect(target.address())
            break
        except TransferFailed:
            await asyncio.sleep(0.01)
    await still_serves(target, source)


async def test_closing_ends_connections_that_are_in_the_middle_of_something():
    with SharedRegion(SIZE) as region:
        target = TcpConnector(limits=TargetLimits(stall_s=60.0))
        target.expose(region)
        key = target.open_window([ByteRange(0, SIZE)])
        with stranger(target) as idle, stranger(target) as busy:
            busy.sendall(pack_write(key, [ByteRange(0, 100)]) + b"x")
            await asyncio.wait_for(target.close(), 20)  # far below the stall limit
            assert ended(idle)
            assert ended(busy)


async def test_a_target_that_restarts_on_its_port_is_reached_by_a_new_line(source):
    with SharedRegion(SIZE) as region:
        first = TcpConnector()
        first.expose(region)
        port = port_of(first)
        await source.connect(first.address())
        await first.close()
        second = TcpConnector(port=port)
        second.expose(region)
        key = second.open_window([ByteRange(0, 10)])
        await source.write(second.address(), key, [Write(0, 0, 10)])
        assert region.buffer[:10] == b"\x07" * 10
        await second.close()


def lines_to(ports):
    """How many sockets of this process are connected to these ports: only this test's, whatever else it has open."""
    return sum(1 for line in psutil.Process().net_connections("tcp") if line.raddr and line.raddr.port in ports)


async def test_targets_that_have_ended_are_let_go_and_others_are_not(target, source):
    await source.connect(target.address())
    ended_ports: set[int] = set()
    for _ in range(4):  # a peer that restarts again and again, each time at an address of its own
        with SharedRegion(SIZE) as region:
            peer = TcpConnector()
            peer.expose(region)
            port = port_of(peer)
            key = peer.open_window([ByteRange(0, 10)])
            await asyncio.gather(*(source.write(peer.address(), key, [Write(0, 0, 10)]) for _ in range(3)))
            assert lines_to({port}) > 0
            assert lines_to(ended_ports - {port}) == 0  # the system may give a port again
            await peer.close()
            ended_ports.add(port)
    known = list(source._lines.reached)
    assert known[0] == target.address()
    assert len(known) == 2


async def test_a_target_that_somebody_waits_for_is_kept(target, source):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = ConnectorAddress("tcp", f"127.0.0.1:{silent.getsockname()[1]}")
        connecting = asyncio.ensure_future(source.connect(address))
        accepted, _ = await asyncio.to_thread(silent.accept)
        await source.connect(target.address())
        assert list(source._lines.reached) == [address, target.address()]
        accepted.close()
    with pytest.raises(TransferFailed):
        await connecting


async def test_a_busy_port_is_a_config_error(target):
    with SharedRegion(SIZE) as region, pytest.raises(ConfigError, match="cannot listen on 127"):
        TcpConnector(port=port_of(target)).expose(region)


async def test_what_listens_but_is_not_one_of_ours(source):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ConnectorAddress("tcp", f"127.0.0.1:{server.getsockname()[1]}")

        def serve():
            sock, _ = server.accept()
            sock.sendall(b"220 mail ready\r\n")
            sock.close()

        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        with pytest.raises(TransferFailed):
            await source.connect(address)
        await serving


async def test_a_write_stopped_before_its_thread_has_a_line(target, source):
    key = target.open_window([ByteRange(0, SIZE)])
    for _ in range(30):
        writing = asyncio.ensure_future(source.write(target.address(), key, [Write(0, 0, 100)]))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    assert target.close_window(key)


async def test_more_ranges_than_a_frame_holds(source):
    size = 1 << 20
    with SharedRegion(size) as there, SharedRegion(size) as here:
        here.buffer[:] = b"\x05" * size
        one, other = TcpConnector(), TcpConnector()
        one.expose(here)
        other.expose(there)
        key = other.open_window([ByteRange(0, size)])
        await one.write(other.address(), key, [Write(at, at, 1) for at in range(70_000)])
        assert there.buffer[:70_000] == b"\x05" * 70_000
        await one.close()
        await other.close()


async def test_close_waits_for_a_write(source):
    size = 32 << 20
    with SharedRegion(size) as there, SharedRegion(size) as here:
        one, other = TcpConnector(), TcpConnector()
        one.expose(here)
        other.expose(there)
        key = other.open_window([ByteRange(0, size)])
        writing = asyncio.ensure_future(one.write(other.address(), key, [Write(0, 0, size)]))
        while not one._lines.num_working:
            await asyncio.sleep(0)
        await one.close()
        assert not one._lines.num_working
        await writing
        await other.close()


async def test_a_listener_that_fails_says_so_and_can_be_closed(target, caplog):
    shut(target._target._listener._socket)
    for _ in range(300):
        if "cannot accept" in caplog.text:
            break
        await asyncio.sleep(0.01)
    assert "cannot accept" in caplog.text


def test_ending_what_has_ended_is_fine():
    with socket.socket() as sock:
        shut(sock)


async def test_ipv6_and_advertised_names():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with SharedRegion(SIZE) as region:
        connector = TcpConnector(host="::1")
        try:
            connector.expose(region)
        except ConfigError:
            pytest.skip("no IPv6 here")
        assert connector.address().address.startswith("[::1]:")
        await connector.connect(connector.address())
        await connector.close()
        named = TcpConnector(advertised=("decode-1.example", None))
        named.expose(region)
        assert named.address().address.startswith("decode-1.example:")
        await named.close()


async def test_what_stands_before_it_may_have_a_port_of_its_own():
    with SharedRegion(SIZE) as region:
        connector = TcpConnector(advertised=("gate.example", 7070))
        connector.expose(region)
        assert connector.address() == ConnectorAddress("tcp", "gate.example:7070")
        await connector.close()
        near = TcpConnector(advertised=(None, 7070))
        near.expose(region)
        assert near.address() == ConnectorAddress("tcp", "127.0.0.1:7070")
        await near.close()


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:70000", "host:-1"])
def test_addresses_that_are_none(text):
    with pytest.raises(TransferFailed, match="is not host:port"):
        split_address(ConnectorAddress("tcp", text), "tcp")


def test_addresses():
    assert split_address(ConnectorAddress("tcp", "a.b:7"), "tcp") == ("a.b", 7)
    assert split_address(ConnectorAddress("tcp", "[::1]:7"), "tcp") == ("::1", 7)


def test_frames_round_trip():
    ranges = (ByteRange(5, 6), ByteRange(100, 0), ByteRange(2**40, 2**20))
    raw = pack_write(2**62 + 1, ranges)
    header = unpack_header(raw[:24], 2**41)
    assert (header.key, header.num_bytes) == (2**62 + 1, 6 + 2**20)
    assert unpack_ranges(raw[24:], header) == ranges
    with pytest.raises(BadFrame):
        unpack_header(raw[:24], 2**20)


def test_acknowledgements():
    key = 2**62 + 1
    check_ack(pack_ack(Status.LANDED, key), key)
    for status, message in ((Status.CLOSED, "closed"), (Status.OUTSIDE, "outside"), (Status.FAILED, "could not read")):
        with pytest.raises(TransferFailed, match=message):
            check_ack(pack_ack(status, key), key)
    for raw in (b"1234567890123456", pack_ack(Status.LANDED, key + 1)):  # the latter speaks of another grant's write
        with pytest.raises(BadFrame, match="of this write"):
            check_ack(raw, key)


def test_many_buffers_go_out_whole_and_in_order():
    one, other = socket.socketpair()
    with one, other:
        parts = [memoryview(bytes([n % 251]) * (n % 7)) for n in range(2000)]
        send_all(one, parts)
        want = b"".join(parts)
        assert receive_exactly(other, len(want), 1.0) == want
        assert not wait_readable(other, 0)
        with pytest.raises(BadFrame, match="nothing more"):
            receive_exactly(other, 1, 0.01)
        one.sendall(b"abc")
        one.close()
        with pytest.raises(BadFrame, match="ended"):
            receive_exactly(other, 4, 1.0)
