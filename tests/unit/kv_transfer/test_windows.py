"""Ranges and windows."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import TransferFailed
from kv_transfer.connector import ByteRange
from kv_transfer.windows import WindowTable, check_target, merge_ranges

RANGES = st.lists(st.builds(ByteRange, st.integers(0, 40), st.integers(0, 10)), max_size=8)


def covered(ranges):
    return {at for one in ranges for at in range(one.offset, one.offset + one.length)}


@given(RANGES)
def test_merging_keeps_exactly_the_bytes(ranges):
    merged = merge_ranges(ranges, 50)
    assert covered(merged) == covered(ranges)
    assert all(one.length > 0 for one in merged)
    for before, after in itertools.pairwise(merged):
        assert before.offset + before.length < after.offset


@given(RANGES, st.integers(0, 60), st.integers(0, 12))
def test_a_write_is_allowed_where_every_byte_of_it_is(ranges, offset, length):
    merged = merge_ranges(ranges, 50)
    inside = set(range(offset, offset + length)) <= covered(ranges)
    if inside:
        check_target(merged, offset, length)
    else:
        with pytest.raises(TransferFailed):
            check_target(merged, offset, length)


def test_a_window_is_quiesced_when_its_last_writer_has_left():
    table = WindowTable()
    key = table.open((ByteRange(0, 4),))
    window = table.get(key)
    assert window.enter()
    assert window.enter()
    assert not table.close(key)
    assert not window.enter()
    assert table.writable() == (ByteRange(0, 4),)
    window.leave()
    assert not table.close_all()
    window.leave()
    assert table.close_all()
    assert table.get(key) is None
    assert table.writable() == ()
