"""One suite for every connector: what `kv_transfer.connector` promises, with one process and with two."""

import asyncio
import os
import secrets
import shutil
import signal
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from contracts.clock import MonotonicClock
from contracts.errors import TransferFailed
from contracts.secret import ClusterSecret
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Write
from kv_transfer.listener import TargetLimits
from kv_transfer.local import LocalConnector, LocalHub
from kv_transfer.nixl import NixlConnector
from kv_transfer.nixl_agent import why_not
from kv_transfer.region import SharedRegion
from kv_transfer.shm import ShmConnector
from kv_transfer.tcp import TcpConnector

SIZE = 1 << 20
BIG = 128 << 20
NIXL = ["nixl", "nixl over sockets", "nixl with a secret"]
# Each test of `nixl` starts two processes more, a second together: its variants are part of every run where they differ.
SELDOM = [pytest.param(kind, marks=pytest.mark.long) for kind in NIXL[1:]]
KINDS = ["local", "shm", "tcp", "shm with a secret", "tcp with a secret", NIXL[0], *SELDOM]
BETWEEN_PROCESSES = ["shm", "tcp", *NIXL[:2]]
SECRET = ClusterSecret(b"the secret of one cluster")
CHILD = Path(__file__).with_name("connector_child.py")
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class End:
    """One worker's connector and memory."""

    connector: object
    region: SharedRegion

    @property
    def memory(self):
        return self.region.buffer

    @property
    def address(self):
        return self.connector.address()


@asynccontextmanager
async def end(make, num_bytes=SIZE, fill=None):
    region = SharedRegion(num_bytes)
    if fill is not None:
        region.buffer[:] = fill(num_bytes)
    connector = make()
    connector.expose(region)
    try:
        yield End(connector, region)
    finally:
        await connector.close()
        region.close()


@pytest.fixture
def make(request, monkeypatch):
    hub, clock = LocalHub(), MonotonicClock()
    if request.param in NIXL and why_not() is not None:
        pytest.skip(why_not())
    if request.param == "nixl over sockets":  # UCX reads it when an agent is made; a child process has it, too
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    quick = TargetLimits(stall_s=2.0)
    return {
        "local": lambda: LocalConnector(hub, clock),
        "shm": lambda: ShmConnector(piece_bytes=64 << 10),
        "tcp": lambda: TcpConnector(limits=quick),
        "shm with a secret": lambda: ShmConnector(piece_bytes=64 << 10, secret=SECRET),
        "tcp with a secret": lambda: TcpConnector(limits=quick, secret=SECRET),
        "nixl": lambda: NixlConnector(limits=quick),
        "nixl over sockets": lambda: NixlConnector(limits=quick),
        "nixl with a secret": lambda: NixlConnector(limits=quick, secret=SECRET),
    }[request.param]


@pytest.fixture
async def pair(make):
    async with end(make) as target, end(make, fill=secrets.token_bytes) as source:
        yield target, source


def on(*kinds):
    return pytest.mark.parametrize("make", kinds, indirect=True)


async def quiesced(connector, key, within_s=5.0):
    deadline = time.monotonic() + within_s
    while not connector.close_window(key):
        assert time.monotonic() < deadline, "the window is never quiesced"
        await asyncio.sleep(0.005)


async def write(source, target, key, writes):
    await source.connector.write(target.address, key, writes)


@on(*KINDS[:-2], *NIXL[1:])
async def test_bytes_land_where_they_were_sent_and_nowhere_else(pair):
    target, source = pair
    key = target.connector.open_window([ByteRange(4096, 8192), ByteRange(65536, 100)])
    await write(source, target, key, [Write(0, 4096, 8192), Write(9000, 65536, 100)])
    want = bytearray(SIZE)
    want[4096 : 4096 + 8192] = source.memory[:8192]
    want[65536 : 65536 + 100] = source.memory[9000:9100]
    assert target.memory == want


@on(*KINDS)
async def test_unaligned_and_single_bytes(pair):
    target, source = pair
    key = target.connector.open_window([ByteRange(1, 7), ByteRange(SIZE - 1, 1)])
    await write(source, target, key, [Write(3, 2, 5), Write(SIZE - 1, SIZE - 1, 1)])
    assert target.memory[1:8] == b"\0" + bytes(source.memory[3:8]) + b"\0"
    assert target.memory[SIZE - 1] == source.memory[SIZE - 1]


