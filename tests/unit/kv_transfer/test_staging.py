"""KV on a device passes through slots of a host region: bytes arrive, slots are nobody else's meanwhile, and all come back."""

import asyncio
import threading

import pytest
from xxhash import xxh3_128_digest as hashed

from contracts.clock import MonotonicClock
from contracts.errors import ConfigError, InvalidRequest, TransferFailed
from contracts.kv_layout import KVLayout
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerRef
from kv_transfer.connector import ByteRange, Write
from kv_transfer.digests import InlineDigester
from kv_transfer.links import Side, staged
from kv_transfer.local import Delivery, LocalConnector, LocalHub, WriteFault
from kv_transfer.memory_pool import MemoryPool
from kv_transfer.region import SharedRegion
from kv_transfer.staging import Copy, HostDevice, StagedConnector, StagedDigester, StagedPool, StagingArea

SLOT = 16
BLOCK_SIZE = 4
REQUEST = GenerationRequest("h", tuple(range(9)), SamplingParams(), (6,))


class GatedDevice(HostDevice):
    """Each copy waits until the gate is open, and says when it has begun."""

    def __init__(self, device, staging, loop):
        super().__init__(device, staging)
        self.gate = threading.Event()
        self.begun = asyncio.Event()
        self._loop = loop

    def to_host(self, copies):
        self._loop.call_soon_threadsafe(self.begun.set)
        self.gate.wait()
        super().to_host(copies)

    def to_device(self, copies):
        self._loop.call_soon_threadsafe(self.begun.set)
        self.gate.wait()
        super().to_device(copies)


class BrokenDevice(HostDevice):
    def to_device(self, copies):
        raise RuntimeError("the device fell off")


class Stage:
    """A device of `num_blocks` slots' length, and a staging area of `num_slots`."""

    def __init__(self, num_blocks=8, num_slots=3, make=HostDevice):
        self.device = memoryview(bytearray(range(num_blocks * SLOT)))
        self.region = SharedRegion(num_slots * SLOT + 5)  # what does not make a slot is left over
        self.memory = make(self.device, self.region.buffer)
        self.area = StagingArea(self.memory, self.region, SLOT)

    def close(self):
        self.area.close()
        self.region.close()


@pytest.fixture
def stages():
    made = []

    def make(**more):
        made.append(Stage(**more))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


@pytest.fixture
def gated(stages):
    """A stage whose copies wait; the gate is open when the test ends, whatever became of it."""
    made = []

    def make(**more):
        loop = asyncio.get_running_loop()
        stage = stages(make=lambda device, staging: GatedDevice(device, staging, loop), **more)
        made.append(stage.memory)
        return stage

    yield make
    for memory in made:
        memory.gate.set()


def pair(source, faults=None):
    """A connector out of `source`'s device and one into a plain region."""
    hub, clock = LocalHub(), MonotonicClock()
    inner = LocalConnector(hub, clock, faults) if faults else LocalConnector(hub, clock)
    out, into = StagedConnector(inner, source.area), LocalConnector(hub, clock)
    target = SharedRegion(8 * SLOT)
    out.expose(source.region)
    into.expose(target)
    return out, into, target


def test_an_area_holds_a_block(stages):
    assert stages(num_slots=3).area.num_slots == 3
    region = SharedRegion(SLOT - 1)
    with pytest.raises(ConfigError, match="kv_staging: 15 bytes, a block has 16"):
        StagingArea(HostDevice(memoryview(b""), region.buffer), region, SLOT)
    region.close()


def test_slots_are_taken_all_or_none(stages):
    area = stages().area
    first = area.take(2)
    assert area.take(2) is None
    assert area.num_free == 1
    area.give(first)
    assert sorted(area.take(3)) == [0, 1, 2]


async def test_lending_waits_for_a_slot_and_passes_turns_on(stages):
    area = stages().area
    slots = area.take(3)
    waiting = [asyncio.ensure_future(area.lend(2)) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    area.give(slots[:1])  # it wakes the first who still waits
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False, False]
    assert waiting[1].result() == slots[:1]
    area.give(slots[1:])
    assert sorted(await waiting[2]) == sorted(slots[1:])
    area.give(slots[:1])
    assert await waiting[3] == slots[:1]


async def test_a_turn_of_one_who_has_gone_is_another_s(stages):
    area = stages().area
    slots = area.take(3)
    first, second = (asyncio.ensure_future(area.lend(1)) for _ in range(2))
    await asyncio.sleep(0)
    area.give(slots[:1])
    first.cancel()  # in the very turn in which it was woken
    assert await second == slots[:1]
    assert first.cancelled()


