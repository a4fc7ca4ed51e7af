"""One decoder for the Llama family: token ids and positions in, hidden states out, logits for the rows that want them.

What a layer is, stands in `kernels.stack`; here a model's weights meet its rotation and the kernels that compute.
Does not know requests, blocks, files or sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.rope import Rope
from kernels.dispatch import Kernels
from kernels.interface import Attention
from kernels.stack import Inputs, Stack


class Decoder:
    """The model. Holds weights only: KV memory comes with each call's `attention`."""

    def __init__(self, config: ModelConfig, stack: Stack, kernels: Kernels, fingerprint: str) -> None:
        self.config = config
        self.kernels = kernels
        self.fingerprint = fingerprint
        self.dtype: torch.dtype = stack.dtype
        self._forward = kernels.forward(stack, kernels)
        self._rope = Rope(config.rope, config.head_size, stack.dtype, kernels.device)

    def reserve(self, length: int) -> None:
        """No position will be `length` or more: with that known, a step never waits for the device to look at one."""
        self._rope.reserve(length)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        """token_ids, positions [n] int64 → hidden states [len(rows), hidden] before the final norm, all n if `rows` is None.

        The KV of all n tokens is written either way; after the last layer's attention only `rows` are computed.
        """
        return self._forward.hidden(self._inputs(token_ids, positions, attention, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] from `forward` → [n, vocab] in the model's dtype."""
        return self._forward.logits(hidden)

    def step(self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        """The logits of what `forward` returns, the same bits, in one go."""
        return self._forward.step(self._inputs(token_ids, positions, attention, rows))

    def _inputs(self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Inputs:
        cos, sin = self._rope.cos_sin(positions)
        return Inputs(token_ids, cos, sin, attention, rows)
