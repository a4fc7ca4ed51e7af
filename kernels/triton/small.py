"""The small ops on a GPU: RMS norm (+ residual), rotary, SiLU·mul. One program reads a row once and writes it once.

Tensors may be cut out of larger ones as long as their last dimension is contiguous. Results are rounded where
`kernels.reference` rounds, so both agree to the last bit of bfloat16 but for the order of a sum. Does not know models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROTARY_HEADS = 8


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, summed, eps, inner, row_stride, inner_stride, residual_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One row of SIZE elements; row r is [r // inner, r % inner] of x. With a residual, x + residual is normed and kept."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    source = x + (row // inner) * row_stride + (row % inner) * inner_stride + at
    wide = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(summed.dtype.element_ty)
        tl.store(summed + row * SIZE + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotary_kernel(
    x, cos, sin, out, heads, row_stride, head_stride, angle_stride,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row, both halves of a head by the same program."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, PADDED)
    half = at < HALF
    inside = (head < heads)[:, None] & half[None, :]
    source = x + row * row_stride + head[:, None] * head_stride + at[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    angles = row * angle_stride + at
    cos_1 = tl.load(cos + angles, mask=half, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + angles + HALF, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + angles, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + angles + HALF, mask=half, other=0.0).to(tl.float32)[None, :]
    target = out + (row * heads + head[:, None]) * (2 * HALF) + at[None, :]
    tl.store(target, (first * cos_1 + second * sin_1).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cos_2 + first * sin_2).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, row_stride, SIZE: tl.constexpr, AT_ONCE: tl.constexpr):
    """AT_ONCE elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = at < SIZE
    source = gate_up + row * row_stride + at
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + at, (activated * up).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.interface.RMSNorm`."""
    size = x.shape[-1]
    inner = 1 if x.dim() == 2 else x.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.shape[0] * inner
    if rows:
        inner_stride = 0 if x.dim() == 2 else x.stride(1)
        warps = _warps(size)
        rms_norm_kernel[(rows,)](
            x, x, weight, out, out, eps, inner, x.stride(0), inner_stride, 0,
            SIZE=size, PADDED=triton.next_power_of_2(size), HAS_RESIDUAL=False, num_warps=warps,
        )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual [n, d] → (the norm of their sum, their sum in x's dtype), reading and writing each once."""
    rows, size = x.shape
    out, summed = (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty((rows, size), dtype=x.dtype, device=x.device),
    )
    if rows:
        rms_norm_kernel[(rows,)](
            x, residual, weight, out, summed, eps, 1, x.stride(0), 0, residual.stride(0),
            SIZE=size, PADDED=triton.next_power_of_2(size), HAS_RESIDUAL=True, num_warps=_warps(size),
        )  # fmt: skip
    return out, summed


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.interface.Rotary`."""
    rows, heads, size = x.shape
    out = torch.empty((rows, heads, size), dtype=x.dtype, device=x.device)
    if rows:
        rotary_kernel[(rows, triton.cdiv(heads, _ROTARY_HEADS))](
            x, cos, sin, out, heads, x.stride(0), x.stride(1), cos.stride(0),
            HALF=size // 2, PADDED=triton.next_power_of_2(size // 2), HEADS=_ROTARY_HEADS, num_warps=4,
        )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.interface.SiluMul`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        at_once = min(2048, triton.next_power_of_2(size))
        silu_mul_kernel[(rows, triton.cdiv(size, at_once))](
            gate_up, out, gate_up.stride(0), SIZE=size, AT_ONCE=at_once, num_warps=8 if at_once > 1024 else 4
        )
    return out


def _warps(size: int) -> int:
    return 4 if size <= 2048 else 8 if size <= 8192 else 16
