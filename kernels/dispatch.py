"""Which implementation runs each op: decided once per (device, dtype), op by op, and said once in the log.

    op                           reference          torch (CPU)                       native (CPU)                   cuda
    linear, embedding            plain weight       oneDNN-packed weight              our packed weight, embedding   cuBLAS
    rms_norm, rotary, silu_mul   readable torch     torch, fewest calls               C++                            Triton
    kv_cache                     row by row         gathered blocks, dense attention  C++, straight from the blocks  Triton
    forward                      one op after the other                               all layers in one call         fused rotation
    sampling                     torch, row by row                                    C++, all rows in one call      Triton
    packing                      readable torch                                       C++                            Triton

Nothing is chosen silently: what is missing for the best is a warning, and what was asked for by name and is missing is an
error. Does not know models.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from functools import cache

import torch

from contracts.errors import ConfigError
from kernels import quantised, reference, torch_attention, torch_linear
from kernels.cpu.build import BuildError
from kernels.cpu.config import TORCH as NO_LIBRARY
from kernels.cpu.config import asked_for
from kernels.cpu.kernels import native
from kernels.cpu.library import load, supported_isas
from kernels.implementation import OPS, Kernels, Quantised, labels
from kernels.interface import SUPPORTED_DTYPES

__all__ = ["OPS", "REFERENCE", "TORCH", "Kernels", "candidates", "choose"]

_log = logging.getLogger(__name__)
DEVICES = ("cpu", "cuda")
REFERENCE = Kernels(
    name="reference",
    linear=reference.ReferenceLinear,
    embedding=reference.ReferenceEmbedding,
    tied=reference.tied,
    rms_norm=reference.rms_norm,
    rotary=reference.rotary,
    silu_mul=reference.silu_mul,
    kv_cache=reference.ReferenceKVCache,
    quantised=Quantised(quantised.quantised_linear, quantised.quantised_tied),
    labels=labels("reference", forward="one by one", sampling="torch"),
)
TORCH = Kernels(
    name="torch",
    linear=torch_linear.PackedLinear,
    embedding=reference.ReferenceEmbedding,
    tied=torch_linear.tied,
    rms_norm=torch_linear.rms_norm,
    rotary=torch_linear.rotary,
    silu_mul=torch_linear.silu_mul,
    kv_cache=torch_attention.TorchKVCache,
    labels=labels("torch", linear="oneDNN, packed", embedding="torch, beside a tied head", forward="one by one"),
)


@cache
def choose(device: str, dtype: torch.dtype) -> Kernels:
    """The fastest implementation of every op for `device` and `dtype`.

    Raises ValueError naming what is not supported, ConfigError when kernels asked for by name cannot be had.
    """
    found = candidates(device, dtype)
    short = str(dtype).removeprefix("torch.")
    for note in found.notes:
        _log.warning("kernels for %s %s: %s", device, short, note)
    _log.info("kernels for %s %s: %s", device, short, ", ".join(f"{op} {what}" for op, what in found.labels.items()))
    return found


def candidates(device: str, dtype: torch.dtype) -> Kernels:
    """As `choose`, but says nothing in the log and remembers nothing."""
    if device not in DEVICES:
        raise ValueError(f"no kernels for device {device!r}; known: {', '.join(DEVICES)}")
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"no kernels for {dtype}; known: {', '.join(str(d) for d in SUPPORTED_DTYPES)}")
    if device == "cuda":
        return _cuda()
    asked = asked_for()
    if asked == NO_LIBRARY:
        return _torch(dtype)
    # The scalar one only proves the others: torch is faster.
    isas = [asked] if asked else [isa for isa in supported_isas() if isa != "scalar"]
    if not isas:
        return _torch(dtype, "this CPU runs none of our instruction sets, torch computes (slower)")
    try:
        return native(load(isas[0]))
    except BuildError as error:
        if asked:
            raise
        return _torch(dtype, f"the native library cannot be used, torch computes (slower): {error.message}")


def _cuda() -> Kernels:
    # Not at the top of the file: triton is an extra, and importing it takes a second.
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("device: the kernels for cuda need triton (the extra gpu), which is not installed")
    from kernels.triton.kernels import triton_kernels

    return triton_kernels("cuda")


def _torch(dtype: torch.dtype, *notes: str) -> Kernels:
    if _packs(dtype):
        return replace(TORCH, notes=notes)
    return replace(
        TORCH,
        name="torch, weights unpacked",
        linear=REFERENCE.linear,
        tied=REFERENCE.tied,
        labels={**TORCH.labels, "linear": "torch, plain weight"},
        notes=(*notes, "oneDNN packs no such weights on this CPU, they stay in plain order (slower)"),
    )


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN can reorder weights of `dtype` on this CPU (bfloat16 needs instructions that older ones lack)."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
