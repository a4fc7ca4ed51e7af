"""GGUF tensors to safetensors: dequantise, put rotary rows back into halves, write them in order.

Peak memory is one tensor. Does not know architectures; `architecture.TensorPlan` says what goes where.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from contracts.errors import ModelLoadError
from engine.models.gguf.architecture import TensorPlan
from engine.models.gguf.reading import GGUFFile, GGUFTensor

QUANTS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
FLOAT32_LIMIT_BYTES = 2 * 2**30
_BYTES = {"float32": 4, "bfloat16": 2}
_NAMES = {"float32": "F32", "bfloat16": "BF16"}  # in a safetensors header


def check_quants(file: GGUFFile) -> None:
    """Raise ModelLoadError naming the first tensor whose type we do not dequantise, and the type."""
    for tensor in file.tensors.values():
        if tensor.quant.name not in QUANTS:
            raise ModelLoadError(
                f"{file.path}: tensor {tensor.name} has type {tensor.quant.name}; known: {', '.join(QUANTS)}"
            )


def stored_dtype(file: GGUFFile, float32_limit_bytes: int = FLOAT32_LIMIT_BYTES) -> str:
    """What `convert` stores weights in: bfloat16 for BF16 matrices and for what takes more than the limit in float32."""
    if all(t.quant.name == "BF16" for t in file.tensors.values() if len(t.shape) > 1):
        return "bfloat16"
    float32_bytes = sum(math.prod(t.shape) for t in file.tensors.values()) * _BYTES["float32"]
    return "float32" if float32_bytes <= float32_limit_bytes else "bfloat16"


def dequantised(tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """The tensor's values, float32, in its row-major shape."""
    values = gguf.dequantize(tensor.blocks, tensor.quant)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)


def halves_from_pairs(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's interleave: rows (0, h, 1, h+1, …) of each head, h half the head size, back to (0, 1, …, h, h+1, …)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def write_tensors(
    file: GGUFFile, plans: list[TensorPlan], path: Path, dtype: str, progress: Callable[[str], None]
) -> None:
    """Write all tensors to one safetensors file in `dtype` ("float32" or "bfloat16"); progress about every second.

    The format is written here, tensor by tensor, because the library's writer wants all of them in memory at once.
    """
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for plan in plans:
        begin, end = end, end + math.prod(plan.shape) * _BYTES[dtype]
        header[plan.target] = {"dtype": _NAMES[dtype], "shape": list(plan.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # data begins at a multiple of eight
    spoken = time.monotonic()
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for number, plan in enumerate(plans, start=1):
            values = dequantised(file.tensors[plan.source])
            if plan.heads is not None:
                values = halves_from_pairs(values, plan.heads)
            out.write(_encoded(values, dtype))
            if time.monotonic() - spoken > 1.0:
                spoken = time.monotonic()
                progress(f"{file.path.name}: converted {number} of {len(plans)} tensors")


def _encoded(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    return bytes(
        gguf.quantize(values, gguf.GGMLQuantizationType.BF16).tobytes()
    )  # rounds to nearest even, as torch does
