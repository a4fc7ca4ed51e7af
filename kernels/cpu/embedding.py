"""The look-up of tokens in a packed weight: a tied embedding is the output matrix, and held once."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.linear import LinearStruct, PackedLinear
from kernels.interface import Linear


class PackedEmbedding:
    """See `kernels.interface.Embedding`."""

    def __init__(self, weight: PackedLinear) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `kernels.interface.Embedding`."""
        return self.weight.rows(token_ids)


def described(linear: Linear) -> LinearStruct:
    """What native code must know of `linear`, which must be a native one. Valid as long as `linear` lives."""
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"a native step needs native weights, not {type(linear).__name__}")
    return linear.struct
