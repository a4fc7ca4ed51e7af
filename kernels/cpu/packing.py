"""KV blocks to and from their narrow form by the native library: see `kernels.packing` for what that is. Knows no transfers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.library import I32, INT, PTR, SHORT, Library
from kernels.packing import LARGEST, Form, packed_bytes

FUNCTIONS = {
    f"dt_{op}_{form}_{short}": (PTR, PTR, INT, PTR, PTR, I32)
    for op in ("pack", "unpack")
    for form in LARGEST
    for short in SHORT.values()
}


class NativePacking:
    """Packs and unpacks blocks of a cache [num_blocks, layers, 2, block_size, kv_heads, d], contiguous, on the CPU."""

    def __init__(self, library: Library, cache: Tensor, form: Form) -> None:
        if cache.dim() != 6 or cache.shape[2] != 2 or not cache.is_contiguous() or cache.dtype not in SHORT:
            raise ValueError(f"not a KV cache: {tuple(cache.shape)} {cache.dtype}")
        calls = library.bind(FUNCTIONS)
        _, layers, _, size, heads, width = cache.shape
        self._cache = cache
        self._shape = np.array([layers, size, heads, width], np.int64)
        self._pack = calls[f"dt_pack_{form}_{SHORT[cache.dtype]}"]
        self._unpack = calls[f"dt_unpack_{form}_{SHORT[cache.dtype]}"]
        self.block_bytes = packed_bytes(layers, size, heads, width)

    def pack(self, block_ids: Sequence[int], packed: Tensor) -> None:
        """The blocks, one after the other, into `packed`, uint8 [len(block_ids) · block_bytes] or more."""
        self._check(block_ids, packed)
        ids = np.array(block_ids, np.int64)
        threads = torch.get_num_threads()
        self._pack(
            self._cache.data_ptr(), ids.ctypes.data, len(ids), self._shape.ctypes.data, packed.data_ptr(), threads
        )

    def unpack(self, packed: Tensor, block_ids: Sequence[int]) -> None:
        """The opposite; a block that is named twice gets either."""
        self._check(block_ids, packed)
        ids = np.array(block_ids, np.int64)
        threads = torch.get_num_threads()
        self._unpack(
            packed.data_ptr(), ids.ctypes.data, len(ids), self._shape.ctypes.data, self._cache.data_ptr(), threads
        )

    def _check(self, block_ids: Sequence[int], packed: Tensor) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < len(self._cache):
            raise ValueError(f"blocks {min(block_ids)} to {max(block_ids)} of {len(self._cache)}")
        needed = len(block_ids) * self.block_bytes
        if packed.dtype != torch.uint8 or not packed.is_contiguous() or packed.numel() < needed:
            raise ValueError(f"packed: {packed.numel()} of {packed.dtype}, must be {needed} bytes in a row")
