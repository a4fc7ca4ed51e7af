"""Writes a step's keys and values into paged KV memory, rotating queries and keys on the way if they are not yet.

    qkv [n, heads + 2 kv_heads, d] ─▶ rotated queries [n, heads, d], and cells of KV memory (rotated keys, values)

A slot is block · block_size + offset; a negative one is a padding row's and writes nothing. Does not know requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8


@triton.jit(do_not_specialize=["layer"])
def kv_write_kernel(
    key, value, cache, slots, layer, row_stride, head_stride, value_row_stride, value_head_stride,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """One KV head of one row: its key and its value, as they are."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        at = tl.arange(0, PADDED)
        inside = at < HEAD_SIZE
        cell = ((slot // BLOCK_SIZE) * LAYERS + layer) * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
        target = cache + (cell * KV_HEADS + head) * HEAD_SIZE + at
        k = tl.load(key + row * row_stride + head * head_stride + at, mask=inside)
        v = tl.load(value + row * value_row_stride + head * value_head_stride + at, mask=inside)
        tl.store(target, k, mask=inside)
        tl.store(target + BLOCK_SIZE * KV_HEADS * HEAD_SIZE, v, mask=inside)


@triton.jit(do_not_specialize=["layer"])
def rotate_write_kernel(
    qkv, cos, sin, query, cache, slots, layer, row_stride, head_stride, angle_stride,
    HEADS: tl.constexpr, LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """AT_ONCE heads of one row of qkv: queries are rotated into `query`, keys into their cell, values copied into theirs."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    at = tl.arange(0, PADDED)
    half = at < HALF
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & half[None, :]
    source = qkv + row * row_stride + head[:, None] * head_stride + at[None, :]
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    angles = row * angle_stride + at
    cos_1 = tl.load(cos + angles, mask=half, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + angles + HALF, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + angles, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + angles + HALF, mask=half, other=0.0).to(tl.float32)[None, :]
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    turns = (head < HEADS + KV_HEADS)[:, None]
    first = tl.where(turns, (wide_1 * cos_1 + wide_2 * sin_1).to(query.dtype.element_ty), first)
    second = tl.where(turns, (wide_2 * cos_2 + wide_1 * sin_2).to(query.dtype.element_ty), second)
    asks = inside & (head < HEADS)[:, None]
    target = query + (row * HEADS + head)[:, None] * (2 * HALF) + at[None, :]
    tl.store(target, first, mask=asks)
    tl.store(target + HALF, second, mask=asks)
    slot = tl.load(slots + row).to(tl.int64)
    is_value = (head >= HEADS + KV_HEADS).to(tl.int64)
    kv_head = head - HEADS - KV_HEADS * is_value
    cell = (((slot // BLOCK_SIZE) * LAYERS + layer) * 2 + is_value) * BLOCK_SIZE + slot % BLOCK_SIZE
    where = (cell * KV_HEADS + kv_head)[:, None] * (2 * HALF) + at[None, :]
    kept = inside & (head >= HEADS)[:, None] & (slot >= 0)
    tl.store(cache + where, first, mask=kept)
    tl.store(cache + where + HALF, second, mask=kept)


def kv_write(cache: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """key, value [n, kv_heads, d] into layer `layer` of `cache` [blocks, layers, 2, block_size, kv_heads, d]; slots [n]."""
    _, layers, _, block_size, kv_heads, size = cache.shape
    if len(key):
        kv_write_kernel[(len(key), kv_heads)](
            key, value, cache, slots, layer, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            LAYERS=layers, BLOCK_SIZE=block_size, KV_HEADS=kv_heads, HEAD_SIZE=size,
            PADDED=triton.next_power_of_2(size), num_warps=1,
        )  # fmt: skip


def rotate_write(cache: Tensor, layer: int, slots: Tensor, qkv: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """qkv [n, heads + 2 kv_heads, d] and (cos, sin) as `kernels.interface.Rotary` has them → rotated queries [n, heads, d].

    Keys, rotated, and values go where `kv_write` would put them.
    """
    _, layers, _, block_size, kv_heads, size = cache.shape
    rows, all_heads, _ = qkv.shape
    heads = all_heads - 2 * kv_heads
    cos, sin = angles
    query = torch.empty((rows, heads, size), dtype=qkv.dtype, device=qkv.device)
    if rows:
        rotate_write_kernel[(rows, triton.cdiv(all_heads, _HEADS))](
            qkv, cos, sin, query, cache, slots, layer, qkv.stride(0), qkv.stride(1), cos.stride(0),
            HEADS=heads, LAYERS=layers, BLOCK_SIZE=block_size, KV_HEADS=kv_heads, HALF=size // 2,
            PADDED=triton.next_power_of_2(size // 2), AT_ONCE=_HEADS, num_warps=4,
        )  # fmt: skip
    return query
