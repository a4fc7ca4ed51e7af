"""Dense float64 arithmetic that kernels are compared with, and paged KV memory in which all that nobody may see is NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import Segment

BLOCK_SIZE = 4
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
# Tokens computed before, tokens now.
Work = list[tuple[int, int]]


def assert_near(found: Tensor, exact: Tensor) -> None:
    limit = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double().cpu(), exact, atol=limit, rtol=limit)


def attended(query: Tensor, keys: Tensor, values: Tensor, first_position: int, window: int | None) -> Tensor:
    """query [n, heads, d] at positions first_position…, keys and values [seen, kv_heads, d], all float64 → [n, heads, d]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[2] ** -0.5
    query_at = first_position + torch.arange(query.shape[0])[:, None]
    key_at = torch.arange(keys.shape[0])
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


@dataclass(frozen=True)
class World:
    """KV memory that holds the contexts of some requests, and the segments of their next step."""

    cache: Tensor  # [blocks, layers, 2, block_size, kv_heads, d]
    segments: list[Segment]
    contexts: list[Tensor]  # [positions before, layers, 2, kv_heads, d] each
    num_rows: int

    def exact(self, layer: int, window: int | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What attention must give for these rows, float64 [n, heads · d]."""
        out = torch.empty(len(query), query.shape[1] * query.shape[2], dtype=torch.float64)
        for segment, context in zip(self.segments, self.contexts, strict=True):
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            keys = torch.cat((context[:, layer, 0], key[rows])).double()
            values = torch.cat((context[:, layer, 1], value[rows])).double()
            out[rows] = attended(query[rows].double(), keys, values, segment.num_computed, window).flatten(1)
        return out

    def untouched(self) -> Tensor:
        """All cells that are nobody's."""
        mine = torch.zeros(self.cache.shape[0], self.cache.shape[3], dtype=torch.bool)
        size = self.cache.shape[3]
        for segment in self.segments:
            for position in range(segment.context_len):
                mine[segment.block_ids[position // size], position % size] = True
        return self.cache.permute(0, 3, 1, 2, 4, 5)[~mine]

    def cells(self, layer: int) -> Tensor:
        """What lies at the rows' own positions: [n, 2, kv_heads, d]."""
        size = self.cache.shape[3]
        return torch.stack(
            [
                self.cache[segment.block_ids[position // size], layer, :, position % size]
                for segment in self.segments
                for position in range(segment.num_computed, segment.context_len)
            ]
        )


def world(work: Work, shape: tuple[int, int, int], dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> World:
    """`shape` is (layers, kv_heads, d). Blocks lie in no order; what is not written is NaN."""
    layers, kv_heads, size = shape
    held = [-(-(before + now) // block_size) for before, now in work]
    ids = list(range(sum(held) + 3))
    random.Random(1).shuffle(ids)
    cache = torch.full((len(ids), layers, 2, block_size, kv_heads, size), float("nan"), dtype=dtype)
    segments: list[Segment] = []
    contexts: list[Tensor] = []
    row = 0
    for (before, now), count in zip(work, held, strict=True):
        block_ids = [ids.pop() for _ in range(count)]
        segments.append(Segment(row, now, before, block_ids))
        row += now
        context = torch.randn(before, layers, 2, kv_heads, size).to(dtype)
        contexts.append(context)
        for position in range(before):
            cache[block_ids[position // block_size], :, :, position % block_size] = context[position]
    return World(cache, segments, contexts, row)
