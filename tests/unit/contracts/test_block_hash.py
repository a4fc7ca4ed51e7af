"""Block hashes: the same everywhere and always, or nothing is ever found again."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.block_hash import HASH_BYTES, BlockHasher, short_names

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(token_ids, st.integers(1, 7), st.integers(0, 2**64 - 1))
def test_a_hash_is_what_the_drawing_says(tokens, block_size, seed):
    """Written out once more, slowly: workers of two versions must agree, so this must not change."""
    expected, parent = [], b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = struct.pack(f"<{block_size}I", *tokens[start : start + block_size])
        parent = hashlib.blake2b(parent + content, digest_size=HASH_BYTES, key=struct.pack("<Q", seed)).digest()
        expected.append(parent)
    assert BlockHasher(block_size, seed).chain(tokens) == tuple(expected)


def test_hashes_chain_over_full_blocks_only():
    hasher = BlockHasher(4, 0)
    tokens = list(range(11))
    chain = hasher.chain(tokens)
    assert len(chain) == 2
    assert {len(name) for name in chain} == {HASH_BYTES}
    assert hasher.chain(tokens[:8]) == chain
    assert hasher.chain([*tokens[4:8], *tokens[4:8]])[1] != chain[1], (
        "the same block after another prefix is another block"
    )


def test_hashes_grow_with_the_tokens():
    hasher = BlockHasher(2, 5)
    hashes: list[bytes] = []
    for end in range(8):
        hasher.extend(hashes, list(range(end)))
        assert tuple(hashes) == hasher.chain(range(end))


def test_hashes_differ_by_seed_and_take_any_token_id():
    assert BlockHasher(1, 0).chain([2**32 - 1]) != BlockHasher(1, 2**64 - 1).chain([2**32 - 1])
    with pytest.raises(OverflowError):
        BlockHasher(1, 0).chain([2**32])


@given(token_ids)
def test_short_names_are_the_first_64_bits(tokens):
    chain = BlockHasher(2, 0).chain(tokens)
    assert list(short_names(chain)) == [int.from_bytes(name[:8], "little") for name in chain]
