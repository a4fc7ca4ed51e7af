"""A step through a decoder's layers, one op after the other from Python: the slow truth of every fused step.

Which implementation computes each op is `Kernels`' to say. Does not know configs, files or requests.
"""

from __future__ import annotations

from torch import Tensor

from kernels.interface import Ops
from kernels.stack import Inputs, Layer, Stack


class OneByOne:
    """See `kernels.stack.Forward`."""

    def __init__(self, stack: Stack, ops: Ops) -> None:
        self._stack = stack
        self._ops = ops

    def hidden(self, inputs: Inputs) -> Tensor:
        """See `kernels.stack.Forward`."""
        x = self._stack.embedding(inputs.token_ids)
        last = len(self._stack.layers) - 1
        for index, layer in enumerate(self._stack.layers):
            x = self._layer(index, layer, x, inputs, inputs.rows if index == last else None)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """See `kernels.stack.Forward`."""
        stack = self._stack
        return stack.lm_head(self._ops.rms_norm(hidden, stack.final_norm, stack.shape.rms_norm_eps))

    def step(self, inputs: Inputs) -> Tensor:
        """See `kernels.stack.Forward`."""
        return self.logits(self.hidden(inputs))

    def _layer(self, index: int, layer: Layer, x: Tensor, inputs: Inputs, rows: Tensor | None) -> Tensor:
        shape, ops, cos, sin = self._stack.shape, self._ops, inputs.cos, inputs.sin
        eps, heads, kv_heads = shape.rms_norm_eps, shape.num_heads, shape.num_kv_heads
        qkv = layer.qkv(ops.rms_norm(x, layer.input_norm, eps))
        qkv = qkv.view(x.shape[0], heads + 2 * kv_heads, shape.head_size)
        if layer.q_norm is None or layer.k_norm is None:
            rotated = ops.rotary(qkv[:, : heads + kv_heads], cos, sin)
            query, key = rotated[:, :heads], rotated[:, heads:]
        else:
            query = ops.rotary(ops.rms_norm(qkv[:, :heads], layer.q_norm, eps), cos, sin)
            key = ops.rotary(ops.rms_norm(qkv[:, heads : heads + kv_heads], layer.k_norm, eps), cos, sin)
        attended = inputs.attention(index, query, key, qkv[:, heads + kv_heads :])
        if rows is not None:
            attended, x = attended.index_select(0, rows), x.index_select(0, rows)
        x = layer.o(attended, x)
        gate_up = layer.gate_up(ops.rms_norm(x, layer.post_norm, eps))
        return layer.down(ops.silu_mul(gate_up), x)