@on(*KINDS)
async def test_thousands_of_scattered_writes_in_one_call(pair):
    target, source = pair
    key = target.connector.open_window([ByteRange(0, SIZE)])
    step = 256
    places = list(range(0, SIZE, step))
    await write(source, target, key, [Write(at, SIZE - step - at, step) for at in places])
    for at in places[:: len(places) // 64]:
        assert target.memory[SIZE - step - at : SIZE - at] == source.memory[at : at + step]


@on(*KINDS)
async def test_nothing_to_write_is_still_checked(pair):
    target, source = pair
    key = target.connector.open_window([])
    await write(source, target, key, [])
    await write(source, target, key, [Write(5, 5, 0)])
    assert target.connector.close_window(key)
    with pytest.raises(TransferFailed):
        await write(source, target, key, [])
    assert not any(target.memory)


@on(*KINDS)
async def test_writes_may_span_ranges_that_touch(pair):
    target, source = pair
    key = target.connector.open_window([ByteRange(200, 100), ByteRange(0, 100), ByteRange(100, 100)])
    await write(source, target, key, [Write(0, 0, 300)])
    assert target.memory[:300] == source.memory[:300]


@on(*KINDS)
@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 1), (99, 1), (99, 2), (150, 51), (100, 101), (299, 2), (250, 20), (SIZE - 1, 1), (SIZE - 1, 10), (2**60, 1)],
)
async def test_a_byte_outside_the_window_is_refused_with_all_its_write(pair, offset, length):
    target, source = pair
    key = target.connector.open_window([ByteRange(100, 100), ByteRange(300, 100)])
    with pytest.raises(TransferFailed):
        await write(source, target, key, [Write(0, 100, 50), Write(0, offset, length)])
    assert not any(target.memory)
    await write(source, target, key, [Write(0, 100, 50)])  # and the pair goes on
    assert target.memory[100:150] == source.memory[:50]


@on(*KINDS)
async def test_forged_keys_are_refused(pair):
    target, source = pair
    key = target.connector.open_window([ByteRange(0, SIZE)])
    for forged in (0, 1, key ^ 1, key ^ (1 << 40), key + 1, 2**63 - 1):
        with pytest.raises(TransferFailed):
            await write(source, target, forged, [Write(0, 0, 10)])
    assert not any(target.memory)


@on(*KINDS)
async def test_keys_are_large_random_and_never_reused(make):
    async with end(make) as target:
        keys = []
        for _ in range(300):
            keys.append(target.connector.open_window([ByteRange(0, 1)]))
            assert target.connector.close_window(keys[-1])
        assert len(set(keys)) == len(keys)
        assert all(0 < key < 2**63 for key in keys)
        assert len({key >> 40 for key in keys}) > 290


@on(*KINDS)
async def test_a_closed_window_takes_nothing(pair):
    target, source = pair
    key = target.connector.open_window([ByteRange(0, SIZE)])
    other = target.connector.open_window([ByteRange(0, 10)])
    await write(source, target, key, [Write(0, 0, 10)])
    assert target.connector.close_window(key)
    assert target.connector.close_window(key)  # idempotent
    assert target.connector.close_window(secrets.randbits(60))  # never heard of: nothing can land under it
    with pytest.raises(TransferFailed):
        await write(source, target, key, [Write(0, 100, 10)])
    assert not any(target.memory[10:])
    await write(source, target, other, [Write(20, 0, 10)])
    assert target.memory[:10] == source.memory[20:30]


@on(*KINDS)
async def test_faults_of_the_caller_are_loud(pair):
    target, source = pair
    for bad in (ByteRange(SIZE, 1), ByteRange(-1, 1), ByteRange(0, -1)):
        with pytest.raises(ValueError, match="outside the region"):
            target.connector.open_window([bad])
    key = target.connector.open_window([ByteRange(0, SIZE)])
    for bad in (Write(SIZE, 0, 1), Write(-1, 0, 1), Write(0, 0, -1)):
        with pytest.raises(ValueError, match="outside the region"):
            await write(source, target, key, [bad])


@on(*KINDS)
async def test_addresses_that_lead_nowhere(pair):
    _, source = pair
    kind = source.address.kind
    for address in (
        ConnectorAddress(kind, "127.0.0.1:1"),
        ConnectorAddress(kind, "nowhere"),
        ConnectorAddress("post", source.address.address),
    ):
        with pytest.raises(TransferFailed):
            await source.connector.connect(address)
        with pytest.raises(TransferFailed):
            await source.connector.write(address, 1, [Write(0, 0, 1)])


@on(*KINDS)
async def test_connecting_is_idempotent_and_also_concurrent(pair):
    target, source = pair
    await asyncio.gather(*(source.connector.connect(target.address) for _ in range(5)))
    await source.connector.connect(target.address)


@on(*KINDS)
async def test_one_connector_is_both_source_and_target(pair):
    one, other = pair
    there = one.connector.open_window([ByteRange(0, 1000)])
    back = other.connector.open_window([ByteRange(5000, 1000)])
    itself = other.connector.open_window([ByteRange(8000, 100)])
    await write(other, one, there, [Write(0, 0, 1000)])
    await write(one, other, back, [Write(0, 5000, 1000)])
    await write(other, other, itself, [Write(5000, 8000, 100)])
    assert other.memory[5000:6000] == other.memory[:1000]
    assert other.memory[8000:8100] == other.memory[:100]


