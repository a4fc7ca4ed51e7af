"""Paged attention of single rows on a GPU: the context is cut into parts of fixed length, then the parts are put together.

    context of a row   |── part 0: 128 ──|── part 1: 128 ──| … ──|         parts lie at multiples of 128 positions
    programs           (row, KV head, worker w) takes parts w, w + W, …    each leaves (sum, largest, total) of its part
    then               (row, head) adds the parts up, first to last

Split-KV as in Flash-Decoding (Dao et al., 2023), but a part is as long whatever the batch: only how many programs share
the parts depends on it, so a row's result is the same bits in any batch. The query heads of one KV head are the rows of
one matrix product, so each key is read once. What a row must not see is never loaded. Does not know requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 128
_PARTS_AT_ONCE = 16
# 101 registers and 21 KiB: four programs to a multiprocessor, each with two tiles on their way.
_TILE = 32
_LOG2_E = 1.4426950408889634
# Programs that keep a GPU busy while some wait for memory; more are in vain, fewer leave bandwidth unused.
_PROGRAMS = 1024


# A number that differs from step to step must not have a kernel compiled for some of its values.
@triton.jit(do_not_specialize=["layer", "table_stride", "max_parts", "workers"])
def decode_parts_kernel(
    query, cache, rows, tables, contexts, partial, layer, scale, query_stride, table_stride, max_parts, workers,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, PART_LEN: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, PADDED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Of one row and KV head, every `workers`-th part: GROUP · (HEAD_SIZE + 4) float32 each into `partial`, the last two unused."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    context = tl.load(contexts + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    head = tl.arange(0, ROWS)
    at = tl.arange(0, PADDED)
    real = (head < GROUP)[:, None] & (at < HEAD_SIZE)[None, :]
    source = (
        query
        + tl.load(rows + row).to(tl.int64) * query_stride
        + (kv_head * GROUP + head)[:, None] * HEAD_SIZE
        + at[None, :]
    )
    q = tl.load(source, mask=real, other=0.0).to(DOT)
    side = BLOCK_SIZE * KV_HEADS * HEAD_SIZE
    for part in range(first // PART_LEN + tl.program_id(2), tl.cdiv(context, PART_LEN), workers):
        begin = tl.maximum(part * PART_LEN, first)
        end = tl.minimum(part * PART_LEN + PART_LEN, context)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED], tl.float32)
        for tile in range((begin // TILE) * TILE, end, TILE):
            position = tile + tl.arange(0, TILE)
            seen = (position >= begin) & (position < end)
            block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            cell = (block * LAYERS + layer) * (2 * BLOCK_SIZE) + position % BLOCK_SIZE
            where = (cell * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + at[None, :]
            visible = seen[:, None] & (at < HEAD_SIZE)[None, :]
            k = tl.load(cache + where, mask=visible, other=0.0).to(DOT)
            v = tl.load(cache + where + side, mask=visible, other=0.0).to(DOT)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(largest - higher)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
            largest = higher
        heads = (row * KV_HEADS + kv_head) * GROUP + head
        base = partial + (heads * max_parts + part) * (HEAD_SIZE + 4)
        tl.store(base[:, None] + at[None, :], acc, mask=real)
        tl.store(base + HEAD_SIZE, largest, mask=head < GROUP)
        tl.store(base + HEAD_SIZE + 1, total, mask=head < GROUP)


@triton.jit(do_not_specialize=["max_parts"])
def decode_sum_kernel(
    partial, contexts, rows, out, max_parts,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WINDOW: tl.constexpr, PART_LEN: tl.constexpr, PADDED: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """One head of one row: its parts, SOME at a time, first to last. A row without context gives zeros."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(contexts + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    at = tl.arange(0, PADDED)
    inside = at < HEAD_SIZE
    base = partial + (row * HEADS + head) * max_parts * (HEAD_SIZE + 4)
    largest = float("-inf")
    total = 0.0
    acc = tl.zeros([PADDED], tl.float32)
    begin = first // PART_LEN
    end = tl.cdiv(context, PART_LEN)
    for some in range((begin // SOME) * SOME, end, SOME):
        part = some + tl.arange(0, SOME)
        real = (part >= begin) & (part < end)
        source = base + part * (HEAD_SIZE + 4)
        values = tl.load(source[:, None] + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        its_largest = tl.load(source + HEAD_SIZE, mask=real, other=float("-inf"))
        its_total = tl.load(source + HEAD_SIZE + 1, mask=real, other=0.0)
        higher = tl.maximum(largest, tl.max(its_largest, 0))
        shrink = tl.exp2(largest - higher)
        grow = tl.exp2(its_largest - higher)
        acc = acc * shrink + tl.sum(values * grow[:, None], 0)
        total = total * shrink + tl.sum(its_total * grow, 0)
        largest = higher
    target = out + (tl.load(rows + row).to(tl.int64) * HEADS + head) * HEAD_SIZE + at
    tl.store(target, (acc / tl.where(total > 0.0, total, 1.0)).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token each, on the device: which rows of the step, their blocks, and how many positions they see."""

    rows: Tensor  # [m] int32, their numbers in the step
    tables: Tensor  # [m, blocks] int32, at least ceil(context / block_size) of each row are right
    contexts: Tensor  # [m] int32, the row itself included; 0 for a padding row
    max_parts: int  # ceil(largest context that can be / PART)


def decode(cache: Tensor, layer: int, window: int | None, query: Tensor, some: DecodeRows, out: Tensor) -> None:
    """Of query [n, heads, d], `some` rows → the same rows of out [n, heads · d]. Their whole context is in `cache` already."""
    _, layers, _, block_size, kv_heads, size = cache.shape
    rows, heads = len(some.rows), query.shape[1]
    group = heads // kv_heads
    partial = torch.empty((rows, heads, some.max_parts, size + 4), dtype=torch.float32, device=query.device)
    workers = max(1, min(some.max_parts, _PROGRAMS // (rows * kv_heads)))
    seen = 0 if window is None else window
    padded = max(16, triton.next_power_of_2(size))
    decode_parts_kernel[(rows, kv_heads, workers)](
        query, cache, some.rows, some.tables, some.contexts, partial, layer, size**-0.5 * _LOG2_E,
        query.stride(0), some.tables.stride(0), some.max_parts, workers,
        LAYERS=layers, BLOCK_SIZE=block_size, KV_HEADS=kv_heads, HEAD_SIZE=size, GROUP=group, WINDOW=seen,
        PART_LEN=PART, TILE=_TILE, ROWS=max(16, triton.next_power_of_2(group)), PADDED=padded,
        DOT=dot_type(query), num_warps=4, num_stages=3,
    )  # fmt: skip
    decode_sum_kernel[(rows, heads)](
        partial, some.contexts, some.rows, out, some.max_parts,
        HEADS=heads, HEAD_SIZE=size, WINDOW=seen, PART_LEN=PART, PADDED=padded, SOME=_PARTS_AT_ONCE,
        num_warps=4,
    )  # fmt: skip


def dot_type(x: Tensor) -> tl.dtype:
    """What a matrix product's operands are: the tensor's own type, but float32 in the interpreter, whose bfloat16 one is wrong."""
    return tl.bfloat16 if x.dtype == torch.bfloat16 and x.is_cuda else tl.float32
