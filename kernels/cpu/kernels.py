"""The native library as one implementation of every op. Does not know how it is chosen."""

from __future__ import annotations

from torch import Tensor

from kernels import reference, torch_attention, torch_linear
from kernels.cpu.embedding import PackedEmbedding
from kernels.cpu.library import Library
from kernels.cpu.linear import PackedLinear, linear_of
from kernels.implementation import Kernels, labels


def native(library: Library) -> Kernels:
    """All ops in `library`'s instruction set."""
    pack = linear_of(library)

    def linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return pack(weight, bias)

    def tied(table: Tensor) -> tuple[PackedEmbedding, PackedLinear]:
        packed = pack(table, None)
        return PackedEmbedding(packed), packed

    return Kernels(
        name=library.isa,
        linear=linear,
        embedding=reference.ReferenceEmbedding,
        tied=tied,
        rms_norm=torch_linear.rms_norm,
        rotary=torch_linear.rotary,
        silu_mul=torch_linear.silu_mul,
        kv_cache=torch_attention.TorchKVCache,
        labels=labels("torch", linear=library.isa, embedding=library.isa, forward="one by one"),
    )
