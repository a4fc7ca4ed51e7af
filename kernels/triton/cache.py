"""Paged attention on a GPU: a step's plan is made on the host and copied once, then serves every layer.

    rows of a step ─┬─ one-row segments ─▶ DecodeRows   split-KV, straight from the blocks
                    └─ longer segments ──▶ PrefillTiles tiles of rows, straight from the blocks
    every row has a slot in KV memory, written before anything is read

`fixed` makes the attention of a step whose plan lies in buffers of the caller's: what a recorded step needs.
Does not know requests or schedules.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.batch import Segment
from kernels.triton.decode import PART, DecodeRows, decode
from kernels.triton.kv_write import kv_write, rotate_write
from kernels.triton.prefill import PrefillTiles, prefill, tile_rows


class TritonKVCache:
    """KV memory on its device, and the windows of its layers."""

    def __init__(self, tensor: Tensor, windows: tuple[int | None, ...]) -> None:
        if not tensor.is_contiguous():
            raise ValueError("kv memory must be contiguous")
        if len(windows) != tensor.shape[1]:
            raise ValueError(f"{len(windows)} windows for {tensor.shape[1]} layers")
        self.tensor = tensor
        self.windows = windows

    def attention(self, segments: Sequence[Segment]) -> TritonAttention:
        """See `kernels.interface.KVCache`."""
        device, size = self.tensor.device, self.tensor.shape[3]
        slots = on_device(array("i", _slots(segments, size)), device)
        singles = [s for s in segments if s.num_rows == 1]
        longer = [s for s in segments if s.num_rows > 1]
        decoded = _decode_rows(singles, size, device) if singles else None
        return TritonAttention(self, slots, decoded, _Chunks(longer, size, device) if longer else None)

    def fixed(self, slots: Tensor, rows: DecodeRows) -> TritonAttention:
        """Attention of a step of single rows, from the device's int32 tensors, which it reads each time it is called."""
        return TritonAttention(self, slots, rows, None)


class TritonAttention:
    """See `kernels.interface.Attention`."""

    def __init__(self, cache: TritonKVCache, slots: Tensor, decoded: DecodeRows | None, chunks: _Chunks | None) -> None:
        self._cache = cache
        self._slots = slots
        self._decoded = decoded
        self._chunks = chunks

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `kernels.interface.Attention`."""
        kv_write(self._cache.tensor, layer, self._slots, key, value)
        return self.attend(layer, query)

    def rotate_and_attend(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As rotating queries and keys of qkv [n, heads + 2 kv_heads, d] and then a call, with one pass over them less."""
        return self.attend(layer, self.rotate_and_write(layer, qkv, cos, sin))

    def rotate_and_write(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first half of `rotate_and_attend`: rotated queries [n, heads, d], keys and values in their cells."""
        return rotate_write(self._cache.tensor, layer, self._slots, qkv, (cos, sin))

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """The second half: query [n, heads, d] to what lies in the cells → [n, heads · d]."""
        cache, window = self._cache.tensor, self._cache.windows[layer]
        rows, heads, head_size = query.shape
        out = torch.empty((rows, heads * head_size), dtype=query.dtype, device=query.device)
        if self._decoded is not None:
            decode(cache, layer, window, query, self._decoded, out)
        if self._chunks is not None:
            prefill(cache, layer, window, query, self._chunks.tiles(heads // cache.shape[4]), out)
        return out


class _Chunks:
    """Longer segments; how many rows a tile has, only the first query says."""

    def __init__(self, segments: list[Segment], block_size: int, device: torch.device) -> None:
        self._segments = segments
        self._device = device
        self._tables = _tables(segments, block_size, device)
        self._made: PrefillTiles | None = None

    def tiles(self, group: int) -> PrefillTiles:
        """In tiles for `group` query heads to a KV head, the longest contexts first: they would else end last, alone."""
        if self._made is None:
            step = tile_rows(group)
            found = [(i, at) for i, s in enumerate(self._segments) for at in range(0, s.num_rows, step)]
            found.sort(key=lambda tile: -(self._segments[tile[0]].num_computed + tile[1]))
            tiles = array("i", [number for tile in found for number in tile])
            numbers = array("i", [n for s in self._segments for n in (s.first_row, s.num_rows, s.num_computed)])
            self._made = PrefillTiles(
                self._tables,
                on_device(tiles, self._device).view(-1, 2),
                on_device(numbers, self._device).view(-1, 3),
            )
        return self._made


def max_parts(context: int) -> int:
    """Parts of a context of so many positions."""
    return max(1, -(-context // PART))


def on_device(numbers: array[int], device: torch.device) -> Tensor:
    """int32 numbers on `device`, without waiting for it."""
    host = torch.frombuffer(numbers, dtype=torch.int32)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _slots(segments: Sequence[Segment], size: int) -> list[int]:
    slots: list[int] = []
    for segment in segments:
        if segment.first_row != len(slots):
            raise ValueError(f"segment starts at row {segment.first_row}, expected {len(slots)}")
        ids = segment.block_ids
        slots.extend(ids[p // size] * size + p % size for p in range(segment.num_computed, segment.context_len))
    return slots


def _decode_rows(singles: list[Segment], size: int, device: torch.device) -> DecodeRows:
    contexts = [s.context_len for s in singles]
    return DecodeRows(
        rows=on_device(array("i", [s.first_row for s in singles]), device),
        tables=_tables(singles, size, device),
        contexts=on_device(array("i", contexts), device),
        max_parts=max_parts(max(contexts)),
    )


def _tables(segments: list[Segment], size: int, device: torch.device) -> Tensor:
    """[segments, blocks of the longest] int32; what a shorter one does not have is 0 and never looked at."""
    counts = [-(-s.context_len // size) for s in segments]
    width = max(counts)
    flat = array("i")
    for segment, count in zip(segments, counts, strict=True):
        flat.extend(segment.block_ids[:count])
        flat.extend([0] * (width - count))
    return on_device(flat, device).view(-1, width)
