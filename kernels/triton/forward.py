"""A step through all layers on a GPU: as `kernels.one_by_one`, but rotation and KV write are one pass over q, k and v.

Every call only starts kernels and waits for nothing, so that a step can be recorded (CUDA graphs).
Does not know configs, files or requests.
"""

from __future__ import annotations

from torch import Tensor

from kernels.interface import Ops
from kernels.one_by_one import OneByOne
from kernels.stack import Inputs, Layer, Stack
from kernels.triton.cache import TritonAttention


class TritonForward:
    """See `kernels.stack.Forward`."""

    def __init__(self, stack: Stack, ops: Ops) -> None:
        self._stack = stack
        self._ops = ops
        self._plain = OneByOne(stack, ops)
        # Models that norm queries and keys do so before they rotate: for them it is one op after the other.
        self._fused = all(layer.q_norm is None for layer in stack.layers)

    def hidden(self, inputs: Inputs) -> Tensor:
        """See `kernels.stack.Forward`."""
        attention = inputs.attention
        if not self._fused or not isinstance(attention, TritonAttention):
            return self._plain.hidden(inputs)
        x = self._stack.embedding(inputs.token_ids)
        last = len(self._stack.layers) - 1
        for index, layer in enumerate(self._stack.layers):
            x = self._layer(layer, x, inputs, attention, index, inputs.rows if index == last else None)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """See `kernels.stack.Forward`."""
        return self._plain.logits(hidden)

    def step(self, inputs: Inputs) -> Tensor:
        """See `kernels.stack.Forward`."""
        return self.logits(self.hidden(inputs))

    def _layer(
        self, layer: Layer, x: Tensor, inputs: Inputs, attention: TritonAttention, index: int, rows: Tensor | None
    ) -> Tensor:
        shape, ops = self._stack.shape, self._ops
        eps, heads = shape.rms_norm_eps, shape.num_heads + 2 * shape.num_kv_heads
        qkv = layer.qkv(ops.rms_norm(x, layer.input_norm, eps)).view(x.shape[0], heads, shape.head_size)
        attended = attention.rotate_and_attend(index, qkv, inputs.cos, inputs.sin)
        if rows is not None:
            attended, x = attended.index_select(0, rows), x.index_select(0, rows)
        x = layer.o(attended, x)
        gate_up = layer.gate_up(ops.rms_norm(x, layer.post_norm, eps))
        return layer.down(ops.silu_mul(gate_up), x)
