"""KV memory whose blocks travel in a narrow form: packed into the staging area, unpacked out of it.

To the staging area block n lies at n packed blocks' lengths. Does not know connectors, hand-offs or where the cache lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from contracts.errors import InternalError
from kv_transfer.staging import Copy

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.packing import Packing


class PackedMemory:
    """See `kv_transfer.staging.DeviceMemory`. `cache` is [num_blocks, layers, 2, block_size, kv_heads, d], `packing` over it."""

    def __init__(self, cache: Tensor, packing: Packing, staging: memoryview, packed_bytes: int) -> None:
        import torch

        self._cache = cache
        self._packing = packing
        self._staging = torch.frombuffer(staging, dtype=torch.uint8)
        self._packed_bytes = packed_bytes

    def to_host(self, copies: Sequence[Copy]) -> None:
        """See DeviceMemory."""
        self._packing.pack(self._blocks(copies), self._rows(copies))

    def to_device(self, copies: Sequence[Copy]) -> None:
        """See DeviceMemory."""
        self._packing.unpack(self._rows(copies), self._blocks(copies))

    def blank(self, block_id: int, num_tokens: int) -> None:
        """See DeviceMemory: what an earlier owner left there would have a say in the block's scales."""
        self._cache[block_id, :, :, num_tokens:] = 0
        if self._cache.is_cuda:
            import torch

            torch.cuda.current_stream().synchronize()  # packing has a stream of its own

    def _blocks(self, copies: Sequence[Copy]) -> list[int]:
        size = self._packed_bytes
        for c in copies:
            if c.length != size or c.device_offset % size:
                raise InternalError(f"{c.length} bytes at {c.device_offset}: not a block of {size} bytes, packed")
        return [c.device_offset // size for c in copies]

    def _rows(self, copies: Sequence[Copy]) -> list[Tensor]:
        return [self._staging[c.host_offset : c.host_offset + c.length] for c in copies]
