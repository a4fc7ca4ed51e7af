"""Layouts compute their sizes, and unlike ones are refused by the name of the field that differs."""

from dataclasses import fields, replace

import pytest

from contracts.errors import LayoutMismatch
from contracts.kv_layout import KVLayout, check_same_layout

LAYOUT = KVLayout("m", "bfloat16", num_layers=30, num_kv_heads=3, head_size=64, block_size=16)


def test_sizes_are_those_of_the_performance_model():
    assert LAYOUT.token_bytes == 22.5 * 1024  # SmolLM2-135M in bf16
    assert LAYOUT.block_bytes == LAYOUT.token_bytes * 16


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
