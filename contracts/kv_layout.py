"""What KV memory looks like, and whether two workers' memories are alike enough to exchange blocks.

KV memory is block-major: one block is one contiguous range of bytes that holds, for `block_size` token positions, every
layer's keys and values: [num_layers, 2 (K, V), block_size, num_kv_heads, head_size]. A transfer is few large writes.
Does not know tensors or who holds a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from contracts.errors import LayoutMismatch

PROTOCOL_VERSION = 1
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The fingerprint of a worker's KV memory. Workers whose layouts differ in any field refuse each other."""

    model: str  # fingerprint of config and weights, not a path
    dtype: str  # a key of DTYPE_BYTES
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int  # tokens
    tp_size: int = 1
    hash_seed: int = 0
    protocol_version: int = PROTOCOL_VERSION

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, which are contiguous."""
        return self.token_bytes * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last perhaps in part."""
        return -(-num_tokens // self.block_size)


def check_same_layout(ours: KVLayout, theirs: KVLayout) -> None:
    """Raise LayoutMismatch that names the first field in which the two differ."""
    for spec in fields(KVLayout):
        mine, other = getattr(ours, spec.name), getattr(theirs, spec.name)
        if mine != other:
            raise LayoutMismatch(spec.name, mine, other)