@on(*KINDS)
async def test_many_writers_at_once(make):
    async with end(make) as target, end(make, fill=secrets.token_bytes) as a, end(make, fill=secrets.token_bytes) as b:
        share = SIZE // 16
        jobs = []
        for i in range(16):
            source = (a, b)[i % 2]
            key = target.connector.open_window([ByteRange(i * share, share)])
            half = share // 2
            jobs.append(write(source, target, key, [Write(i * share, i * share, half)]))
            jobs.append(write(source, target, key, [Write(i * share + half, i * share + half, half)]))
        await asyncio.gather(*jobs)
        for i in range(16):
            source = (a, b)[i % 2]
            assert target.memory[i * share : (i + 1) * share] == source.memory[i * share : (i + 1) * share]


@on(*KINDS)
async def test_after_close_nothing_works_and_closing_again_is_fine(make):
    async with end(make) as target, end(make) as source:
        address = target.address
        key = target.connector.open_window([ByteRange(0, 10)])
        await source.connector.connect(address)
        await target.connector.close()
        await target.connector.close()
        assert target.connector.close_window(key)
        with pytest.raises(TransferFailed):
            target.connector.open_window([ByteRange(0, 10)])
        with pytest.raises(TransferFailed):
            await source.connector.write(address, key, [Write(0, 0, 10)])
        await source.connector.close()
        with pytest.raises(TransferFailed):
            await source.connector.write(address, key, [Write(0, 0, 10)])
        with pytest.raises(TransferFailed):
            await source.connector.connect(address)


@on("shm", "tcp", "nixl")
async def test_a_connector_without_memory_refuses(make):
    connector = make()
    with pytest.raises(TransferFailed):
        connector.address()
    with pytest.raises(TransferFailed):
        connector.open_window([])
    assert connector.close_window(7)
    await connector.close()


@on(*BETWEEN_PROCESSES)
async def test_a_cancelled_write_is_over_when_it_raises(make):
    size = 32 << 20
    async with end(make, size) as target, end(make, size) as source:
        np.frombuffer(source.memory, dtype=np.uint8)[:] = 1
        key = target.connector.open_window([ByteRange(0, size)])
        writing = asyncio.ensure_future(write(source, target, key, [Write(0, 0, size)]))
        while not target.memory[0]:
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        np.frombuffer(source.memory, dtype=np.uint8)[:] = 2  # the source is reused at once
        await quiesced(target.connector, key)
        assert 2 not in np.unique(np.frombuffer(target.memory, dtype=np.uint8))


@on(*BETWEEN_PROCESSES)
async def test_a_window_that_closes_during_a_write_ends_it(make):
    size = 64 << 20
    async with end(make, size) as target, end(make, size) as source:
        np.frombuffer(source.memory, dtype=np.uint8)[:] = 1
        for _ in range(10):  # on a busy machine a write may be over before we look
            target.memory[0] = target.memory[size - 1] = 0
            key = target.connector.open_window([ByteRange(0, size)])
            writing = asyncio.ensure_future(write(source, target, key, [Write(0, 0, size)]))
            while not target.memory[0]:
                await asyncio.sleep(0)
            await quiesced(target.connector, key)
            landed = snapshot(target)
            await asyncio.wait([writing])
            assert np.array_equal(landed, snapshot(target))
            if landed[-1] == 0:
                assert isinstance(writing.exception(), TransferFailed)
                return
            assert writing.exception() is None or isinstance(writing.exception(), TransferFailed)
        pytest.fail("the window never closed in mid-write")


# Two processes.


