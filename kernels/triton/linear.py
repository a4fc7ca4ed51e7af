"""Projections on a GPU: cuBLAS through torch, the residual added by the product itself. Does not know models."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.interface import Embedding, Linear


class TorchLinear:
    """y = x Wᵀ + b (+ residual), the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `kernels.interface.Linear`."""
        if residual is not None and self._bias is None:
            return torch.addmm(residual, x, self._weight.t())
        y = torch.nn.functional.linear(x, self._weight, self._bias)
        return y if residual is None else y.add_(residual)


class TorchEmbedding:
    """Rows of a table on the device."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `kernels.interface.Embedding`."""
        return torch.embedding(self._table, token_ids)


def tied(table: Tensor) -> tuple[Embedding, Linear]:
    """See `kernels.interface.MakeTied`: one weight serves both."""
    return TorchEmbedding(table), TorchLinear(table, None)