async def test_a_turn_that_comes_too_late_is_waited_for_again(stages):
    area = stages().area
    slots = area.take(3)
    waiting = asyncio.ensure_future(area.lend(1))
    await asyncio.sleep(0)
    area.give(slots[:1])
    assert area.take(1) == slots[:1]  # somebody who did not wait was faster
    await asyncio.sleep(0)
    assert not waiting.done()
    area.give(slots[:1])
    assert await waiting == slots[:1]


@pytest.mark.parametrize("num_slots", [1, 3, 40])
async def test_what_is_written_is_the_device_s(stages, num_slots):
    source = stages(num_slots=num_slots)
    out, into, target = pair(source)
    assert out.capabilities == into.capabilities
    assert out.address() != into.address()
    await out.connect(into.address())
    key = into.open_window([ByteRange(0, 7 * SLOT)])
    writes = [Write(3 * SLOT, 0, 2 * SLOT + 5), Write(0, 5 * SLOT, SLOT), Write(1, 4 * SLOT, 0)]
    await out.write(into.address(), key, writes)
    assert target.buffer[: 2 * SLOT + 5] == source.device[3 * SLOT : 5 * SLOT + 5]
    assert target.buffer[5 * SLOT : 6 * SLOT] == source.device[:SLOT]
    assert not any(target.buffer[2 * SLOT + 5 : 5 * SLOT])
    assert source.area.num_free == num_slots
    assert into.close_window(key)
    await out.close()
    target.close()


async def test_windows_are_of_the_staging_area(stages):
    stage = stages()
    out, into, target = pair(stage)
    key = out.open_window([ByteRange(SLOT, SLOT)])
    target.buffer[:SLOT] = b"x" * SLOT
    await into.write(out.address(), key, [Write(0, SLOT, SLOT)])
    assert stage.region.buffer[SLOT : 2 * SLOT] == b"x" * SLOT
    assert out.close_window(key)
    target.close()


async def test_a_write_that_fails_gives_its_slots_back(stages):
    source = stages()
    out, into, target = pair(source, lambda index: WriteFault(Delivery.FAIL))
    key = into.open_window([ByteRange(0, SLOT)])
    with pytest.raises(TransferFailed):
        await out.write(into.address(), key, [Write(0, 0, SLOT)])
    assert source.area.num_free == 3
    target.close()


async def test_a_slot_is_not_given_back_while_it_is_copied_into(gated):
    source = gated()
    out, into, target = pair(source)
    key = into.open_window([ByteRange(0, SLOT)])
    writing = asyncio.ensure_future(out.write(into.address(), key, [Write(0, 0, SLOT)]))
    await source.memory.begun.wait()
    writing.cancel()
    await asyncio.sleep(0)
    assert (writing.done(), source.area.num_free) == (False, 2)
    source.memory.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert source.area.num_free == 3
    assert not any(target.buffer)
    target.close()


async def test_digests_are_those_of_the_device(stages):
    stage = stages(num_slots=2)
    ranges = [ByteRange(i * SLOT, SLOT) for i in (4, 1, 6, 0, 0)]
    found = await StagedDigester(InlineDigester(stage.region), stage.area).digests(ranges)

    class Whole:
        buffer, fd = stage.device, None

    assert found == await InlineDigester(Whole).digests(ranges)
    assert stage.area.num_free == 2


async def test_an_adopted_block_is_on_the_device_before_the_engine_has_it(stages):
    stage, inner = stages(), MemoryPool(4, BLOCK_SIZE, {b"a": 5})
    before = bytes(stage.device)
    pool = StagedPool(inner, stage.area, BLOCK_SIZE)
    lease = await pool.reserve("h", 9, (b"a",))
    assert (lease.num_cached_tokens, lease.block_ids[0], lease.block_ids[1:]) == (4, 5, lease.slots)
    assert lease.cached_seals == ()
    for n, slot in enumerate(lease.slots):
        stage.region.buffer[slot * SLOT : (slot + 1) * SLOT] = bytes([200 + n]) * SLOT
    await pool.adopt(REQUEST, lease, 9, (b"seal",) * 3)
    mine = inner.adopted["h"].block_ids
    for block in range(8):
        now = stage.device[block * SLOT : (block + 1) * SLOT]
        if block in mine[1:]:
            assert now == bytes([200 + mine[1:].index(block)]) * SLOT
        else:
            assert now == before[block * SLOT : (block + 1) * SLOT]
    assert stage.area.num_free == 3


