"""The small ops between the projections, native: see src/small.h. Does not know models."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import FLOAT, I32, INT, PTR, SHORT, Function, Library

FUNCTIONS = {
    f"dt_{op}_{short}": arguments
    for short in SHORT.values()
    for op, arguments in {
        "rms_norm": (PTR, PTR, INT, INT, PTR, FLOAT, I32),
        "rotary": (PTR, PTR, PTR, PTR, PTR, I32),
        "silu_mul": (PTR, PTR, INT, INT, I32),
    }.items()
}


class _Heads(ctypes.Structure):
    """`struct Heads` of src/small.cpp."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "heads", "size", "stride"))


class Small:
    """The ops of one library; holds no memory."""

    def __init__(self, library: Library) -> None:
        self._calls = library.bind(FUNCTIONS)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `kernels.interface.RMSNorm`."""
        x, weight = x.contiguous(), weight.contiguous()
        width = x.shape[-1]
        assert weight.dtype == x.dtype and weight.shape == (width,), f"weight {weight.dtype} {tuple(weight.shape)}"
        out = torch.empty_like(x)
        call = self._call("rms_norm", x)
        rows = x.numel() // width
        call(out.data_ptr(), x.data_ptr(), rows, width, weight.data_ptr(), eps, torch.get_num_threads())
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `kernels.interface.Rotary`."""
        rows, heads, size = x.shape
        for table in (cos, sin):
            assert table.dtype == x.dtype and table.shape == (rows, 1, size), f"{table.dtype} {tuple(table.shape)}"
        x = with_heads_together(x)
        cos, sin = cos.contiguous(), sin.contiguous()
        out = torch.empty(rows, heads, size, dtype=x.dtype)
        heads_of = _Heads(rows, heads, size, x.stride(0))
        call = self._call("rotary", x)
        at = ctypes.addressof(heads_of)
        call(out.data_ptr(), x.data_ptr(), at, cos.data_ptr(), sin.data_ptr(), torch.get_num_threads())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `kernels.interface.SiluMul`."""
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        call = self._call("silu_mul", gate_up)
        call(out.data_ptr(), gate_up.data_ptr(), rows, width, torch.get_num_threads())
        return out

    def _call(self, op: str, x: Tensor) -> Function:
        return self._calls[f"dt_{op}_{SHORT[x.dtype]}"]


def with_heads_together(x: Tensor) -> Tensor:
    """x [n, heads, d], copied only where a row's heads do not lie one behind the other; rows may lie apart."""
    together = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if together else x.contiguous()
