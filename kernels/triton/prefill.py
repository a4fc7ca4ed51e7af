"""Paged attention of longer segments on a GPU: tiles of query rows, each against the blocks that any of its rows sees.

    segments        [chunk of 100 rows][chunk of 3]…        of unlike lengths, at any position
    tiles           (segment, its first row): 128 // group rows, the query heads of one KV head folded into them
    keys            tile by tile of 64 from the cache, the step's own included: whole tiles without a mask, then the edge

Online softmax as in FlashAttention (Dao et al., 2022). Does not know requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.decode import dot_type

_LOG2_E = 1.4426950408889634
_TILE = 64
_ROWS = 128


@triton.jit
def _attend(
    acc, largest, total, q, cache, table, query_at, layer, kv_head, scale, begin, end,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Keys begin … end − 1, in tiles; MASKED where some row may not see some of them."""
    at = tl.arange(0, PADDED)
    side = BLOCK_SIZE * KV_HEADS * HEAD_SIZE
    for tile in range(begin, end, TILE):
        position = tile + tl.arange(0, TILE)
        inside = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        cell = (block * LAYERS + layer) * (2 * BLOCK_SIZE) + position % BLOCK_SIZE
        where = (cell * KV_HEADS + kv_head)[:, None] * HEAD_SIZE + at[None, :]
        visible = inside[:, None] & (at < HEAD_SIZE)[None, :]
        k = tl.load(cache + where, mask=visible, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            seen = position[None, :] <= query_at[:, None]
            if WINDOW > 0:
                seen = seen & (position[None, :] > query_at[:, None] - WINDOW)
            scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        # A row whose window begins later has seen nothing yet: −inf − −inf would be NaN.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(largest - finite)
        v = tl.load(cache + where + side, mask=visible, other=0.0).to(DOT)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
        largest = higher
    return acc, largest, total


@triton.jit(do_not_specialize=["layer", "table_stride"])
def prefill_kernel(
    query, cache, tables, tiles, segments, out, layer, scale, query_stride, table_stride,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One tile of one KV head. `tiles` [t, 2]: segment, first row in it; `segments` [s, 3]: row of the step, rows, computed."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.load(tiles + 2 * tile)
    begin_row = tl.load(tiles + 2 * tile + 1)
    first_row = tl.load(segments + 3 * segment)
    num_rows = tl.load(segments + 3 * segment + 1)
    computed = tl.load(segments + 3 * segment + 2)
    line = tl.arange(0, ROWS)
    row = begin_row + line // GROUP
    at = tl.arange(0, PADDED)
    end_row = tl.minimum(begin_row + ROWS // GROUP, num_rows)
    real = row < end_row
    query_at = computed + tl.minimum(row, end_row - 1)
    head = kv_head * GROUP + line % GROUP
    valid = real[:, None] & (at < HEAD_SIZE)[None, :]
    which = (first_row + row).to(tl.int64)
    q = tl.load(query + which[:, None] * query_stride + head[:, None] * HEAD_SIZE + at[None, :], mask=valid, other=0.0)
    q = q.to(DOT)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    table = tables + segment.to(tl.int64) * table_stride
    end = computed + end_row
    edge = 0
    if WINDOW > 0:
        edge = tl.maximum(computed + begin_row + 1 - WINDOW, 0)
    else:
        edge = (computed + begin_row + 1) // TILE * TILE
        acc, largest, total = _attend(
            acc, largest, total, q, cache, table, query_at, layer, kv_head, scale, 0, edge,
            LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, WINDOW, TILE, PADDED, False, DOT,
        )  # fmt: skip
    acc, largest, total = _attend(
        acc, largest, total, q, cache, table, query_at, layer, kv_head, scale, edge, end,
        LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, WINDOW, TILE, PADDED, True, DOT,
    )  # fmt: skip
    target = out + (which[:, None] * (KV_HEADS * GROUP) + head[:, None]) * HEAD_SIZE + at[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=valid)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Segments of more than one row, on the device."""

    tables: Tensor  # [s, blocks] int32
    tiles: Tensor  # [t, 2] int32: segment, first row in it
    segments: Tensor  # [s, 3] int32: its first row in the step, its rows, positions before them


def tile_rows(group: int) -> int:
    """Query rows of one tile where `group` heads share a KV head."""
    return max(1, _lines(group) // group)


def prefill(cache: Tensor, layer: int, window: int | None, query: Tensor, work: PrefillTiles, out: Tensor) -> None:
    """query [n, heads, d] of the whole step → the segments' rows of out [n, heads · d]. All KV is in `cache` already."""
    _, layers, _, block_size, kv_heads, size = cache.shape
    group = query.shape[1] // kv_heads
    wide = query.dtype == torch.float32
    prefill_kernel[(len(work.tiles), kv_heads)](
        query, cache, work.tables, work.tiles, work.segments, out, layer, size**-0.5 * _LOG2_E,
        query.stride(0), work.tables.stride(0),
        LAYERS=layers, BLOCK_SIZE=block_size, KV_HEADS=kv_heads, HEAD_SIZE=size, GROUP=group,
        WINDOW=0 if window is None else window, TILE=32 if wide else _TILE, ROWS=_lines(group),
        PADDED=max(16, triton.next_power_of_2(size)), DOT=dot_type(query),
        num_warps=8, num_stages=1 if wide else 3,
    )  # fmt: skip


def _lines(group: int) -> int:
    return max(_ROWS, 1 << (group - 1).bit_length())
