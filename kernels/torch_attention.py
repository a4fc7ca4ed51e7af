"""Paged attention on a CPU with torch ops: whole blocks are gathered once per layer, then attended to densely.

KV memory is [num_blocks, layers, 2, block_size, kv_heads, d], contiguous. Seen as rows of one cell (kv_heads · d), the
cells of layer l start 2 · l · block_size rows later than those of layer 0; seen as rows of one block, 2 · l rows later.
So one index tensor per step serves every layer: only the base of the view moves, and the views are made once.

    rows of a step ─┬─ one-row segments, batched by like length ─▶ DecodeGroup   gather → fold query heads → attend
                    └─ longer segments, one by one              ─▶ Chunk         own keys, or gather → attend, tile by tile

Cells of a gathered block that the row must not see may hold anything, NaN too: keys and values there are zeroed, then
masked. Does not know requests or schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import Segment

# A decode group pads its rows to the longest. Another group costs about as many microseconds a layer as gathering and
# attending to this many tokens.
_PADDING_TOKENS_WORTH_A_GROUP = 512
# Rows of a prompt attended to at once, and float32 scores held at once (2 MiB): tiles of a size that caches keep.
_TILE_ROWS = 64
_TILE_SCORES = 1 << 19


class TorchKVCache:
    """The views of KV memory that every step needs, made once."""

    def __init__(self, tensor: Tensor, windows: tuple[int | None, ...]) -> None:
        if not tensor.is_contiguous():
            raise ValueError("kv memory must be contiguous")
        num_blocks, layers, _, block_size, kv_heads, head_size = tensor.shape
        if len(windows) != layers:
            raise ValueError(f"{len(windows)} windows for {layers} layers")
        self.tensor = tensor
        self.windows = windows
        self.block_size = block_size
        self.block_stride = 2 * layers  # rows of the block view from one block to the next
        cells = tensor.view(num_blocks * layers * 2 * block_size, kv_heads * head_size)
        blocks = tensor.view(num_blocks * layers * 2, block_size * kv_heads * head_size)
        self.key_cells = tuple(cells[2 * layer * block_size :] for layer in range(layers))
        self.value_cells = tuple(cells[(2 * layer + 1) * block_size :] for layer in range(layers))
        self.blocks = tuple(blocks[2 * layer :] for layer in range(layers))

    def attention(self, segments: Sequence[Segment]) -> TorchAttention:
        """See `kernels.interface.KVCache`."""
        return TorchAttention(self, segments)


@dataclass(frozen=True, slots=True)
class _Gather:
    """Which blocks to fetch (keys of all, then values of all) and where in the fetched cells the visible ones lie."""

    block_rows: Tensor  # [2 · rows · blocks], for TorchKVCache.blocks
    out: Tensor  # [2 · rows · blocks, block_size · kv_heads · d], reused by every layer
    keys: Tensor  # [rows, kv_heads, seen, d], view of out
    values: Tensor
    stale: Tensor | None  # rows of the cell view of `out` that no query may see
    mask: Tensor | None  # added to the scores; None when every query sees all

    def fetch(self, blocks: Tensor) -> None:
        torch.index_select(blocks, 0, self.block_rows, out=self.out)
        if self.stale is not None:
            cells = self.keys.shape[1] * self.keys.shape[3]
            self.out.view(-1, cells).index_fill_(0, self.stale, 0)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: Tensor | slice
    gather: _Gather


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some of a chunk's rows and the keys that any of them sees; `masks` hide the corners that only some see."""

    rows: slice  # of the chunk
    keys: slice  # of the chunk's keys
    masks: tuple[tuple[slice, Tensor], ...]  # (columns of the tile, float32 [rows, columns] of 0 and -inf)


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice
    gather: _Gather | None  # None: the chunk sees only itself
    tiles: tuple[_Tile, ...]


