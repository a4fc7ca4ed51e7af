"""Linear with weights in the native library's order: see src/linear.h for what a panel is and why a row's bits never change.

    linear = linear_of(library)(weight, bias)        linear(x, residual)         y = x Wᵀ + b (+ residual)
                                                     linear.rows(ids)            rows of the weight: a tied embedding
                                                     linear.struct               for native calls that run many ops

The weight is held once, packed; the plain one is the caller's to drop. Does not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import I32, INT, PTR, SHORT, Function, Library
from kernels.cpu.pages import ARENA
from kernels.cpu.quantised import packed
from kernels.quantised import Format, QuantisedWeight

LANES = 16
_LINE_BYTES = 64
# `LinearKind` of src/linear_call.h.
_KIND = {torch.float32: 0, torch.bfloat16: 1}
_QUANTISED_KIND: dict[Format, int] = {"int8": 2, "int4": 3, "int4_k": 4}
FUNCTIONS = {
    f"dt_{op}_{short}": arguments
    for short in SHORT.values()
    for op, arguments in {
        "linear": (PTR, PTR, INT, PTR, PTR, I32),
        "pack": (PTR, PTR, INT, INT, I32),
        "embed": (PTR, PTR, INT, PTR, I32),
    }.items()
}


class LinearStruct(ctypes.Structure):
    """`struct Linear` of src/linear_call.h, field by field; valid as long as the op that owns the memory."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


def padded_bias(bias: Tensor | None, outputs: int) -> Tensor | None:
    """The bias as native linear reads it: float32, filled up with zeros to whole panels."""
    if bias is None:
        return None
    padded = torch.zeros(-(-outputs // LANES) * LANES)
    padded[:outputs] = bias.float()
    return padded


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in panels, uint8, and what linear must know of it; `dtype` is that of x and y."""

    kind: int
    dtype: torch.dtype
    outputs: int
    inputs: int
    panels: Tensor


class PackedLinear:
    """Owns the packed weight and the bias; see `kernels.interface.Linear`."""

    def __init__(self, call: dict[str, Function], weight: Packed, bias: Tensor | None) -> None:
        self.dtype = weight.dtype
        self._weight = weight.panels
        self._bias = padded_bias(bias, weight.outputs)
        short = SHORT[weight.dtype]
        self._linear, self._embed = call[f"dt_linear_{short}"], call[f"dt_embed_{short}"]
        self.struct = LinearStruct(
            kind=weight.kind,
            inputs=weight.inputs,
            outputs=weight.outputs,
            weight=self._weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )
        self._at = ctypes.addressof(self.struct)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `kernels.interface.Linear`."""
        x = self._checked(x, self.struct.inputs)
        y = torch.empty(len(x), self.struct.outputs, dtype=self.dtype)
        added = None
        if residual is not None:
            residual = self._checked(residual, self.struct.outputs)
            assert len(residual) == len(x), f"{len(residual)} rows of residual for {len(x)} of x"
            added = residual.data_ptr()
        self._linear(self._at, x.data_ptr(), len(x), added, y.data_ptr(), torch.get_num_threads())
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """ids [n], int64, each below the number of outputs → those rows of the weight [n, in], as near as the dtype comes."""
        assert ids.dtype == torch.int64 and ids.dim() == 1, ids
        ids = ids.contiguous()
        assert not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < self.struct.outputs, "no such row"
        y = torch.empty(len(ids), self.struct.inputs, dtype=self.dtype)
        self._embed(self._at, ids.data_ptr(), len(ids), y.data_ptr(), torch.get_num_threads())
        return y

    def _checked(self, x: Tensor, width: int) -> Tensor:
        assert x.dim() == 2 and x.shape[1] == width, f"{tuple(x.shape)} where [n, {width}] belongs"
        assert x.dtype == self.dtype, f"{x.dtype} where {self.dtype} belongs"
        return x.contiguous()


def linear_of(library: Library) -> Callable[[Tensor, Tensor | None], PackedLinear]:
    """Packs weights for `library`'s linear: a `kernels.interface.MakeLinear`."""
    call = library.bind(FUNCTIONS)

    def make(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        outputs, inputs = weight.shape
        lines = -(-inputs * weight.element_size() // 4)
        panels = ARENA.empty(-(-outputs // LANES) * lines * _LINE_BYTES)
        plain, threads = weight.contiguous(), torch.get_num_threads()
        call[f"dt_pack_{SHORT[weight.dtype]}"](panels.data_ptr(), plain.data_ptr(), outputs, inputs, threads)
        return PackedLinear(call, Packed(_KIND[weight.dtype], weight.dtype, outputs, inputs, panels), bias)

    return make


def quantised_linear_of(library: Library) -> Callable[[QuantisedWeight, Tensor | None, torch.dtype], PackedLinear]:
    """Packs quantised weights for `library`'s linear: a `kernels.interface.MakeQuantisedLinear`."""
    call = library.bind(FUNCTIONS)

    def make(weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
        kind = _QUANTISED_KIND[weight.format]
        return PackedLinear(call, Packed(kind, dtype, weight.outputs, weight.inputs, packed(weight)), bias)

    return make
