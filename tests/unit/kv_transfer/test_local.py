"""The faults of the `local` connector are what they say."""

import asyncio

import pytest

from contracts.clock import settle
from contracts.errors import TransferFailed
from kv_transfer.connector import ByteRange, Write
from kv_transfer.local import Delivery, LocalConnector, WriteFault


@pytest.fixture
def key(pair):
    return pair.target.open_window([ByteRange(0, 64)])


def start(pair, key, fault, length=64):
    pair.faults.append(fault)
    return asyncio.ensure_future(pair.source.write(pair.target.address(), key, [Write(1, 0, length)]))


def landed(pair):
    return sum(1 for byte in pair.target_region.buffer if byte)


async def test_a_delayed_write_has_not_entered_its_window(pair, key):
    writing = start(pair, key, WriteFault(delay_s=1.0))
    await pair.clock.advance(0.9)
    assert landed(pair) == 0
    assert pair.target.close_window(key)
    await pair.clock.advance(0.2)
    with pytest.raises(TransferFailed, match="closed"):
        await writing
    assert landed(pair) == 0


async def test_a_stalled_write_is_inside_and_its_rest_lands(pair, key):
    writing = start(pair, key, WriteFault(stall_s=1.0, landed_bytes=10))
    await settle()
    assert landed(pair) == 10
    assert not pair.target.close_window(key)
    await pair.clock.advance(1.1)
    await writing
    assert landed(pair) == 64
    assert pair.target.close_window(key)


async def test_a_failing_write_lands_in_part(pair, key):
    with pytest.raises(TransferFailed, match="after 10 bytes"):
        await start(pair, key, WriteFault(delivery=Delivery.FAIL, landed_bytes=10))
    assert landed(pair) == 10
    assert pair.target.close_window(key)


async def test_a_lost_write_is_acknowledged_and_lands_in_part(pair, key):
    await start(pair, key, WriteFault(Delivery.LOSE, landed_bytes=10))
    assert landed(pair) == 10


@pytest.mark.parametrize("bit", [0, 7, 8, 8 * 40 - 1, 8 * 40, 8 * 64 - 1, 8 * 64 + 3])
async def test_a_corrupt_write_lands_with_one_bit_turned(pair, key, bit):
    pair.faults.append(WriteFault(Delivery.CORRUPT, flipped_bit=bit))
    await pair.source.write(pair.target.address(), key, [Write(1, 24, 40), Write(41, 0, 24)])  # not in their order
    got = int.from_bytes(bytes(pair.target_region.buffer[24:64]) + bytes(pair.target_region.buffer[:24]), "little")
    assert got ^ int.from_bytes(bytes(range(1, 65)), "little") == 1 << bit % (8 * 64)
    assert pair.target.close_window(key)


@pytest.mark.parametrize("fault", [WriteFault(delivery=Delivery.DROP), WriteFault(delay_s=99.0)])
async def test_a_write_that_never_comes_ends_with_its_caller(pair, key, fault):
    writing = start(pair, key, fault)
    await pair.clock.advance(5.0)
    assert not writing.done()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert landed(pair) == 0


async def test_close_waits_for_copies(pair, key):
    writing = start(pair, key, WriteFault(stall_s=1.0, landed_bytes=10))
    await settle()
    closing = asyncio.ensure_future(pair.source.close())
    await settle()
    assert not closing.done()
    await pair.clock.advance(1.1)
    await closing
    await writing


async def test_memory_must_be_exposed_first(pair):
    bare = LocalConnector(pair.hub, pair.clock)
    with pytest.raises(TransferFailed, match="exposes no memory"):
        await pair.source.connect(bare.address())
