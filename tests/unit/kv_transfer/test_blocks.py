"""Which blocks travel, and in which writes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import HandoffError, InternalError, TransferFailed
from contracts.ticket import Grant
from contracts.worker import ConnectorAddress
from kv_transfer.blocks import Pusher, block_ranges, coalesce
from kv_transfer.links import Link

PAIRS = st.integers(0, 12).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 15), min_size=n, max_size=n, unique=True) for _ in range(2)])
)


@given(PAIRS)
def test_coalescing_copies_every_block_to_its_place(ids):
    source, target = ids
    writes = coalesce(source, target, 8)
    copied = {}
    for write in writes:
        assert write.length % 8 == 0
        for at in range(0, write.length, 8):
            copied[(write.target_offset + at) // 8] = (write.source_offset + at) // 8
    assert copied == dict(zip(target, source, strict=True))


def test_neighbours_become_one_write():
    assert [w.length for w in coalesce([3, 4, 5, 9, 10], [0, 1, 2, 3, 7], 8)] == [24, 8, 8]


def test_progress_needs_its_blocks(pair):
    pusher = Pusher(pair.p, pair.num_tokens, pair.send, "h")
    with pytest.raises(InternalError, match="need 2 blocks"):
        pusher.advance(8, [1])
    with pytest.raises(InternalError, match="4 blocks to push"):
        pusher.finish([1, 2, 3])


@pytest.mark.parametrize(("blocks", "cached"), [(3, 0), (5, 0), (4, 3), (4, 20)])
async def test_a_grant_that_does_not_fit_is_refused(pair, blocks, cached):
    pusher = Pusher(pair.p, pair.num_tokens, pair.send, "h")
    pusher.finish(pair.source_blocks)
    link = Link(pair.d.ref, pair.source, pair.target.address())
    grant = Grant("h", pair.p.ref, pair.d.ref, tuple(range(blocks)), cached, 4.0, ((pair.target.address(), 1),))
    with pytest.raises(HandoffError, match="does not fit"):
        await pusher.push(link, grant)


async def test_a_grant_without_a_window_for_our_connector_is_refused(pair):
    pusher = Pusher(pair.p, pair.num_tokens, pair.send, "h")
    link = Link(pair.d.ref, pair.source, pair.target.address())
    grant = Grant("h", pair.p.ref, pair.d.ref, (0, 1, 2, 3), 0, 4.0, ((ConnectorAddress("tcp", "x:1"), 1),))
    with pytest.raises(TransferFailed, match="no window"):
        await pusher.push(link, grant)


@pytest.mark.parametrize(("num_tokens", "cleared"), [(14, [(3, 2)]), (13, [(3, 1)]), (16, [])])
async def test_unused_cells_are_cleared_once_before_the_last_block_travels(pair, num_tokens, cleared):
    heard = []

    async def blank(block_id, used):
        heard.append((pair.source_blocks.index(block_id), used))

    side = replace(pair.p, blank=blank)
    pusher = Pusher(side, num_tokens, replace(pair.send, max_write_bytes=pair.layout.sent_block_bytes), "h")
    link = Link(pair.d.ref, pair.source, pair.target.address())
    key = pair.target.open_window(block_ranges(range(4), pair.layout))
    grant = Grant("h", pair.p.ref, pair.d.ref, (0, 1, 2, 3), 0, 4.0, ((pair.target.address(), key),))
    pusher.finish(pair.source_blocks)
    stats = await pusher.push(link, grant)
    assert heard == cleared
    assert stats.num_blocks == 4


async def test_bytes_are_counted_as_they_travel(pair):
    layout = pair.layout.sent_as("int8")
    assert layout.sent_block_bytes < layout.block_bytes
    assert [r.length for r in block_ranges((2, 0), layout)] == [layout.sent_block_bytes] * 2
    pusher = Pusher(replace(pair.p, layout=layout), pair.num_tokens, pair.send, "h")
    link = Link(pair.d.ref, pair.source, pair.target.address())
    key = pair.target.open_window(block_ranges(range(4), layout))
    grant = Grant("h", pair.p.ref, pair.d.ref, (0, 1, 2, 3), 0, 4.0, ((pair.target.address(), key),))
    pusher.finish(pair.source_blocks)
    assert (await pusher.push(link, grant)).kv_bytes == 4 * layout.sent_block_bytes
