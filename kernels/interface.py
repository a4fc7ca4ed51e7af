"""The ops a decoder is made of, as types: what every implementation takes, returns and promises.

`kernels.reference` says in readable torch what each op means; `kernels.torch_linear` and `kernels.torch_attention` are
what torch alone does best on a CPU; `kernels.cpu` is the native library; `kernels.dispatch` chooses.
Does not know models or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.batch import Segment
from kernels.quantised import QuantisedWeight


class Linear(Protocol):
    """y = x Wᵀ + b (+ residual), the weight held in whatever order suits the implementation."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [n, in] → [n, out]; `residual` [n, out] is added and not changed."""
        ...


class MakeLinear(Protocol):
    """Takes over a weight [out, in] and a bias [out] or None; the caller drops its own references."""

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The linear op of this weight."""
        ...


class Embedding(Protocol):
    """Rows of a table."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [n] int64, each below the table's height → [n, width]."""
        ...


class MakeEmbedding(Protocol):
    """Takes over a table [vocab, width]; the caller drops its own reference."""

    def __call__(self, table: Tensor) -> Embedding:
        """The look-up in this table."""
        ...


class MakeTied(Protocol):
    """An output matrix that is the embedding, too: the weight is held once where the implementation can look rows up in it."""

    def __call__(self, table: Tensor) -> tuple[Embedding, Linear]:
        """The look-up in `table` [vocab, width], and y = x tableᵀ."""
        ...


class MakeQuantisedLinear(Protocol):
    """As `MakeLinear`, for a quantised weight and x of `dtype`. A row's result is `kernels.quantised.QuantisedLinear`'s."""

    def __call__(self, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """The linear op of this weight."""
        ...


class MakeQuantisedTied(Protocol):
    """As `MakeTied`, for a quantised table."""

    def __call__(self, table: QuantisedWeight, dtype: torch.dtype) -> tuple[Embedding, Linear]:
        """The look-up in `table`, dequantised to `dtype`, and y = x tableᵀ."""
        ...


class RMSNorm(Protocol):
    """Root-mean-square norm over the last dimension, statistics in float32."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., d], weight [d] → [..., d] in x's dtype."""
        ...


class Rotary(Protocol):
    """Rotary position embedding, rotate-half convention."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [n, heads, d]; cos and sin [n, 1, d] in x's dtype, both halves filled, sin's first half negated → [n, heads, d]."""
        ...


class SiluMul(Protocol):
    """The gate of the MLP."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up [n, 2 m], gate first → silu(gate) · up [n, m]."""
        ...


class Attention(Protocol):
    """One step's attention over the paged KV memory. Made once per step, called once per layer, in any layer order."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write this step's keys and values, then attend.

        query [n, heads, d]; key and value [n, kv_heads, d], one row per scheduled token → [n, heads · d].
        A row sees positions ≤ its own, and with a window w only the last w of them. KV cells outside that are never
        read into the result, whatever they hold (NaN too).
        """
        ...


class KVCache(Protocol):
    """KV memory prepared for an attention implementation; lives as long as the runner."""

    @property
    def tensor(self) -> Tensor:
        """[num_blocks, num_layers, 2 (K, V), block_size, kv_heads, d], the layout of `contracts.kv_layout`."""
        ...

    def attention(self, segments: Sequence[Segment]) -> Attention:
        """Attention for a step whose rows are `segments`, in row order and without gaps."""
        ...


class MakeKVCache(Protocol):
    """Prepares KV memory for a model whose layers have these windows (None: the whole context)."""

    def __call__(self, tensor: Tensor, windows: tuple[int | None, ...]) -> KVCache:
        """Keeps `tensor`, copies nothing."""
        ...


class Ops(Protocol):
    """The ops between the projections that need no weights of their own."""

    @property
    def rms_norm(self) -> RMSNorm:
        """See `RMSNorm`."""
        ...

    @property
    def rotary(self) -> Rotary:
        """See `Rotary`."""
        ...

    @property
    def silu_mul(self) -> SiluMul:
        """See `SiluMul`."""
        ...


SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)
