"""KV blocks to and from the narrow form that may travel: one float32 scale for each (block, layer, K or V, KV head).

    packed block   [layers, 2, kv_heads] records of 4 + block_size · d bytes: scale (float32), then the block's positions
    value          byte · scale; scale = largest magnitude / 448 (float8 e4m3) or / 127 (int8), 0 where all are 0

All layers of all chosen blocks in one launch; a program per record. Does not know transfers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.packing import Form

LARGEST = {"fp8": 448.0, "int8": 127.0}
_SCALE_BYTES = 4


@triton.jit
def _to_integer(x):
    """To the nearest, ties to even: what is added and taken away leaves no room for a fraction. |x| below 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_e4m3(x):
    """float32, at most 448 in magnitude, to the bits of float8 e4m3, ties to even; in integers, so that all machines agree."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three bits of mantissa stay; exponents are counted from 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 there is one step, of 2**-9, and eight of them are the first normal number's bits.
    small = _to_integer(tl.abs(x) * 512.0).to(tl.uint32)
    code = tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 31) << 7)
    return code.to(tl.uint8)


@triton.jit
def pack_kernel(
    cache, block_ids, packed, largest,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One record: (chosen block, layer · 2 + side, KV head)."""
    index = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    head = tl.program_id(2)
    at = tl.arange(0, PADDED)
    inside = at < BLOCK_SIZE * HEAD_SIZE
    block = tl.load(block_ids + index).to(tl.int64)
    cell = (block * (2 * LAYERS) + side) * BLOCK_SIZE + at // HEAD_SIZE
    values = tl.load(cache + (cell * KV_HEADS + head) * HEAD_SIZE + at % HEAD_SIZE, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(wide), 0), largest)
    divided = tl.div_rn(wide, tl.where(scale > 0.0, scale, 1.0) + tl.zeros_like(wide))
    record = packed + ((index * (2 * LAYERS) + side) * KV_HEADS + head) * (4 + BLOCK_SIZE * HEAD_SIZE)
    if FP8:
        narrow = _to_e4m3(divided)
    else:
        narrow = _to_integer(divided).to(tl.int8).to(tl.uint8, bitcast=True)
    tl.store(record + 4 + at, narrow, mask=inside)
    # Records need not lie at multiples of four, so the scale goes byte by byte.
    bits = scale.to(tl.uint32, bitcast=True)
    byte = tl.arange(0, 4)
    tl.store(record + byte, ((bits >> (8 * byte).to(tl.uint32)) & 255).to(tl.uint8))


@triton.jit
def unpack_kernel(
    packed, block_ids, cache,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One record, back into the cache."""
    index = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    head = tl.program_id(2)
    at = tl.arange(0, PADDED)
    inside = at < BLOCK_SIZE * HEAD_SIZE
    record = packed + ((index * (2 * LAYERS) + side) * KV_HEADS + head) * (4 + BLOCK_SIZE * HEAD_SIZE)
    byte = tl.arange(0, 4)
    bits = tl.sum(tl.load(record + byte).to(tl.uint32) << (8 * byte).to(tl.uint32), 0)
    scale = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    narrow = tl.load(record + 4 + at, mask=inside, other=0)
    if FP8:
        wide = narrow.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = narrow.to(tl.int8, bitcast=True).to(tl.float32)
    block = tl.load(block_ids + index).to(tl.int64)
    cell = (block * (2 * LAYERS) + side) * BLOCK_SIZE + at // HEAD_SIZE
    target = cache + (cell * KV_HEADS + head) * HEAD_SIZE + at % HEAD_SIZE
    tl.store(target, (wide * scale).to(cache.dtype.element_ty), mask=inside)


def packed_bytes(cache: Tensor) -> int:
    """Bytes of one packed block of `cache` [blocks, layers, 2, block_size, kv_heads, d]."""
    _, layers, _, block_size, kv_heads, size = cache.shape
    return 2 * layers * kv_heads * (_SCALE_BYTES + block_size * size)


def pack(cache: Tensor, block_ids: Tensor, kind: str) -> Tensor:
    """Blocks block_ids [n] of `cache` → uint8 [n, packed_bytes]; `kind` is a key of LARGEST."""
    packed = torch.empty((len(block_ids), packed_bytes(cache)), dtype=torch.uint8, device=cache.device)
    if len(block_ids):
        pack_kernel[_grid(cache, block_ids)](cache, block_ids, packed, LARGEST[kind], **_shape(cache, kind))
    return packed


def unpack(packed: Tensor, cache: Tensor, block_ids: Tensor, kind: str) -> None:
    """What `pack` made, into blocks block_ids [n] of `cache`."""
    if packed.shape != (len(block_ids), packed_bytes(cache)):
        raise ValueError(f"packed KV is {tuple(packed.shape)}, expected ({len(block_ids)}, {packed_bytes(cache)})")
    if len(block_ids):
        unpack_kernel[_grid(cache, block_ids)](packed, block_ids, cache, **_shape(cache, kind))


class TritonPacking:
    """See `kernels.packing.Packing`: packed on the device, on a stream beside what computes there; rows are copied."""

    def __init__(self, cache: Tensor, form: Form) -> None:
        self._cache = cache
        self._form = form
        self._stream = torch.cuda.Stream() if cache.is_cuda else None

    def pack(self, block_ids: Sequence[int], rows: Sequence[Tensor]) -> None:
        """See Packing."""
        with torch.cuda.stream(self._stream):
            packed = pack(self._cache, self._ids(block_ids), self._form)
            for row, made in zip(rows, packed, strict=True):
                row.copy_(made, non_blocking=True)
        self._finish()

    def unpack(self, rows: Sequence[Tensor], block_ids: Sequence[int]) -> None:
        """See Packing."""
        with torch.cuda.stream(self._stream):
            packed = torch.empty(
                (len(block_ids), packed_bytes(self._cache)), dtype=torch.uint8, device=self._cache.device
            )
            for row, place in zip(rows, packed, strict=True):
                place.copy_(row, non_blocking=True)
            unpack(packed, self._cache, self._ids(block_ids), self._form)
        self._finish()

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int32, device=self._cache.device)

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _grid(cache: Tensor, block_ids: Tensor) -> tuple[int, int, int]:
    return len(block_ids), 2 * cache.shape[1], cache.shape[4]


def _shape(cache: Tensor, kind: str) -> dict[str, int | bool]:
    _, layers, _, block_size, kv_heads, size = cache.shape
    padded = triton.next_power_of_2(block_size * size)
    return {
        "LAYERS": layers,
        "BLOCK_SIZE": block_size,
        "KV_HEADS": kv_heads,
        "HEAD_SIZE": size,
        "PADDED": padded,
        "FP8": kind == "fp8",
        "num_warps": 4 if padded <= 4096 else 8,
    }
