"""KV blocks to and from a narrow form: one float32 scale for each (block, layer, K or V, KV head), then a byte a value.

    packed block   [layers, 2, kv_heads] records of 4 + block_size · d bytes: scale (float32), then the block's positions
    value          byte · scale; scale = largest magnitude / 448 (float8 e4m3) or / 127 (int8), 0 where all are 0

In readable torch; `kernels.cpu.packing` does the same in C++ and `kernels.triton.pack` on a GPU. Does not know transfers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Form = Literal["int8", "fp8"]
LARGEST: dict[Form, float] = {"fp8": 448.0, "int8": 127.0}
SCALE_BYTES = 4


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
