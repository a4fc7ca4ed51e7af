"""What KV memory looks like, and whether two workers' memories are alike enough to exchange blocks.

KV memory is block-major: one block is one contiguous range of bytes that holds, for `block_size` token positions, every
layer's keys and values: [num_layers, 2 (K, V), block_size, num_kv_heads, head_size]. A transfer is few large writes. Blocks may
travel in a narrow form (docs/adr/0050), which both ends must have agreed on.
Does not know tensors or who holds a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from contracts.errors import LayoutMismatch

PROTOCOL_VERSION = 1
# With a narrow form: a worker that is older than those reads past `transfer_dtype`, but not past this.
NARROW_PROTOCOL_VERSION = 2
AS_IT_IS = "auto"
TRANSFER_DTYPES = (AS_IT_IS, "int8", "fp8")
_SCALE_BYTES = 4  # one beside the values of each (layer, K or V, KV head) in a narrow form, which are a byte each
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
    transfer_dtype: str = AS_IT_IS  # one of TRANSFER_DTYPES: how blocks travel
    protocol_version: int = PROTOCOL_VERSION

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, which are contiguous."""
        return self.token_bytes * self.block_size

    @property
    def sent_block_bytes(self) -> int:
        """Bytes of one block as it travels, which are contiguous."""
        if self.transfer_dtype == AS_IT_IS:
            return self.block_bytes
        values = self.block_size * self.head_size
        return self.num_layers * 2 * self.num_kv_heads * (_SCALE_BYTES + values)

    def sent_as(self, transfer_dtype: str) -> KVLayout:
        """The same memory, whose blocks travel as `transfer_dtype`."""
        if transfer_dtype == AS_IT_IS:
            return self
        return replace(self, transfer_dtype=transfer_dtype, protocol_version=NARROW_PROTOCOL_VERSION)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last perhaps in part."""
        return -(-num_tokens // self.block_size)


def check_same_layout(ours: KVLayout, theirs: KVLayout) -> None:
    """Raise LayoutMismatch that names the first field in which the two differ."""
    for spec in fields(KVLayout):
        mine, other = getattr(ours, spec.name), getattr(theirs, spec.name)
        if mine != other:
            raise LayoutMismatch(spec.name, mine, other)
