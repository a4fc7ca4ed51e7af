"""What arrives is what was sent, or the hand-off fails before the engine hears of it."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from contracts.clock import settle
from contracts.errors import ConfigError, DigestMismatch, HandoffError, RequestCancelled
from contracts.ticket import AbortRequest
from kv_transfer.blocks import block_ranges
from kv_transfer.config import Integrity
from kv_transfer.connector import ByteRange
from kv_transfer.digests import SAMPLED_ONE_IN, InlineDigester, ThreadDigester, chosen_blocks, digester_for
from kv_transfer.handoff import TargetAction, unobserved
from kv_transfer.local import Delivery, WriteFault
from kv_transfer.region import SharedRegion

OFF, SAMPLED, FULL = Integrity.OFF, Integrity.SAMPLED, Integrity.FULL
NUM_BLOCKS = 4
CORRUPT = Delivery.CORRUPT


@asynccontextmanager
async def handing_off(pair_class, send=FULL, receive=None):
    pair = pair_class(send, receive)
    pair.receiver.start()
    yield pair
    await pair.close()


@pytest.fixture
def pair_class(pair):
    return type(pair)


async def hand_off(pair, handoff_id="h", hashes=(b"x", b"y", b"z")):
    sender = pair.sender(handoff_id, hashes)
    sender.start()
    sender.advance(pair.num_tokens, pair.source_blocks)
    await settle()  # the full blocks travel first
    return await pair.turn(sender.finish(pair.result()))


def same_bytes(pair, lease):
    source, target = pair.source_region.buffer, pair.target_region.buffer
    wanted = [bytes(source[r.offset : r.offset + r.length]) for r in block_ranges(pair.source_blocks, pair.layout)]
    return wanted == [bytes(target[r.offset : r.offset + r.length]) for r in block_ranges(lease.block_ids, pair.layout)]


@pytest.mark.parametrize("mode", [SAMPLED, FULL])
async def test_whole_bytes_are_adopted(pair_class, mode):
    async with handing_off(pair_class, mode) as pair:
        await hand_off(pair)
        assert same_bytes(pair, pair.pool.adopted["h"])
        (ticket,) = pair.told.adopted
        taken = [i for i, digest in enumerate(ticket.block_digests) if digest]
        assert tuple(taken) == chosen_blocks(mode, "h", 0, NUM_BLOCKS)
        assert pair.p.digester.num_read == pair.d.digester.num_read == len(taken)


@pytest.mark.parametrize("index", [0, 1], ids=["full blocks", "last block"])
async def test_a_flipped_bit_loses_the_hand_off_and_nothing_else(pair_class, index):
    async with handing_off(pair_class) as pair:
        pair.faults = [WriteFault()] * index + [WriteFault(CORRUPT, flipped_bit=77)]
        with pytest.raises(DigestMismatch, match=r"1 of 4 blocks .* p sent"):
            await hand_off(pair)
        assert pair.told.adopted == [] and pair.pool.adopted == {}
        ((lost, cause),) = pair.told.lost
        assert lost == "h" and isinstance(cause, DigestMismatch)
        assert pair.pool.free == frozenset(range(8))
        with pytest.raises(DigestMismatch):  # a late copy of the commit hears the same
            await pair.receiver.commit(pair.ticket())
        await hand_off(pair, "again")  # the source blocks are as good as before
        assert same_bytes(pair, pair.pool.adopted["again"])


async def test_stale_blocks_are_found(pair_class):
    async with handing_off(pair_class) as pair:
        pair.faults = [WriteFault(Delivery.LOSE)]  # acknowledged, but what was there before is there still
        with pytest.raises(DigestMismatch, match="block 0 first"):
            await hand_off(pair)
        assert pair.pool.num_leased == 0 and pair.pool.adopted == {}


async def use_digester(pair, digester, observer=unobserved):
    await pair.receiver.close()
    pair.d = replace(pair.d, digester=digester, observer=observer)
    pair.receiver = pair.make_receiver(pair.pool)
    pair.receiver.start()


async def test_bytes_are_compared_after_the_last_write_and_before_the_engine_hears(pair_class):
    class Watching(InlineDigester):
        async def digests(self, ranges):
            assert pair.target.writable() == (), "somebody can still write what is compared"
            order.append("compared")
            return await super().digests(ranges)

    def observe(taken):
        order.extend(action for action in taken.actions if action is TargetAction.ADOPT)

    async with handing_off(pair_class) as pair:
        order = []
        await use_digester(pair, Watching(pair.target_region), observe)
        await hand_off(pair)
        assert order == ["compared", TargetAction.ADOPT]


@pytest.mark.parametrize("delivery", [Delivery.DELIVER, CORRUPT])
async def test_given_up_while_it_is_compared_stays_given_up(pair_class, delivery):
    class Slow(InlineDigester):
        async def digests(self, ranges):
            entered.set()
            await go.wait()
            return await super().digests(ranges)

    async with handing_off(pair_class) as pair:
        entered, go = asyncio.Event(), asyncio.Event()
        await use_digester(pair, Slow(pair.target_region))
        pair.faults = [WriteFault(delivery)]
        sending = asyncio.ensure_future(hand_off(pair))
        await pair.turn(entered.wait())
        await pair.receiver.abort(AbortRequest("h", pair.p.ref, pair.d.ref, "nobody reads it"))
        go.set()
        with pytest.raises(RequestCancelled, match="nobody reads it"):
            await sending
        assert pair.pool.adopted == {} and pair.pool.num_leased == 0


async def test_off_reads_nothing_and_says_nothing(pair_class):
    async with handing_off(pair_class, OFF) as pair:
        pair.faults = [WriteFault(CORRUPT)]
        await hand_off(pair)  # nobody looks
        assert pair.told.adopted[0].block_digests == ()
        assert pair.p.digester.num_read == pair.d.digester.num_read == 0


async def test_a_stricter_prefill_side_costs_a_laxer_decode_side_nothing(pair_class):
    async with handing_off(pair_class, FULL, OFF) as pair:
        await hand_off(pair)
        assert (pair.p.digester.num_read, pair.d.digester.num_read) == (NUM_BLOCKS, 0)


@pytest.mark.parametrize(("send", "receive"), [(OFF, SAMPLED), (OFF, FULL), (SAMPLED, FULL)])
async def test_a_laxer_prefill_side_is_refused_by_name(pair_class, send, receive):
    async with handing_off(pair_class, send, receive) as pair:
        with pytest.raises(HandoffError, match=f"--integrity is {receive.value} here"):
            await hand_off(pair)
        assert pair.pool.adopted == {} and pair.pool.num_leased == 0


async def test_cached_blocks_do_not_travel_and_need_no_digest(pair_class):
    async with handing_off(pair_class) as pair:
        await hand_off(pair, hashes=(b"a", b"y", b"z"))
        assert [bool(d) for d in pair.told.adopted[0].block_digests] == [False, True, True, True]


async def adopt_and_finish(pair, handoff_id):
    await hand_off(pair, handoff_id, hashes=(b"a", b"y", b"z"))
    pair.pool.finish(handoff_id)


async def test_a_cached_block_that_changed_is_found_and_forgotten(pair_class):
    async with handing_off(pair_class) as pair:
        await adopt_and_finish(pair, "first")  # shares the cached block, whatever is in it, and seals it
        await adopt_and_finish(pair, "second")
        pair.target_region.buffer[8 * 32 + 5] ^= 4
        with pytest.raises(DigestMismatch, match="1 blocks of the prefix cache have changed, block 0 first"):
            await hand_off(pair, "third", hashes=(b"a", b"y", b"z"))
        assert pair.pool.adopted == {} and len(pair.pool.free) == 8
        await hand_off(pair, "fourth", hashes=(b"a", b"y", b"z"))
        assert pair.pool.adopted["fourth"].num_cached_tokens == 0
        assert same_bytes(pair, pair.pool.adopted["fourth"])


async def test_both_kinds_of_damage_are_told(pair_class):
    async with handing_off(pair_class) as pair:
        await adopt_and_finish(pair, "first")
        pair.target_region.buffer[8 * 32] ^= 1
        pair.faults = [WriteFault(CORRUPT)]
        with pytest.raises(DigestMismatch, match=r"1 of 3 blocks .* block 1 first; 1 blocks of the prefix cache"):
            await hand_off(pair, "second", hashes=(b"a", b"y", b"z"))


async def test_sampled_looks_at_nothing_that_did_not_travel(pair_class):
    async with handing_off(pair_class, SAMPLED) as pair:
        await adopt_and_finish(pair, "first")
        pair.target_region.buffer[8 * 32] ^= 1
        await adopt_and_finish(pair, "second")


def test_the_choice_is_a_fraction_reaches_every_position_and_ends_with_the_last():
    picks = [chosen_blocks(SAMPLED, f"h{i}", 3, 67) for i in range(400)]
    assert all(pick[-1] == 66 and pick[0] >= 3 for pick in picks)
    assert all(64 // SAMPLED_ONE_IN <= len(pick) <= 64 // SAMPLED_ONE_IN + 1 for pick in picks)
    assert {i for pick in picks for i in pick} == set(range(3, 67))
    assert chosen_blocks(FULL, "h", 3, 6) == (3, 4, 5)
    assert all(chosen_blocks(mode, "h", 6, 6) == () for mode in Integrity)
    assert chosen_blocks(OFF, "h", 0, 6) == ()


def test_who_shall_digest_must_be_able_to():
    with SharedRegion(64) as region:
        digester = InlineDigester(region)
        assert digester_for(OFF, digester) is None
        assert digester_for(FULL, digester) is digester
    with pytest.raises(ConfigError, match="integrity: got sampled"):
        digester_for(SAMPLED, None)


async def test_both_digesters_agree_and_see_every_bit():
    with SharedRegion(64) as region:
        region.buffer[:] = bytes(range(64))
        inline, threaded = InlineDigester(region), ThreadDigester(region, at_once_bytes=33)
        ranges = (ByteRange(0, 32), ByteRange(32, 32))
        before = await inline.digests(ranges)
        assert await threaded.digests(ranges) == before
        assert len(set(before)) == 2 and {len(digest) for digest in before} == {16}
        for bit in range(32 * 8):
            region.buffer[bit // 8] ^= 1 << bit % 8
            after = await inline.digests(ranges)
            assert after[0] != before[0] and after[1] == before[1]
            region.buffer[bit // 8] ^= 1 << bit % 8
        threaded.close()
