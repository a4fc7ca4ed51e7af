"""Linear with weights in the native library's order: see src/linear.h for what a panel is and why a row's bits never change.

    packed = linear_of(library)(weight, bias)        packed(x, residual)         y = x Wᵀ + b (+ residual)
                                                     packed.rows(ids)            rows of the weight: a tied embedding
                                                     packed.struct               for native calls that run many ops

The weight is held once, packed; the plain one is the caller's to drop. Does not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.cpu.library import I32, INT, PTR, Function, Library
from kernels.cpu.pages import ARENA

LANES = 16
_LINE_BYTES = 64
FLOAT32, BFLOAT16, INT8, INT4 = range(4)
_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16"}
_KIND = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
FUNCTIONS = {
    f"dt_{op}_{short}": arguments
    for short in _SHORT.values()
    for op, arguments in {
        "linear": (PTR, PTR, INT, PTR, PTR, I32),
        "pack": (PTR, PTR, INT, INT, I32),
        "embed": (PTR, PTR, INT, PTR, I32),
    }.items()
}


class LinearStruct(ctypes.Structure):
    """`struct Linear` of src/linear.h, field by field; valid as long as the op that owns the memory."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("minimum", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


def padded_bias(bias: Tensor | None, outputs: int) -> Tensor | None:
    """The bias as native linear reads it: float32, filled up with zeros to whole panels."""
    if bias is None:
        return None
    padded = torch.zeros(-(-outputs // LANES) * LANES)
    padded[:outputs] = bias.float()
    return padded


class PackedLinear:
    """Owns the packed weight and the bias; see `kernels.interface.Linear`."""

    def __init__(self, call: dict[str, Function], weight: Tensor, bias: Tensor | None) -> None:
        outputs, inputs = weight.shape
        self.dtype = weight.dtype
        lines = -(-inputs * weight.element_size() // 4)
        self._weight = ARENA.empty(-(-outputs // LANES) * lines * _LINE_BYTES)
        self._bias = padded_bias(bias, outputs)
        short = _SHORT[weight.dtype]
        self._linear, self._embed = call[f"dt_linear_{short}"], call[f"dt_embed_{short}"]
        plain = weight.contiguous()
        call[f"dt_pack_{short}"](self._weight.data_ptr(), plain.data_ptr(), outputs, inputs, torch.get_num_threads())
        self.struct = LinearStruct(
            kind=_KIND[weight.dtype],
            inputs=inputs,
            outputs=outputs,
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
        """ids [n], int64, each below the number of outputs → those rows of the weight [n, in], bit for bit."""
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
    return partial(PackedLinear, library.bind(FUNCTIONS))
