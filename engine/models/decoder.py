"""One decoder for the Llama family: token ids and positions in, hidden states out, logits for the rows that want them.

    embed → [ norm → qkv → (q/k norm) → rotate → attention → o + residual → norm → gate·up → down + residual ] × layers
    logits:  final norm → lm_head, for chosen rows only

Projections that share an input are one matrix (q, k, v; gate, up). Residuals are added inside the projections.
Does not know requests, blocks, files or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.rope import Rope
from kernels.dispatch import Kernels
from kernels.interface import Attention, Linear


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
class Weights:
    """A whole model's weights; `embedding` [vocab, hidden] in plain order, because it is looked up by row."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Linear


class Decoder:
    """The model. Holds weights only: KV memory comes with each call's `attention`."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, fingerprint: str) -> None:
        self.config = config
        self.kernels = kernels
        self.fingerprint = fingerprint
        self._weights = weights
        self._rope = Rope(config.rope, config.head_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return self._weights.embedding.dtype

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        """token_ids, positions [n] int64 → hidden states [len(rows), hidden] before the final norm, all n if `rows` is None.

        The KV of all n tokens is written either way; after the last layer's attention only `rows` are computed.
        """
        x = torch.embedding(self._weights.embedding, token_ids)
        cos, sin = self._rope.cos_sin(positions, x.dtype)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            x = self._layer(index, layer, x, (cos, sin), attention, rows if index == last else None)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] from `forward` → [n, vocab] in the model's dtype."""
        config, weights = self.config, self._weights
        return weights.lm_head(self.kernels.rms_norm(hidden, weights.final_norm, config.rms_norm_eps))

    def _layer(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
        rows: Tensor | None,
    ) -> Tensor:
        config, kernels = self.config, self.kernels
        eps, heads, kv_heads = config.rms_norm_eps, config.num_heads, config.num_kv_heads
        qkv = layer.qkv(kernels.rms_norm(x, layer.input_norm, eps))
        qkv = qkv.view(x.shape[0], heads + 2 * kv_heads, config.head_size)
        if layer.q_norm is None or layer.k_norm is None:
            rotated = kernels.rotary(qkv[:, : heads + kv_heads], *cos_sin)
            query, key = rotated[:, :heads], rotated[:, heads:]
        else:
            query = kernels.rotary(kernels.rms_norm(qkv[:, :heads], layer.q_norm, eps), *cos_sin)
            key = kernels.rotary(kernels.rms_norm(qkv[:, heads : heads + kv_heads], layer.k_norm, eps), *cos_sin)
        attended = attention(index, query, key, qkv[:, heads + kv_heads :])
        if rows is not None:
            attended, x = attended.index_select(0, rows), x.index_select(0, rows)
        x = layer.o(attended, x)
        gate_up = layer.gate_up(kernels.rms_norm(x, layer.post_norm, eps))
        return layer.down(kernels.silu_mul(gate_up), x)