@asynccontextmanager
async def child(*arguments, prefix=()):
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        str(CHILD),
        *map(str, arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def of_session(leader):
    """The processes of a child: itself, and the one in which it has NIXL."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        if int(fields[3]) == leader:
            found.append((int(stat.parent.name), fields[0]))
    return found


def stop(process):
    """Stop a child, all of it; it does nothing any more when this returns."""
    os.killpg(process.pid, signal.SIGSTOP)
    while any(state not in "TZ" for _, state in of_session(process.pid)):
        time.sleep(0)


def go_on(process):
    """What `stop` has stopped."""
    os.killpg(process.pid, signal.SIGCONT)


async def said(process):
    return (await asyncio.wait_for(process.stdout.readline(), 20)).decode().split(maxsplit=1)


@asynccontextmanager
async def stopped_writer(target, kind):
    """A writer that was stopped after its first byte and before its last, and the key it writes under."""
    for _ in range(5):
        target.memory[0] = target.memory[BIG - 1] = 0
        key = target.connector.open_window([ByteRange(0, BIG)])
        async with child("writer", kind, target.address.address, key, BIG) as process:
            assert (await said(process))[0] == "ready"
            process.stdin.write(b"go\n")
            await process.stdin.drain()
            while not target.memory[0]:
                await asyncio.sleep(0)
            stop(process)
            if not target.memory[BIG - 1]:
                yield process, key
                return
            go_on(process)
        await quiesced(target.connector, key)
    pytest.fail("the writer was never caught in mid-write")


def snapshot(target):
    return np.frombuffer(target.memory, dtype=np.uint8).copy()


@on(*BETWEEN_PROCESSES)
async def test_two_processes(make):
    kind = make().capabilities.kind
    async with end(make) as target:
        key = target.connector.open_window([ByteRange(0, SIZE)])
        async with child("writer", kind, target.address.address, key, SIZE) as process:
            assert (await said(process))[0] == "ready"
            process.stdin.write(b"go\n")
            assert (await said(process))[0] == "landed"
        assert set(target.memory) == {0x77}


@on("shm")
async def test_shm_keeps_a_stopped_writer_fenced_until_it_has_seen_the_close(make):
    async with end(make, BIG) as target, stopped_writer(target, "shm") as (process, key):
        for _ in range(20):
            assert not target.connector.close_window(key)
            await asyncio.sleep(0.01)
        go_on(process)
        await quiesced(target.connector, key)
        after = snapshot(target)
        assert (await said(process))[0] == "failed"
        assert after[-1] == 0
        assert np.array_equal(after, snapshot(target))


@on("tcp")
async def test_tcp_late_bytes_of_a_stopped_writer_land_nowhere(make):
    async with end(make, BIG) as target, stopped_writer(target, "tcp") as (process, key):
        await quiesced(target.connector, key, within_s=0.5)  # at once, while the writer is still stopped
        after = snapshot(target)
        go_on(process)
        assert (await said(process))[0] == "failed"
        assert after[-1] == 0
        assert np.array_equal(after, snapshot(target))


@on(*BETWEEN_PROCESSES)
async def test_a_writer_killed_in_mid_write_leaves_its_window_closable(make):
    kind = make().capabilities.kind
    async with end(make, BIG) as target, stopped_writer(target, kind) as (process, key):
        process.kill()
        await process.wait()
        await quiesced(target.connector, key, within_s=2.0)
        after = snapshot(target)
        await asyncio.sleep(0.05)
        assert np.array_equal(after, snapshot(target))
        fresh = target.connector.open_window([ByteRange(0, 10)])
        assert target.connector.close_window(fresh)


@on(*BETWEEN_PROCESSES)
async def test_a_target_that_is_killed_fails_its_writers(make):
    kind = make().capabilities.kind
    async with end(make, BIG) as source, child("target", kind, BIG) as process:
        address, key = await said(process)
        where = ConnectorAddress(kind, address)
        await source.connector.write(where, int(key), [Write(0, 0, 10)])
        writing = asyncio.ensure_future(source.connector.write(where, int(key), [Write(0, 0, BIG)]))
        await asyncio.sleep(0.002)
        process.kill()
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(writing, 10)
        await process.wait()
        with pytest.raises(TransferFailed):
            await source.connector.write(where, int(key), [Write(0, 0, 10)])
        with pytest.raises(TransferFailed):
            await source.connector.connect(where)


@on("tcp")
async def test_tcp_does_not_wait_for_ever_for_a_stopped_target(make):
    async with end(make, BIG) as source, child("target", "tcp", BIG) as process:
        address, key = await said(process)
        where = ConnectorAddress("tcp", address)
        await source.connector.connect(where)
        stop(process)
        with pytest.raises(TransferFailed):  # on the line that it has, once the buffers between are full
            await asyncio.wait_for(source.connector.write(where, int(key), [Write(0, 0, BIG)]), 10)
        with pytest.raises(TransferFailed):  # and on a new one, which the kernel accepts but nobody answers
            await asyncio.wait_for(source.connector.connect(where), 10)
        go_on(process)


@on("shm")
async def test_shm_does_not_reach_into_another_network_namespace(make):
    unshare = shutil.which("unshare")
    async with end(make) as target:
        key = target.connector.open_window([ByteRange(0, SIZE)])
        if unshare is None:
            pytest.skip("no unshare here")
        prefix = (unshare, "--net", "--map-root-user")
        async with child("writer", "shm", target.address.address, key, SIZE, prefix=prefix) as process:
            line = await said(process)
            if not line:
                pytest.skip("no right to make a namespace here")
            assert line[0] == "failed"
        assert not any(target.memory)
