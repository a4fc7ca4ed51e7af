"""GGUF tensors to safetensors: keep blocks or dequantise, put rotary rows back into halves, write them in order.

Peak memory is one tensor. Does not know architectures; `architecture.TensorPlan` says what goes where.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from contracts.errors import ModelLoadError
from engine.models.gguf.architecture import TensorPlan
from engine.models.gguf.reading import GGUFFile, GGUFTensor

_Value = TypeVar("_Value", np.float32, np.uint8)
QUANTS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
FLOAT32_LIMIT_BYTES = 2 * 2**30
_BYTES = {"float32": 4, "bfloat16": 2}
# Kept as they are, under the tensor's name and this suffix, as bytes [rows, bytes of a row]; matrices only.
KEPT = {"Q8_0": ".q8_0", "Q4_0": ".q4_0", "Q4_K": ".q4_k"}
_NAMES = {"float32": "F32", "bfloat16": "BF16"}  # in a safetensors header


def check_quants(file: GGUFFile) -> None:
    """Raise ModelLoadError naming the first tensor whose type we do not dequantise, and the type."""
    for tensor in file.tensors.values():
        if tensor.quant.name not in QUANTS:
            raise ModelLoadError(
                f"{file.path}: tensor {tensor.name} has type {tensor.quant.name}; known: {', '.join(QUANTS)}"
            )


def stored_dtype(file: GGUFFile, float32_limit_bytes: int = FLOAT32_LIMIT_BYTES) -> str:
    """What weights are stored in that are not kept as blocks, and what the model is run in.

    bfloat16 beside blocks and BF16 matrices, and for what takes more than the limit in float32.
    """
    if any(is_kept(tensor) for tensor in file.tensors.values()):
        return "bfloat16"
    if all(t.quant.name == "BF16" for t in file.tensors.values() if len(t.shape) > 1):
        return "bfloat16"
    float32_bytes = sum(math.prod(t.shape) for t in file.tensors.values()) * _BYTES["float32"]
    return "float32" if float32_bytes <= float32_limit_bytes else "bfloat16"


def is_kept(tensor: GGUFTensor) -> bool:
    """Whether the tensor's blocks are stored as they are: the kernels multiply them so."""
    return len(tensor.shape) == 2 and tensor.quant.name in KEPT


def dequantised(tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """The tensor's values, float32, in its row-major shape."""
    values = gguf.dequantize(tensor.blocks, tensor.quant)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)


def halves_from_pairs(values: npt.NDArray[_Value], heads: int) -> npt.NDArray[_Value]:
    """Undo llama.cpp's interleave: rows (0, h, 1, h+1, …) of each head, h half the head size, back to (0, 1, …, h, h+1, …)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def write_tensors(
    file: GGUFFile, plans: list[TensorPlan], path: Path, dtype: str, progress: Callable[[str], None]
) -> None:
    """Write all tensors to one safetensors file, in `dtype` ("float32" or "bfloat16") or as blocks; progress about every second.

    The format is written here, tensor by tensor, because the library's writer wants all of them in memory at once.
    """
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for plan in plans:
        tensor = file.tensors[plan.source]
        if is_kept(tensor):
            name, kind, shape, size = plan.target + KEPT[tensor.quant.name], "U8", _rows(tensor).shape, 1
        else:
            name, kind, shape, size = plan.target, _NAMES[dtype], plan.shape, _BYTES[dtype]
        begin, end = end, end + math.prod(shape) * size
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # data begins at a multiple of eight
    spoken = time.monotonic()
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for number, plan in enumerate(plans, start=1):
            tensor = file.tensors[plan.source]
            if is_kept(tensor):
                # Blocks lie along a row, so rows change places whole.
                rows = _rows(tensor)
                out.write((rows if plan.heads is None else halves_from_pairs(rows, plan.heads)).tobytes())
            else:
                values = dequantised(tensor)
                out.write(_encoded(values if plan.heads is None else halves_from_pairs(values, plan.heads), dtype))
            if time.monotonic() - spoken > 1.0:
                spoken = time.monotonic()
                progress(f"{file.path.name}: converted {number} of {len(plans)} tensors")


def _rows(tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
    """The blocks as bytes [rows, bytes of a row]."""
    return tensor.blocks.view(np.uint8).reshape(tensor.shape[0], -1)


def _encoded(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    return bytes(
        gguf.quantize(values, gguf.GGMLQuantizationType.BF16).tobytes()
    )  # rounds to nearest even, as torch does
