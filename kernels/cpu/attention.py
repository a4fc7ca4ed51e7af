"""Paged attention, native and straight from the blocks: see src/attention.h for how, and why a row's bits never change.

    cache = kv_cache_of(library)(tensor, windows)
    step = cache.attention(segments)          what the native side knows of a step: step.struct
    step(layer, query, key, value)            writes KV, then attends

Does not know requests or schedules.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.batch import Segment
from kernels.cpu.library import I32, INT, PTR, SHORT, Function, Library
from kernels.cpu.small import with_heads_together

FUNCTIONS = {
    "dt_attention_f32": (PTR, INT, PTR, I32),
    "dt_attention_bf16": (PTR, INT, PTR, I32),
    "dt_attention_scratch": (PTR, INT, PTR),
}


class AttentionStruct(ctypes.Structure):
    """`struct AttentionStep` of src/attention_step.h, field by field; valid as long as the step that owns its arrays."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("windows", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("block_ids", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


class _Call(ctypes.Structure):
    """`struct AttentionCall` of src/attention.cpp."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


class NativeKVCache:
    """KV memory as it is, and scratch that grows to the largest step; see `kernels.interface.KVCache`."""

    def __init__(self, call: dict[str, Function], tensor: Tensor, windows: tuple[int | None, ...]) -> None:
        if not tensor.is_contiguous():
            raise ValueError("kv memory must be contiguous")
        if len(windows) != tensor.shape[1]:
            raise ValueError(f"{len(windows)} windows for {tensor.shape[1]} layers")
        if any(window is not None and window < 1 for window in windows):
            raise ValueError(f"windows {windows}: a row sees at least itself")
        self.tensor = tensor
        self.windows = array("q", [window or 0 for window in windows])
        self.call = call
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def attention(self, segments: Sequence[Segment]) -> NativeAttention:
        """See `kernels.interface.KVCache`."""
        return NativeAttention(self, segments)

    def scratch(self, num_bytes: int) -> Tensor:
        """At least so many bytes, the same ones for every step: one step at a time."""
        if len(self._scratch) < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch


class NativeAttention:
    """One step; owns the arrays that `struct` points to. See `kernels.interface.Attention`."""

    def __init__(self, cache: NativeKVCache, segments: Sequence[Segment]) -> None:
        rows, block_ids, numbers = 0, array("q"), array("q")
        for segment in segments:
            if segment.first_row != rows:
                raise ValueError(f"segment starts at row {segment.first_row}, expected {rows}")
            rows += segment.num_rows
            numbers.extend((segment.first_row, segment.num_rows, segment.num_computed, len(block_ids)))
            block_ids.extend(segment.block_ids)
        _, layers, _, block_size, kv_heads, head_size = cache.tensor.shape
        self._cache = cache
        self._arrays = (numbers, block_ids)
        self.struct = AttentionStruct(
            memory=cache.tensor.data_ptr(),
            layers=layers,
            block_size=block_size,
            heads=0,
            kv_heads=kv_heads,
            head_size=head_size,
            windows=cache.windows.buffer_info()[0],
            segments=numbers.buffer_info()[0],
            num_segments=len(segments),
            rows=rows,
            block_ids=block_ids.buffer_info()[0],
            scale=head_size**-0.5,
        )

    def of_heads(self, heads: int) -> AttentionStruct:
        """`struct`, for so many query heads; what a native step needs."""
        self.struct.heads = heads
        return self.struct

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `kernels.interface.Attention`."""
        cache, threads = self._cache, torch.get_num_threads()
        rows, heads, head_size = query.shape
        for x in (query, key, value):
            assert x.dtype == cache.tensor.dtype and len(x) == self.struct.rows, f"{x.dtype}, {len(x)} rows"
        query, key, value = (with_heads_together(x) for x in (query, key, value))
        out = torch.empty(rows, heads * head_size, dtype=query.dtype)
        at = ctypes.addressof(self.of_heads(heads))
        needed = ctypes.c_int64()
        cache.call["dt_attention_scratch"](at, threads, ctypes.addressof(needed))
        call = _Call(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            query_stride=query.stride(0),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            out=out.data_ptr(),
            scratch=cache.scratch(needed.value).data_ptr(),
        )
        cache.call[f"dt_attention_{SHORT[query.dtype]}"](at, layer, ctypes.addressof(call), threads)
        return out


def kv_cache_of(library: Library) -> Callable[[Tensor, tuple[int | None, ...]], NativeKVCache]:
    """Prepares KV memory for `library`'s attention: a `kernels.interface.MakeKVCache`."""
    return partial(NativeKVCache, library.bind(FUNCTIONS))
