"""Wherever a bit turns between the source's memory and the engine, the hand-off is lost and its blocks are free again."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.clock import settle
from contracts.errors import DigestMismatch
from kv_transfer.config import Integrity
from kv_transfer.digests import chosen_blocks
from kv_transfer.links import Links
from kv_transfer.local import Delivery, LocalConnector, WriteFault
from tests.unit.kv_transfer.conftest import BLOCK, NUM_TOKENS, SOURCE_BLOCKS, Pair

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
