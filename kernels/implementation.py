"""One implementation of every op, as one value: what a device and a dtype are computed with. Does not know how it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kernels.interface import (
    MakeEmbedding,
    MakeKVCache,
    MakeLinear,
    MakeQuantisedLinear,
    MakeQuantisedTied,
    MakeTied,
    Ops,
    RMSNorm,
    Rotary,
    SiluMul,
)
from kernels.one_by_one import OneByOne
from kernels.packing import MakePacking, TorchPacking
from kernels.sampling import Sampling
from kernels.stack import Forward, Stack

OPS = ("linear", "embedding", "rms_norm", "rotary", "silu_mul", "kv_cache", "forward", "sampling", "packing")


@dataclass(frozen=True, slots=True)
class Quantised:
    """Linear, and a look-up in its weight, for weights that stay quantised."""

    linear: MakeQuantisedLinear
    tied: MakeQuantisedTied


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of every op. `labels` says of each op of OPS which, in a word or two; `notes` what is missing.

    `exact`: the same row has the same bits whatever shares its call. `device`: where weights, activations and KV lie.
    `quantised` None: quantised weights are dequantised before they come here.
    `sampling` None: the engine samples by torch.
    """

    name: str
    linear: MakeLinear
    embedding: MakeEmbedding
    tied: MakeTied
    rms_norm: RMSNorm
    rotary: Rotary
    silu_mul: SiluMul
    kv_cache: MakeKVCache
    labels: Mapping[str, str]
    forward: Callable[[Stack, Ops], Forward] = OneByOne
    sampling: Callable[[], Sampling] | None = None
    notes: tuple[str, ...] = ()
    exact: bool = False
    device: str = "cpu"
    quantised: Quantised | None = None
    packing: MakePacking = TorchPacking


def labels(everything: str, **other: str) -> Mapping[str, str]:
    """`everything` for each op of OPS, but `other`."""
    return MappingProxyType(dict.fromkeys(OPS, everything) | other)
