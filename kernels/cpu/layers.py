"""A step through all layers as one native call: see src/layers.h. The slow truth is `kernels.one_by_one`.

The structures here are those of src/layers.h, field by field. They point into tensors, so whoever makes one keeps those.
Does not know configs, files or requests.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.attention import NativeAttention
from kernels.cpu.embedding import PackedEmbedding, described
from kernels.cpu.library import I32, PTR, SHORT, Library
from kernels.cpu.linear import LinearStruct
from kernels.reference import ReferenceEmbedding
from kernels.stack import Inputs, Layer, Stack

FUNCTIONS = {f"dt_{op}_{short}": (PTR, PTR, I32) for op in ("step", "head") for short in SHORT.values()} | {
    f"dt_step_scratch_{short}": (PTR, PTR, I32, PTR) for short in SHORT.values()
}


class LayerStruct(ctypes.Structure):
    """`struct LayerWeights`."""

    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("qkv", LinearStruct),
        ("o", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
    )


class StackStruct(ctypes.Structure):
    """`struct Stack`."""

    _fields_ = (
        ("hidden", ctypes.c_int64),
        ("mlp", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("embedding", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("head", LinearStruct),
        ("eps", ctypes.c_float),
    )


class StepStruct(ctypes.Structure):
    """`struct Step`."""

    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("num_wanted", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


class Fused:
    """See `kernels.stack.Forward`. The stack's linears and embedding must be native ones, and the inputs' attention too."""

    def __init__(self, library: Library, stack: Stack) -> None:
        call = library.bind(FUNCTIONS)
        short = SHORT[stack.dtype]
        self._step, self._head = call[f"dt_step_{short}"], call[f"dt_head_{short}"]
        self._scratch_bytes = call[f"dt_step_scratch_{short}"]
        self._kept = stack
        self._layers = (LayerStruct * len(stack.layers))(*(_layer(layer) for layer in stack.layers))
        shape = stack.shape
        self._stack = StackStruct(
            hidden=shape.hidden_size,
            mlp=shape.intermediate_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            num_layers=len(stack.layers),
            layers=self._layers,
            embedding=_table(stack),
            final_norm=stack.final_norm.data_ptr(),
            head=described(stack.lm_head),
            eps=shape.rms_norm_eps,
        )
        self._at = ctypes.addressof(self._stack)

    def hidden(self, inputs: Inputs) -> Tensor:
        """See `kernels.stack.Forward`."""
        return self._run(inputs, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `kernels.stack.Forward`."""
        hidden = hidden.contiguous()
        logits = self._empty(len(hidden), self._kept.shape.vocab_size)
        if not len(hidden):
            return logits
        step = StepStruct(rows=len(hidden), hidden=hidden.data_ptr(), logits=logits.data_ptr())
        threads = torch.get_num_threads()
        scratch = self._scratch(step, threads)
        self._head(self._at, ctypes.addressof(step), threads)
        del scratch
        return logits

    def step(self, inputs: Inputs) -> Tensor:
        """See `kernels.stack.Forward`."""
        wanted = len(inputs.token_ids) if inputs.rows is None else len(inputs.rows)
        logits = self._empty(wanted, self._kept.shape.vocab_size)
        self._run(inputs, logits)
        return logits

    def _run(self, inputs: Inputs, logits: Tensor | None) -> Tensor:
        attention = inputs.attention
        if not isinstance(attention, NativeAttention):
            raise TypeError(f"a native step needs native attention, not {type(attention).__name__}")
        ids, cos, sin = inputs.token_ids.contiguous(), inputs.cos.contiguous(), inputs.sin.contiguous()
        rows = None if inputs.rows is None else inputs.rows.contiguous()
        wanted = len(ids) if rows is None else len(rows)
        hidden = self._empty(wanted, self._kept.shape.hidden_size)
        step = StepStruct(
            token_ids=ids.data_ptr(),
            rows=len(ids),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            attention=ctypes.addressof(attention.of_heads(self._kept.shape.num_heads)),
            wanted=None if rows is None else rows.data_ptr(),
            num_wanted=wanted,
            hidden=hidden.data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
        )
        threads = torch.get_num_threads()
        scratch = self._scratch(step, threads)
        self._step(self._at, ctypes.addressof(step), threads)
        del scratch
        return hidden

    def _empty(self, rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=self._kept.dtype)

    def _scratch(self, step: StepStruct, threads: int) -> Tensor:
        """Memory for what the ops of `step` hand each other, entered there; the caller keeps it until the call is over."""
        needed = ctypes.c_int64()
        self._scratch_bytes(self._at, ctypes.addressof(step), threads, ctypes.addressof(needed))
        scratch = torch.empty(needed.value, dtype=torch.uint8)
        step.scratch = scratch.data_ptr()
        return scratch


def _layer(layer: Layer) -> LayerStruct:
    return LayerStruct(
        input_norm=layer.input_norm.data_ptr(),
        q_norm=None if layer.q_norm is None else layer.q_norm.data_ptr(),
        k_norm=None if layer.k_norm is None else layer.k_norm.data_ptr(),
        post_norm=layer.post_norm.data_ptr(),
        qkv=described(layer.qkv),
        o=described(layer.o),
        gate_up=described(layer.gate_up),
        down=described(layer.down),
    )


def _table(stack: Stack) -> int | None:
    """Where a plain embedding lies; None: its rows are those of the head."""
    if isinstance(stack.embedding, ReferenceEmbedding):
        return stack.embedding.table.data_ptr()
    if isinstance(stack.embedding, PackedEmbedding) and stack.embedding.weight is stack.lm_head:
        return None
    raise TypeError(f"{type(stack.embedding).__name__} is no embedding of a native step")
