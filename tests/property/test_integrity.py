"""Wherever a bit turns between the source's memory and the engine, the hand-off is lost and its blocks are free again."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.clock import MonotonicClock, settle
from contracts.errors import DigestMismatch
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerRef
from kv_transfer.config import Integrity, ReceiverConfig, SenderConfig
from kv_transfer.digests import InlineDigester, chosen_blocks
from kv_transfer.links import Links, Side
from kv_transfer.local import Delivery, LocalConnector, LocalHub, WriteFault
from kv_transfer.memory_pool import MemoryPool
from kv_transfer.receiver import Receiver
from kv_transfer.region import SharedRegion
from kv_transfer.sender import HandoffFacts, PrefillResult, Sender
from kv_transfer.shm import ShmConnector
from kv_transfer.tcp import TcpConnector
from tests.unit.kv_transfer.conftest import BLOCK, HASHES, LAYOUT, NUM_TOKENS, SOURCE_BLOCKS, Pair, Told

NUM_BITS = 8 * BLOCK * len(SOURCE_BLOCKS)
few = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


class FlippingConnector(LocalConnector):
    """Turns one bit of all that it writes, in whichever write that one travels."""

    def __init__(self, hub, clock, bit):
        super().__init__(hub, clock, lambda index: self.fault)
        self.bit = bit
        self.fault = WriteFault()

    async def write(self, address, key, writes):
        num_bits = 8 * sum(write.length for write in writes)
        here, self.bit = self.bit, self.bit - num_bits
        self.fault = WriteFault(Delivery.CORRUPT, flipped_bit=here) if 0 <= here < num_bits else WriteFault()
        await super().write(address, key, writes)


class FlippingPair(Pair):
    """A pair with one bad bit between them."""

    def __init__(self, integrity, bit):
        super().__init__(integrity)
        self.source = FlippingConnector(self.hub, self.clock, bit)
        self.source.expose(self.source_region)
        self.p = replace(self.p, connectors=(self.source,))
        self.links = Links(self.p, self.send)


async def hand_off(integrity, bit, chunks):
    """What became of it: the blocks that are free afterwards, and the error."""
    pair = FlippingPair(integrity, bit)
    pair.receiver.start()
    sender = pair.sender("h")
    sender.start()
    computed, error = 0, None
    for chunk in chunks:
        computed = min(NUM_TOKENS, computed + chunk)
        sender.advance(computed, SOURCE_BLOCKS)
        await settle()
    try:
        await pair.turn(sender.finish(pair.result()))
    except DigestMismatch as caught:
        error = caught
    free, adopted = pair.pool.free, dict(pair.pool.adopted)
    await pair.close()
    return free, adopted, error


@few
@given(st.integers(0, NUM_BITS - 1), st.lists(st.integers(1, 9), max_size=4))
def test_full_finds_any_bit(bit, chunks):
    free, adopted, error = asyncio.run(hand_off(Integrity.FULL, bit, chunks))
    assert error is not None and f"block {bit // (8 * BLOCK)} first" in error.message
    assert adopted == {} and free == frozenset(range(8))


@few
@given(st.integers(0, NUM_BITS - 1))
def test_sampled_finds_what_it_looks_at(bit):
    _, adopted, error = asyncio.run(hand_off(Integrity.SAMPLED, bit, [9]))
    looked_at = chosen_blocks(Integrity.SAMPLED, "h", 0, len(SOURCE_BLOCKS))
    assert (error is not None) == (bit // (8 * BLOCK) in looked_at) == (adopted == {})


@pytest.mark.parametrize("block", range(len(SOURCE_BLOCKS)))
def test_full_finds_every_bit_of_every_block(block):
    for bit in range(8 * BLOCK * block, 8 * BLOCK * (block + 1)):
        _, adopted, error = asyncio.run(hand_off(Integrity.FULL, bit, []))
        assert error is not None and adopted == {}, bit


# Every connector that bytes really travel through.

STALE = 0xAB  # what the target's memory held before


class Spoiling:
    """A connector whose bytes are not all good once they have landed: a bit of one block is the other one, or the block is
    what it was before.
    """

    def __init__(self, inner, target_region, block, bit):
        self._inner = inner
        self._memory = target_region.buffer
        self._block = block
        self._bit = bit

    @property
    def capabilities(self):
        return self._inner.capabilities

    def address(self):
        return self._inner.address()

    async def connect(self, address):
        await self._inner.connect(address)

    async def write(self, address, key, writes):
        await self._inner.write(address, key, writes)
        for write in writes:
            for at in range(0, write.length, BLOCK):
                if self._block is not None and (write.source_offset + at) // BLOCK == SOURCE_BLOCKS[self._block]:
                    self._spoil(write.target_offset + at)

    def _spoil(self, at):
        if self._bit is None:
            self._memory[at : at + BLOCK] = bytes([STALE]) * BLOCK
        else:
            self._memory[at + self._bit // 8] ^= 1 << self._bit % 8


MAKERS = {
    "local": lambda hub, clock: LocalConnector(hub, clock),
    "shm": lambda hub, clock: ShmConnector(),
    "tcp": lambda hub, clock: TcpConnector(),
}


async def spoiled(kind, block, bit):
    """One hand-off over a real connector; (blocks free afterwards, what was adopted, the error)."""
    clock, hub, told = MonotonicClock(), LocalHub(), Told()
    async with AsyncExitStack() as stack:
        source_region, target_region = (stack.enter_context(SharedRegion(n * BLOCK)) for n in (8, 9))
        source_region.buffer[:] = bytes(range(256))
        target_region.buffer[:] = bytes([STALE]) * len(target_region.buffer)
        source, target = (MAKERS[kind](hub, clock) for _ in range(2))
        for connector, region in ((source, source_region), (target, target_region)):
            connector.expose(region)
            stack.push_async_callback(connector.close)
        faulty = Spoiling(source, target_region, block, bit)
        p = Side(WorkerRef("p", 1), LAYOUT, (faulty,), clock, digester=InlineDigester(source_region))
        d = Side(WorkerRef("d", 1), LAYOUT, (target,), clock, digester=InlineDigester(target_region))
        pool = MemoryPool(8, LAYOUT.block_size, {})
        receiver = Receiver(d, pool, told, ReceiverConfig(integrity=Integrity.FULL), told.fatal.append)
        links, config = Links(p), SenderConfig(integrity=Integrity.FULL)
        sender = Sender(HandoffFacts("h", d.ref, NUM_TOKENS, HASHES), receiver, links, config)
        sender.start()
        sender.advance(9, SOURCE_BLOCKS)
        request = GenerationRequest("user", tuple(range(NUM_TOKENS)), SamplingParams(), (42,))
        error = None
        try:
            await sender.finish(PrefillResult(request, SOURCE_BLOCKS))
        except DigestMismatch as caught:
            error = caught
        await links.close()
        await receiver.close()
        assert not told.fatal
        return pool.free, dict(pool.adopted), error


@pytest.mark.parametrize("what", ["turned bit", "stale block"])
@pytest.mark.parametrize("kind", MAKERS)
def test_full_finds_it_in_every_block_through_every_connector(kind, what):
    chance = random.Random(kind + what)
    for block in range(len(SOURCE_BLOCKS)):
        for _ in range(3):
            bit = chance.randrange(8 * BLOCK) if what == "turned bit" else None
            free, adopted, error = asyncio.run(spoiled(kind, block, bit))
            assert (
                error is not None and f"1 of 4 blocks are not those that p sent, block {block} first" in error.message
            )
            assert adopted == {} and free == frozenset(range(8))


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_good_passes_through_every_connector(kind):
    _, adopted, error = asyncio.run(spoiled(kind, None, None))
    assert error is None and list(adopted) == ["h"]
