"""The native library as one implementation of every op. Does not know how it is chosen."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.cpu.attention import NativeKVCache, kv_cache_of
from kernels.cpu.embedding import PackedEmbedding
from kernels.cpu.layers import Fused
from kernels.cpu.library import Library
from kernels.cpu.linear import PackedLinear, linear_of, quantised_linear_of
from kernels.cpu.packing import NativePacking
from kernels.cpu.sampling import NativeSampling
from kernels.cpu.small import Small
from kernels.implementation import Kernels, Quantised, labels
from kernels.interface import Ops
from kernels.quantised import QuantisedWeight
from kernels.reference import ReferenceEmbedding
from kernels.stack import Stack


def native(library: Library) -> Kernels:
    """All ops in `library`'s instruction set."""
    pack, pack_quantised = linear_of(library), quantised_linear_of(library)
    cache_of, small = kv_cache_of(library), Small(library)

    def linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return pack(weight, bias)

    def tied(table: Tensor) -> tuple[PackedEmbedding, PackedLinear]:
        packed = pack(table, None)
        return PackedEmbedding(packed), packed

    def quantised_linear(weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        return pack_quantised(weight, bias, dtype)

    def quantised_tied(table: QuantisedWeight, dtype: torch.dtype) -> tuple[PackedEmbedding, PackedLinear]:
        packed = pack_quantised(table, None, dtype)
        return PackedEmbedding(packed), packed

    def kv_cache(tensor: Tensor, windows: tuple[int | None, ...]) -> NativeKVCache:
        return cache_of(tensor, windows)

    def forward(stack: Stack, ops: Ops) -> Fused:  # noqa: ARG001 - the ops are inside
        return Fused(library, stack)

    return Kernels(
        name=library.isa,
        linear=linear,
        embedding=ReferenceEmbedding,
        tied=tied,
        rms_norm=small.rms_norm,
        rotary=small.rotary,
        silu_mul=small.silu_mul,
        kv_cache=kv_cache,
        labels=labels(library.isa),
        forward=forward,
        sampling=partial(NativeSampling, library),
        packing=partial(NativePacking, library),
        exact=True,
        quantised=Quantised(quantised_linear, quantised_tied),
    )
