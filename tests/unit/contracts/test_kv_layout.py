"""Layouts compute their sizes, and unlike ones are refused by the name of the field that differs."""

from dataclasses import fields, replace

import pytest

from contracts.errors import LayoutMismatch
from contracts.kv_layout import NARROW_PROTOCOL_VERSION, TRANSFER_DTYPES, KVLayout, check_same_layout
from kernels.packing import LARGEST, packed_bytes

LAYOUT = KVLayout("m", "bfloat16", num_layers=30, num_kv_heads=3, head_size=64, block_size=16)


def test_sizes_are_those_of_the_performance_model():
    assert LAYOUT.token_bytes == 22.5 * 1024  # SmolLM2-135M in bf16
    assert LAYOUT.block_bytes == LAYOUT.token_bytes * 16


def test_blocks_travel_as_they_are_or_a_byte_a_value():
    assert (LAYOUT.sent_as("auto"), LAYOUT.sent_block_bytes) == (LAYOUT, LAYOUT.block_bytes)
    assert ("auto", *sorted(LARGEST, reverse=True)) == TRANSFER_DTYPES
    for narrow in TRANSFER_DTYPES[1:]:
        sent = LAYOUT.sent_as(narrow)
        assert (sent.transfer_dtype, sent.block_bytes) == (narrow, LAYOUT.block_bytes)
        assert sent.sent_block_bytes == packed_bytes(30, 16, 3, 64) < 0.502 * LAYOUT.block_bytes
        # A worker that is too old to know `transfer_dtype` sees that it differs all the same.
        assert sent.protocol_version == NARROW_PROTOCOL_VERSION != LAYOUT.protocol_version
        with pytest.raises(LayoutMismatch, match=f"differs in transfer_dtype: ours '{narrow}', theirs 'auto'"):
            check_same_layout(sent, LAYOUT)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_tokens(tokens, blocks):
    assert LAYOUT.num_blocks_for(tokens) == blocks


def test_equal_layouts_agree():
    check_same_layout(LAYOUT, replace(LAYOUT))


@pytest.mark.parametrize("field", [f.name for f in fields(KVLayout)])
def test_every_field_is_compared_and_named(field):
    value = getattr(LAYOUT, field)
    other = replace(LAYOUT, **{field: value + ("x" if isinstance(value, str) else 1)})
    with pytest.raises(LayoutMismatch) as caught:
        check_same_layout(LAYOUT, other)
    assert caught.value.field == field
    assert field in caught.value.message
