"""Names for the content of full blocks: each hash covers its block's tokens and, through its parent, all tokens before.

    hash[i] = blake2b-16(key = hash_seed, hash[i - 1] + tokens of block i)

Two blocks with one hash hold the KV of the same whole prefix, on any worker with the same layout. A block that is not full
has no name. Does not know blocks' ids.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 16


class BlockHasher:
    """Chains the hashes of `block_size` tokens each; `hash_seed` keys them (0 to 2**64 - 1)."""

    def __init__(self, block_size: int, hash_seed: int) -> None:
        self._block_size = block_size
        self._key = struct.pack("<Q", hash_seed)
        self._tokens = struct.Struct(f"<{block_size}I")

    def extend(self, hashes: list[bytes], token_ids: Sequence[int]) -> None:
        """Append to `hashes` those of the full blocks of `token_ids` that it does not have yet."""
        size = self._block_size
        for index in range(len(hashes), len(token_ids) // size):
            parent = hashes[-1] if hashes else b""
            content = self._tokens.pack(*token_ids[index * size : (index + 1) * size])
            hashes.append(hashlib.blake2b(parent + content, digest_size=HASH_BYTES, key=self._key).digest())

    def chain(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The hashes of all full blocks of `token_ids`, first block first."""
        hashes: list[bytes] = []
        self.extend(hashes, token_ids)
        return tuple(hashes)
