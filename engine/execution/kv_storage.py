"""KV memory as the model sees it: a tensor over bytes that somebody else owns and others may read and write.

Does not know who holds which block, or how bytes travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contracts.errors import ConfigError
from contracts.kv_layout import KVLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def kv_tensor(buffer: memoryview | Tensor, layout: KVLayout, num_blocks: int) -> Tensor:
    """[num_blocks, num_layers, 2 (K, V), block_size, kv_heads, head_size] over `buffer`, no copy; uint8 [bytes] on a device.

    The tensor keeps the buffer alive. ConfigError when the buffer is not exactly `num_blocks` blocks long.
    """
    if layout.dtype not in _DTYPES:
        raise ConfigError(f"kv dtype: got {layout.dtype!r}, known: {', '.join(_DTYPES)}")
    if buffer.nbytes != num_blocks * layout.block_bytes:
        raise ConfigError(
            f"kv memory: {buffer.nbytes} bytes, expected {num_blocks} blocks of {layout.block_bytes} bytes"
        )
    shape = (num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_size)
    dtype = _DTYPES[layout.dtype]
    flat = buffer.view(dtype) if isinstance(buffer, Tensor) else torch.frombuffer(buffer, dtype=dtype)
    return flat.view(shape)
