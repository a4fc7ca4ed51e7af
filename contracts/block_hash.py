"""Names for the content of full blocks: each hash covers its block's tokens and, through its parent, all tokens before.

    hash[i] = blake2b-16(key = hash_seed, hash[i - 1] + tokens of block i)

Two blocks with one hash hold the KV of the same whole prefix, on any worker with the same layout. A block that is not full
has no name. The engine names its blocks by them and the router asks for them, so both compute them here (where they did not,
in llm-d-kv-cache#147 and vllm#43258, there were no hits). Does not know blocks' ids or who has them.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
_TOKEN_BYTES = 4


class BlockHasher:
    """Chains the hashes of `block_size` tokens each; `hash_seed` keys them (0 to 2**64 - 1)."""

    def __init__(self, block_size: int, hash_seed: int) -> None:
        self.block_size = block_size
        # Copying a keyed state costs less than keying each block's anew: it halves the time of a long prompt.
        self._keyed = hashlib.blake2b(digest_size=HASH_BYTES, key=struct.pack("<Q", hash_seed))

    def extend(self, hashes: list[bytes], token_ids: Sequence[int]) -> None:
        """Append to `hashes` those of the full blocks of `token_ids` that it does not have yet."""
        size, have = self.block_size, len(hashes)
        num_full = len(token_ids) // size
        if have >= num_full:
            return
        packed = _packed(token_ids[have * size : num_full * size])
        parent = hashes[-1] if have else b""
        step = size * _TOKEN_BYTES
        for start in range(0, len(packed), step):
            block = self._keyed.copy()
            block.update(parent + packed[start : start + step])
            parent = block.digest()
            hashes.append(parent)

    def chain(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The hashes of all full blocks of `token_ids`, first block first."""
        hashes: list[bytes] = []
        self.extend(hashes, token_ids)
        return tuple(hashes)


def _packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit numbers; each from 0 to 2**32 - 1, else OverflowError."""
    numbers = array("I", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def short_names(hashes: Sequence[bytes]) -> array[int]:
    """The first 64 bits of each hash, as a number: how block events and the router's index name blocks.

    Two of a million blocks share a short name with probability 3e-8; it would cost a worse choice of worker, never wrong KV,
    since a worker looks its blocks up by the whole hash.
    """
    numbers = array("Q", b"".join(hashes))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers[::2]
