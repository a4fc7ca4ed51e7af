"""Weights of eight or four bits, by groups of 32 inputs: what they are in plain order, how they are made, and linear on them.

    format   stored q       stands for              scales                                            bits a weight
    int8     0 … 255        (q - 128) · scale       float16 [out, groups]                             8.5
    int4     0 … 15         (q - 8) · scale         float16 [out, groups]                             4.5
    int4_k   0 … 15         q · d · s - dmin · m    d, dmin float16 [out, groups / 8]; s, m uint8     4.625

The formats are GGUF's Q8_0, Q4_0 and Q4_K, so that such files are served as they are. `QuantisedLinear` is the slow truth: x,
too, is rounded to 8 bits by groups of 32 (scale: largest / 127), and what is multiplied are the rounded ones.
Does not know files or packed orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Format = Literal["int8", "int4", "int4_k"]
GROUP = 32
SUPER = 8
_ROWS_AT_ONCE = 8192
ZERO: dict[Format, int] = {"int8": 128, "int4": 8, "int4_k": 0}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight [out, inputs]. `stored` uint8 [out, groups · 32], filled up with `ZERO`; `scales` as the module's table says.

    `scales` is (scale,) or (d, dmin, s, m).
    """

    format: Format
    inputs: int
    stored: Tensor
    scales: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def outputs(self) -> int:
        """Rows."""
        return len(self.stored)

    def dequantised(self) -> Tensor:
        """float32 [out, inputs]: the same bits as GGUF's own library gives."""
        q = (self.stored.short() - ZERO[self.format]).float().view(self.outputs, -1, GROUP)
        if self.format == "int4_k":
            d, dmin, s, m = self.scales
            scale, minimum = _spread(d, s.shape[1]) * s.float(), _spread(dmin, s.shape[1]) * m.float()
            values = q * scale.unsqueeze(-1) - minimum.unsqueeze(-1)
        else:
            values = q * self.scales[0].float().unsqueeze(-1)
        return values.view(self.outputs, -1)[:, : self.inputs].contiguous()


def _spread(supers: Tensor, groups: int) -> Tensor:
    return supers.float().repeat_interleave(SUPER, dim=1)[:, :groups]


def quantise(weight: Tensor, to: Format) -> QuantisedWeight:
    """The weight [out, in], any floating type, in "int8" or "int4".

    int8: the largest of a group becomes ±127. int4: it becomes -8, the side that has one value more, as GGUF's Q4_0 does.
    """
    assert to in ("int8", "int4"), to
    # A part at a time: what lies between takes several times the memory of the result.
    if len(weight) > _ROWS_AT_ONCE:
        return stacked([quantise(part, to) for part in torch.split(weight, _ROWS_AT_ONCE)])
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    most = padded.gather(-1, padded.abs().argmax(-1, keepdim=True))
    scale = (most.abs() / 127 if to == "int8" else most / -8).half()
    # From here on with the scale as it is stored; where all are zero any would do.
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    low, high = (-127, 127) if to == "int8" else (-8, 7)
    q = (padded / divisor).round_().clamp_(low, high) + ZERO[to]
    return QuantisedWeight(to, inputs, q.to(torch.uint8).view(outputs, -1), (scale.squeeze(-1),))


def stacked(parts: list[QuantisedWeight]) -> QuantisedWeight:
    """The rows of all parts, which are of one format and width, one below the other."""
    first = parts[0]
    assert all(part.format == first.format and part.inputs == first.inputs for part in parts), "unlike weights"
    scales = tuple(torch.cat(same) for same in zip(*(part.scales for part in parts), strict=True))
    return QuantisedWeight(first.format, first.inputs, torch.cat([part.stored for part in parts]), scales)


def rounded(x: Tensor) -> Tensor:
    """x [n, in] as linear sees it: 8 bits by groups of 32; float32. A group with a number that is not finite is all NaN."""
    rows, inputs = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -inputs % GROUP)).view(rows, -1, GROUP)
    most = padded.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 2**-100, 127 / most, torch.zeros_like(most))
    values = (padded * inverse).round() * (most / 127)
    values = values.where(padded.isfinite().all(-1, keepdim=True), torch.full_like(values, torch.nan))
    return values.view(rows, -1)[:, :inputs].contiguous()


class QuantisedLinear:
    """y = x Wᵀ + b (+ residual), x and W rounded, arithmetic in float64. See `kernels.interface.Linear`."""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        self._weight = weight.dequantised().double()
        self._bias = None if bias is None else bias.double()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `kernels.interface.Linear`."""
        y = torch.nn.functional.linear(rounded(x).double(), self._weight, self._bias)
        return (y if residual is None else y + residual.double()).to(x.dtype)


class QuantisedEmbedding:
    """Rows of a quantised table. See `kernels.interface.Embedding`."""

    def __init__(self, table: QuantisedWeight, dtype: torch.dtype) -> None:
        self._table = table.dequantised().to(dtype)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `kernels.interface.Embedding`."""
        return self._table[token_ids]


def quantised_linear(weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> QuantisedLinear:  # noqa: ARG001
    """See `kernels.interface.MakeQuantisedLinear`; y has x's dtype."""
    return QuantisedLinear(weight, bias)


def quantised_tied(table: QuantisedWeight, dtype: torch.dtype) -> tuple[QuantisedEmbedding, QuantisedLinear]:
    """See `kernels.interface.MakeQuantisedTied`."""
    return QuantisedEmbedding(table, dtype), QuantisedLinear(table, None)
