"""Which implementation runs each op: one table, decided once per (device, dtype), said once in the log.

    op          reference          cpu
    linear      plain weight       oneDNN-packed weight
    rms_norm, rotary, silu_mul     torch, fewest calls
    kv_cache    row by row         gathered blocks, dense attention

Does not know models.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache

import torch

from kernels import reference, torch_attention, torch_linear
from kernels.interface import SUPPORTED_DTYPES, MakeKVCache, MakeLinear, RMSNorm, Rotary, SiluMul

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of every op."""

    name: str
    linear: MakeLinear
    rms_norm: RMSNorm
    rotary: Rotary
    silu_mul: SiluMul
    kv_cache: MakeKVCache


REFERENCE = Kernels(
    name="reference",
    linear=reference.ReferenceLinear,
    rms_norm=reference.rms_norm,
    rotary=reference.rotary,
    silu_mul=reference.silu_mul,
    kv_cache=reference.ReferenceKVCache,
)
TORCH = Kernels(
    name="torch",
    linear=torch_linear.PackedLinear,
    rms_norm=torch_linear.rms_norm,
    rotary=torch_linear.rotary,
    silu_mul=torch_linear.silu_mul,
    kv_cache=torch_attention.TorchKVCache,
)


@cache
def choose(device: str, dtype: torch.dtype) -> Kernels:
    """The fastest implementation of every op for `device` and `dtype`; ValueError names what is not supported."""
    if device != "cpu":
        raise ValueError(f"no kernels for device {device!r}; known: cpu")
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"no kernels for {dtype}; known: {', '.join(str(d) for d in SUPPORTED_DTYPES)}")
    short = str(dtype).removeprefix("torch.")
    if _packs(dtype):
        chosen = TORCH
        _log.info("kernels for cpu %s: packed linear, gathered attention", short)
    else:
        chosen = replace(TORCH, name="torch, weights unpacked", linear=REFERENCE.linear)
        _log.warning("kernels for cpu %s: this CPU has no packed linear, weights stay in plain order (slower)", short)
    return chosen


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN can reorder weights of `dtype` on this CPU (bfloat16 needs instructions that older ones lack)."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
