"""The small ops and linear as torch alone does them best on a CPU, without our native library.

`linear` keeps its weight in oneDNN's own order: at few rows reading weights is all the time there is, and the plain order
costs half of the bandwidth. oneDNN compiles a kernel for every number of rows and keeps up to a thousand of them, half a
megabyte and more each: prompts of all lengths made a worker grow by three quarters of a gigabyte. So rows come in few sizes.
Attention is in `kernels.torch_attention`. Does not know models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import ReferenceEmbedding

# oneDNN chooses a weight order for a number of rows; one order serves decode (few) and prefill (many) equally well at 16,
# while leaving it open picks, for float32, an order that halves prefill.
_ROWS_HINT = 16


def size_for(rows: int) -> int:
    """At least `rows`: exact up to 32, above in 16 sizes for each doubling, so that less than a sixteenth is computed in vain."""
    step = 1 << max(0, (rows - 1).bit_length() - 5)
    return -(-rows // step) * step


def _padded(x: Tensor, more: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, more))


class PackedLinear:
    """Owns the reordered weight; the plain one is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._bias = bias
        self._plain = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `kernels.interface.Linear`."""
        rows = len(x)
        if more := size_for(rows) - rows:
            return self(_padded(x, more), None if residual is None else _padded(residual, more))[:rows]
        if residual is None:
            y: Tensor = self._plain(x, self._weight, self._bias, "none", [], "")
        else:
            y = self._binary(x, residual, self._weight, self._bias, "add")
        return y


def tied(table: Tensor) -> tuple[ReferenceEmbedding, PackedLinear]:
    """See `kernels.interface.MakeTied`. Held twice: oneDNN's order cannot be looked up in, and read whole it is twice as fast."""
    return ReferenceEmbedding(table), PackedLinear(table, None)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.interface.RMSNorm`."""
    return torch.rms_norm(x, weight.shape, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.interface.Rotary`."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(swapped.mul_(sin), x, cos)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.interface.SiluMul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
