"""The layers of a decoder as data, and a step through all of them as an op.

    embed → [ norm → qkv → (q/k norm) → rotate → attention → o + residual → norm → gate·up → down + residual ] × layers
    logits:  final norm → lm_head, for chosen rows only

Projections that share an input are one matrix (q, k, v; gate, up). Residuals are added inside the projections.
`kernels.one_by_one` is the slow truth: one op after the other, from Python. Does not know configs, files or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.interface import Attention, Embedding, Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Shape:
    """What the weights do not say of themselves."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float


@dataclass(frozen=True, slots=True)
class Stack:
    """A whole model's weights. A tied embedding is looked up in `lm_head`'s own weight where the implementation can."""

    shape: Shape
    embedding: Embedding
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Linear

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, norms and KV."""
        return self.final_norm.dtype


@dataclass(frozen=True, slots=True)
class Inputs:
    """A step's rows: `token_ids` [n] int64, `cos` and `sin` [n, 1, d] as `kernels.interface.Rotary` has them.

    `rows` int64: those to compute to the end, after the last layer's attention; None: all. The KV of all is written.
    """

    token_ids: Tensor
    cos: Tensor
    sin: Tensor
    attention: Attention
    rows: Tensor | None


class Forward(Protocol):
    """A step through a stack."""

    def hidden(self, inputs: Inputs) -> Tensor:
        """[wanted rows, hidden] before the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] from `hidden` → [n, vocab] in the stack's dtype."""
        ...

    def step(self, inputs: Inputs) -> Tensor:
        """logits(hidden(inputs)), the same bits, in one go."""
        ...
