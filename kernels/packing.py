"""KV blocks to and from a narrow form: one float32 scale for each (block, layer, K or V, KV head), then a byte a value.

    packed block   [layers, 2, kv_heads] records of 4 + block_size · d bytes: scale (float32), then the block's positions
    value          byte · scale; scale = largest magnitude / 448 (float8 e4m3) or / 127 (int8), 0 where all are 0

In readable torch; `kernels.cpu.packing` does the same in C++ and `kernels.triton.pack` on a GPU. A worker's cache is packed by a
`Packing` of its `Kernels`, into rows that need not lie beside each other. Does not know transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

Form = Literal["int8", "fp8"]
LARGEST: dict[Form, float] = {"fp8": 448.0, "int8": 127.0}
SCALE_BYTES = 4


class Packing(Protocol):
    """Packs blocks of one cache [num_blocks, layers, 2, block_size, kv_heads, d] in one form; from one thread at a time.

    Rows are uint8 [packed_bytes] each, of the host's memory whatever device has the cache. Calls return when all is done.
    """

    def pack(self, block_ids: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Block i into row i."""
        ...

    def unpack(self, rows: Sequence[Tensor], block_ids: Sequence[int]) -> None:
        """Row i into block i."""
        ...


MakePacking: TypeAlias = Callable[[Tensor, Form], Packing]


class TorchPacking:
    """Packing by the readable functions below."""

    def __init__(self, cache: Tensor, form: Form) -> None:
        self._cache = cache
        self._form = form

    def pack(self, block_ids: Sequence[int], rows: Sequence[Tensor]) -> None:
        """See Packing."""
        for block_id, row in zip(block_ids, rows, strict=True):
            row.copy_(pack(self._cache[block_id : block_id + 1], self._form)[0])

    def unpack(self, rows: Sequence[Tensor], block_ids: Sequence[int]) -> None:
        """See Packing."""
        for row, block_id in zip(rows, block_ids, strict=True):
            unpack(row, self._cache[block_id : block_id + 1], self._form)


def packed_bytes(layers: int, block_size: int, kv_heads: int, head_size: int) -> int:
    """Of one block."""
    return layers * 2 * kv_heads * (SCALE_BYTES + block_size * head_size)


def pack(blocks: Tensor, form: Form) -> Tensor:
    """blocks [n, layers, 2, block_size, kv_heads, d], finite → uint8 [n, packed_bytes]."""
    count, layers, two, _, heads, _ = blocks.shape
    values = blocks.to(torch.float32).transpose(3, 4).reshape(count, layers, two, heads, -1)
    scale = values.abs().amax(-1, keepdim=True) / LARGEST[form]
    divided = values / torch.where(scale > 0, scale, torch.ones_like(scale))
    narrow = divided.round().to(torch.int8) if form == "int8" else divided.to(torch.float8_e4m3fn)
    return torch.cat((scale.contiguous().view(torch.uint8), narrow.view(torch.uint8)), -1).reshape(count, -1)


def unpack(packed: Tensor, blocks: Tensor, form: Form) -> None:
    """The opposite: packed uint8 [n, packed_bytes] into `blocks` [n, layers, 2, block_size, kv_heads, d]."""
    count, layers, two, size, heads, width = blocks.shape
    records = packed.reshape(count, layers, two, heads, SCALE_BYTES + size * width)
    scale = records[..., :SCALE_BYTES].contiguous().view(torch.float32)
    narrow = records[..., SCALE_BYTES:].contiguous().view(torch.int8 if form == "int8" else torch.float8_e4m3fn)
    values = narrow.to(torch.float32) * scale
    blocks.copy_(values.reshape(count, layers, two, heads, size, width).transpose(3, 4))