class TorchAttention:
    """See `kernels.interface.Attention`."""

    def __init__(self, cache: TorchKVCache, segments: Sequence[Segment]) -> None:
        self._cache = cache
        self._slots = _slots(cache, segments)
        singles = [s for s in segments if s.num_rows == 1]
        longer = [s for s in segments if s.num_rows > 1]
        self._plans: dict[int | None, tuple[list[_DecodeGroup], list[_Chunk]]] = {
            window: (
                [_decode_group(cache, group, window) for group in _alike(singles, window)],
                [_chunk(cache, segment, window) for segment in longer],
            )
            for window in set(cache.windows)
        }

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `kernels.interface.Attention`."""
        cache = self._cache
        rows, heads, head_size = query.shape
        kv_heads = key.shape[1]
        cache.key_cells[layer].index_copy_(0, self._slots, key.reshape(rows, -1))
        cache.value_cells[layer].index_copy_(0, self._slots, value.reshape(rows, -1))
        groups, chunks = self._plans[cache.windows[layer]]
        if len(groups) == 1 and not chunks and isinstance(groups[0].rows, slice):
            return _attend_group(groups[0].gather, cache.blocks[layer], query, kv_heads)
        out = torch.empty(rows, heads * head_size, dtype=query.dtype)
        for group in groups:
            out[group.rows] = _attend_group(group.gather, cache.blocks[layer], query[group.rows], kv_heads)
        for chunk in chunks:
            if chunk.gather is None:
                keys, values = key[chunk.rows].transpose(0, 1), value[chunk.rows].transpose(0, 1)
            else:
                chunk.gather.fetch(cache.blocks[layer])
                keys, values = chunk.gather.keys[0], chunk.gather.values[0]
            _attend_chunk(query[chunk.rows], keys, values, chunk.tiles, out[chunk.rows])
        return out


def _attend_group(gather: _Gather, blocks: Tensor, query: Tensor, kv_heads: int) -> Tensor:
    """query [rows, heads, d] → [rows, heads · d]; the heads of one KV head are folded into query rows."""
    gather.fetch(blocks)
    rows, heads, head_size = query.shape
    folded = query.view(rows, kv_heads, heads // kv_heads, head_size)
    keys, values, mask = gather.keys, gather.values, gather.mask
    if heads == kv_heads and query.dtype != torch.float32:
        # With nothing to fold, torch's bfloat16 attention takes five times as long as float32, conversion included.
        folded, keys, values = folded.float(), keys.float(), values.float()
        mask = None if mask is None else mask.float()
    out = torch.nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return out.to(query.dtype).reshape(rows, heads * head_size)


def _attend_chunk(query: Tensor, keys: Tensor, values: Tensor, tiles: tuple[_Tile, ...], out: Tensor) -> None:
    """query [n, heads, d]; keys and values [kv_heads, seen, d] → out [n, heads · d].

    Plain matrix products on tiles that stay in the cache: on a CPU without matrix units torch's fused attention runs at a
    third of their speed, and it computes the keys that causality hides. Scores and softmax are float32 whatever the dtype.
    """
    num_rows, heads, head_size = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    scaled = query.view(num_rows, kv_heads, group, head_size).permute(1, 2, 0, 3).float() * head_size**-0.5
    keys_wide = keys.float().transpose(1, 2)
    values = values.contiguous()
    target = out.view(num_rows, kv_heads, group, head_size).permute(1, 2, 0, 3)
    for tile in tiles:
        seen = tile.keys.stop - tile.keys.start
        part = scaled[:, :, tile.rows]
        rows = part.shape[2]
        at_once = max(1, min(kv_heads, _TILE_SCORES // (group * rows * seen)))
        for first in range(0, kv_heads, at_once):
            some = slice(first, first + at_once)
            folded = part[some].reshape(-1, group * rows, head_size)
            scores = torch.bmm(folded, keys_wide[some, :, tile.keys])
            corners = scores.view(-1, group, rows, seen)
            for columns, mask in tile.masks:
                corners[..., columns] += mask
            weights = scores.softmax(-1).to(values.dtype)
            result = torch.bmm(weights, values[some, tile.keys])
            target[some, :, tile.rows] = result.view(-1, group, rows, head_size)


def _slots(cache: TorchKVCache, segments: Sequence[Segment]) -> Tensor:
    """Row of `key_cells[0]` of every scheduled token."""
    size, stride = cache.block_size, cache.block_stride * cache.block_size
    slots: list[int] = []
    for segment in segments:
        if segment.first_row != len(slots):
            raise ValueError(f"segment starts at row {segment.first_row}, expected {len(slots)}")
        ids = segment.block_ids
        slots.extend(ids[p // size] * stride + p % size for p in range(segment.num_computed, segment.context_len))
    return torch.tensor(slots, dtype=torch.int64)


def _seen(segment: Segment, window: int | None) -> int:
    """Positions that a one-row segment sees."""
    return segment.context_len if window is None else min(segment.context_len, window)


def _alike(singles: list[Segment], window: int | None) -> list[list[Segment]]:
    """Groups of segments whose padding to the longest of the group costs less than another group would."""
    groups: list[list[Segment]] = []
    padding = 0
    for segment in sorted(singles, key=lambda s: -_seen(s, window)):
        if groups:
            padding += _seen(groups[-1][0], window) - _seen(segment, window)
        if not groups or padding > _PADDING_TOKENS_WORTH_A_GROUP:
            groups.append([])
            padding = 0
        groups[-1].append(segment)
    for group in groups:
        group.sort(key=lambda s: s.first_row)
    return groups


def _decode_group(cache: TorchKVCache, group: list[Segment], window: int | None) -> _DecodeGroup:
    size = cache.block_size
    firsts = [(s.context_len - _seen(s, window)) // size for s in group]
    bounds = [  # visible cells of each row, in its gathered blocks
        (s.context_len - _seen(s, window) - first * size, s.context_len - first * size)
        for s, first in zip(group, firsts, strict=True)
    ]
    num_blocks = max(-(-high // size) for _, high in bounds)
    ids = [_padded(s.block_ids, first, num_blocks) for s, first in zip(group, firsts, strict=True)]
    rows = [s.first_row for s in group]
    contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
    return _DecodeGroup(
        rows=slice(rows[0], rows[0] + len(rows)) if contiguous else torch.tensor(rows),
        gather=_gather(cache, ids, bounds),
    )


def _padded(block_ids: Sequence[int], first: int, num_blocks: int) -> list[int]:
    ids = list(block_ids[first : first + num_blocks])
    return ids + [ids[0]] * (num_blocks - len(ids))


def _gather(cache: TorchKVCache, ids: list[list[int]], bounds: list[tuple[int, int]]) -> _Gather:
    """`ids` [rows][blocks]; `bounds` [rows] (low, high): a row sees the fetched cells low … high − 1."""
    _, _, _, size, kv_heads, head_size = cache.tensor.shape
    key_rows = torch.tensor(ids, dtype=torch.int64).flatten() * cache.block_stride
    block_rows = torch.cat((key_rows, key_rows + 1))
    out = torch.empty(block_rows.shape[0], size * kv_heads * head_size, dtype=cache.tensor.dtype)
    fetched = len(ids[0]) * size
    cells = out.view(2, len(ids), fetched, kv_heads, head_size).transpose(2, 3)
    low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
    uniform = all(b == (low, high) for b in bounds)
    keys, values = cells[:, :, :, low:high]
    if uniform:
        return _Gather(block_rows, out, keys, values, stale=None, mask=None)
    at = torch.arange(fetched)
    limits = torch.tensor(bounds)
    hidden = (at < limits[:, :1]) | (at >= limits[:, 1:])  # [rows, fetched]
    stale = hidden.expand(2, -1, -1).flatten().nonzero().flatten()
    mask = torch.zeros(hidden.shape, dtype=cache.tensor.dtype).masked_fill_(hidden, float("-inf"))
    return _Gather(block_rows, out, keys, values, stale=stale, mask=mask[:, None, None, low:high])


def _chunk(cache: TorchKVCache, segment: Segment, window: int | None) -> _Chunk:
    rows = slice(segment.first_row, segment.first_row + segment.num_rows)
    size = cache.block_size
    low = _first_seen(segment.num_computed, window)
    tiles = tuple(_tiles(segment, window, low))
    if segment.num_computed == 0:
        return _Chunk(rows, gather=None, tiles=tiles)
    first = low // size
    ids = list(segment.block_ids[first : -(-segment.context_len // size)])
    gather = _gather(cache, [ids], [(low - first * size, segment.context_len - first * size)])
    return _Chunk(rows, gather=gather, tiles=tiles)


def _first_seen(position: int, window: int | None) -> int:
    """The first position that the row at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _tiles(segment: Segment, window: int | None, low: int) -> Iterator[_Tile]:
    """`low` is the position of the chunk's first key."""
    for begin in range(segment.num_computed, segment.context_len, _TILE_ROWS):
        end = min(begin + _TILE_ROWS, segment.context_len)
        first = _first_seen(begin, window)
        query_at = torch.arange(begin, end)[:, None]
        masks = []
        if end - begin > 1:  # keys that the first row must not see yet
            masks.append(_corner(query_at, begin + 1, end, first, None))
        if window is not None and end - window > first:  # keys that the last row no longer sees
            masks.append(_corner(query_at, first, min(end - window, end), first, window))
        yield _Tile(
            rows=slice(begin - segment.num_computed, end - segment.num_computed),
            keys=slice(first - low, end - low),
            masks=tuple(masks),
        )


def _corner(query_at: Tensor, begin: int, end: int, first: int, window: int | None) -> tuple[slice, Tensor]:
    """Mask over the keys begin … end − 1 of a tile whose keys start at `first`: causal, or of the window's far edge."""
    key_at = torch.arange(begin, end)
    hidden = key_at > query_at if window is None else key_at <= query_at - window
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return slice(begin - first, end - first), mask
