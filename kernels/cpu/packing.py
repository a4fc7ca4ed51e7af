"""KV blocks to and from their narrow form by the native library: see `kernels.packing` for what that is. Knows no transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    """See `kernels.packing.Packing`; the cache is contiguous, on the CPU, and so are rows.

    On the caller's thread alone: it works beside an engine that has the cores, and two threads would wait for each other.
    """

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

    def pack(self, block_ids: Sequence[int], rows: Sequence[Tensor]) -> None:
        """See Packing."""
        shape, cache = self._shape.ctypes.data, self._cache.data_ptr()
        for at, row in self._places(block_ids, rows):
            self._pack(cache, at, 1, shape, row.data_ptr(), 1)

    def unpack(self, rows: Sequence[Tensor], block_ids: Sequence[int]) -> None:
        """See Packing."""
        shape, cache = self._shape.ctypes.data, self._cache.data_ptr()
        for at, row in self._places(block_ids, rows):
            self._unpack(row.data_ptr(), at, 1, shape, cache, 1)

    def _places(self, block_ids: Sequence[int], rows: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Of each block where its number lies in memory, and its row; all are looked at before the first is handed out."""
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < len(self._cache):
            raise ValueError(f"blocks {min(block_ids)} to {max(block_ids)} of {len(self._cache)}")
        if len(rows) != len(block_ids):
            raise ValueError(f"{len(rows)} rows for {len(block_ids)} blocks")
        for row in rows:
            if row.dtype != torch.uint8 or not row.is_contiguous() or row.numel() != self.block_bytes:
                raise ValueError(f"packed: {row.numel()} of {row.dtype}, must be {self.block_bytes} bytes in a row")
        ids = np.array(block_ids, np.int64)
        for index, row in enumerate(rows):
            yield ids[index:].ctypes.data, row