async def test_room_is_that_of_pool_and_area(stages):
    area, inner = stages().area, MemoryPool(6, BLOCK_SIZE)
    pool = StagedPool(inner, area, BLOCK_SIZE)
    assert await pool.reserve("h", 25, ()) is None  # the engine has no room
    with pytest.raises(InvalidRequest, match="num_tokens: got 13, the KV staging area has room for 12 tokens at once"):
        await pool.reserve("h", 13, ())
    lease = await pool.reserve("h", 8, ())
    assert await pool.reserve("i", 8, ()) is None  # the area has no room now
    assert (len(inner.free), area.num_free) == (4, 1)
    await pool.release(lease, ())
    assert (len(inner.free), area.num_free) == (6, 3)


async def test_a_copy_that_fails_leaves_no_lease(stages):
    stage, inner = stages(make=BrokenDevice), MemoryPool(4, BLOCK_SIZE)
    pool = StagedPool(inner, stage.area, BLOCK_SIZE)
    with pytest.raises(RuntimeError, match="fell off"):
        await pool.adopt(REQUEST, await pool.reserve("h", 9, ()), 9, ())
    assert (len(inner.free), stage.area.num_free, inner.adopted) == (4, 3, {})


async def test_a_lease_is_not_given_back_while_it_is_copied_from(gated):
    stage, inner = gated(), MemoryPool(4, BLOCK_SIZE)
    pool = StagedPool(inner, stage.area, BLOCK_SIZE)
    adopting = asyncio.ensure_future(pool.adopt(REQUEST, await pool.reserve("h", 9, ()), 9, ()))
    await stage.memory.begun.wait()
    adopting.cancel()
    await asyncio.sleep(0)
    assert (len(inner.free), stage.area.num_free) == (1, 0)
    stage.memory.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await adopting
    assert (len(inner.free), stage.area.num_free, inner.adopted) == (4, 3, {})


def test_a_copy_is_of_its_bytes_alone(stages):
    stage = stages()
    stage.memory.to_host([Copy(2, 7, 3)])
    assert bytes(stage.region.buffer[:12]) == bytes([0] * 7 + [2, 3, 4, 0, 0])
    stage.memory.to_device([Copy(0, 8, 2)])
    assert bytes(stage.device[:4]) == bytes([3, 4, 2, 3])


class BlankDevice(GatedDevice):
    def __init__(self, device, staging, loop):
        super().__init__(device, staging, loop)
        self.blanked = []

    def blank(self, block_id, num_tokens):
        self._loop.call_soon_threadsafe(self.begun.set)
        self.gate.wait()
        super().blank(block_id, num_tokens)
        self.blanked.append((block_id, num_tokens))


async def test_cells_are_cleared_to_the_end_also_for_one_who_is_cancelled(stages):
    loop = asyncio.get_running_loop()
    stage = stages(make=lambda device, staging: BlankDevice(device, staging, loop))
    before = bytes(stage.device)
    clearing = asyncio.ensure_future(stage.area.blank(2, 3))
    await stage.memory.begun.wait()
    clearing.cancel()
    await asyncio.sleep(0)
    assert (clearing.done(), stage.memory.blanked) == (False, [])
    stage.memory.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await clearing
    assert stage.memory.blanked == [(2, 3)]
    assert bytes(stage.device) == before  # where bytes travel as they are nothing need be cleared


@pytest.mark.parametrize("sends", [True, False])
async def test_a_side_on_a_device_sends_from_there_and_receives_into_slots(stages, sends):
    stage, hub, clock = stages(), LocalHub(), MonotonicClock()
    layout = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, head_size=1, block_size=2)
    plain = Side(WorkerRef("w", 1), layout, (LocalConnector(hub, clock),), clock, digester=InlineDigester(stage.region))
    side = staged(plain, stage.area, sends=sends)
    assert (side.ref, side.layout, side.staging, plain.staging) == (plain.ref, layout, stage.area, None)
    assert [type(c) for c in side.connectors] == [StagedConnector]
    assert (plain.blank, side.blank) == (None, stage.area.blank if sends else None)
    stage.region.buffer[:] = bytes(len(stage.region.buffer))
    slots, device = await plain.digester.digests([ByteRange(0, SLOT)]), hashed(stage.device[:SLOT])
    assert await side.digester.digests([ByteRange(0, SLOT)]) == ((device,) if sends else slots)
    blind = staged(Side(plain.ref, layout, (), clock), stage.area, sends=sends)
    assert blind.digester is None
