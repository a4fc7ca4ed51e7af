"""What each op means, in torch that can be read: slow, obvious, the truth that every fast path is tested against.

Does not know performance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.batch import Segment


class ReferenceLinear:
    """y = x Wᵀ + b (+ residual)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `kernels.interface.Linear`."""
        y = torch.nn.functional.linear(x, self._weight, self._bias)
        return y if residual is None else residual + y


class ReferenceEmbedding:
    """Rows of a table in plain order."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `kernels.interface.Embedding`."""
        return torch.embedding(self.table, token_ids)


def tied(table: Tensor) -> tuple[ReferenceEmbedding, ReferenceLinear]:
    """See `kernels.interface.MakeTied`."""
    return ReferenceEmbedding(table), ReferenceLinear(table, None)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.interface.RMSNorm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.interface.Rotary`."""
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return x * cos + swapped * sin


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.interface.SiluMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class ReferenceKVCache:
    """KV memory as it is."""

    def __init__(self, tensor: Tensor, windows: tuple[int | None, ...]) -> None:
        self.tensor = tensor
        self._windows = windows

    def attention(self, segments: Sequence[Segment]) -> ReferenceAttention:
        """See `kernels.interface.KVCache`."""
        return ReferenceAttention(self.tensor, self._windows, segments)


class ReferenceAttention:
    """Row by row: write each cell, then gather each row's visible cells, one by one, and attend in float32."""

    def __init__(self, cache: Tensor, windows: tuple[int | None, ...], segments: Sequence[Segment]) -> None:
        self._cache = cache
        self._windows = windows
        self._segments = segments

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `kernels.interface.Attention`."""
        block_size = self._cache.shape[3]
        for segment in self._segments:
            for i in range(segment.num_rows):
                position = segment.num_computed + i
                cell = self._cache[segment.block_ids[position // block_size], layer, :, position % block_size]
                cell[0] = key[segment.first_row + i]
                cell[1] = value[segment.first_row + i]
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype)
        for segment in self._segments:
            for i in range(segment.num_rows):
                row = segment.first_row + i
                out[row] = self._attend_row(layer, segment, segment.num_computed + i, query[row])
        return out

    def _attend_row(self, layer: int, segment: Segment, position: int, query: Tensor) -> Tensor:
        block_size = self._cache.shape[3]
        window = self._windows[layer]
        start = 0 if window is None else max(0, position + 1 - window)
        cells = [
            self._cache[segment.block_ids[p // block_size], layer, :, p % block_size]
            for p in range(start, position + 1)
        ]
        keys, values = torch.stack(cells, dim=1).float()  # each [seen, kv_heads, d]
        heads, head_size = query.shape
        grouped = query.float().view(keys.shape[1], heads // keys.shape[1], head_size)
        scores = torch.einsum("hgd,thd->hgt", grouped, keys) * head_size**-0.5
        return torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).to(query.dtype).reshape(-1)
