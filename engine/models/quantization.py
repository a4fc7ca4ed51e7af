"""How a model's matrices are held: the choice by name, and GGUF's blocks read into what the kernels take.

    --quantization   a checkpoint of floats            one that has GGUF blocks (`BLOCKS`)
    auto             none                              blocks as they are; its other matrices int8
    none             as it is                          dequantised
    int8, int4       rounded at load                   dequantised, then rounded at load

With int4 the output matrix is int8: it decides between tokens, and rounding it to four bits costs the most.
Does not know architectures or files.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from contracts.errors import ConfigError
from kernels.quantised import GROUP, SUPER, Format, QuantisedWeight

QUANTIZATIONS = ("auto", "none", "int8", "int4")
# What `auto` comes to is one of these; "stored": blocks as they are.
Held = Literal["none", "int8", "int4", "stored"]
# Suffix of a tensor's name → (inputs, bytes) of a block. Such a tensor is uint8 [out, bytes].
BLOCKS = {".q8_0": (32, 34), ".q4_0": (32, 18), ".q4_k": (256, 144)}


def resolve_quantization(requested: str, has_blocks: bool) -> Held:
    """What `requested` means for a checkpoint. Raises ConfigError for a word that is none of QUANTIZATIONS."""
    if requested == "auto":
        return "stored" if has_blocks else "none"
    if requested == "none":
        return "none"
    if requested == "int8":
        return "int8"
    if requested == "int4":
        return "int4"
    raise ConfigError(f"quantization: got {requested!r}, known: {', '.join(QUANTIZATIONS)}")


def format_of(held: Held, output_matrix: bool) -> Format:
    """What a matrix is rounded to that is not stored quantised."""
    return "int4" if held == "int4" and not output_matrix else "int8"


def from_blocks(raw: Tensor, suffix: str) -> QuantisedWeight:
    """The blocks of `suffix` (of BLOCKS), uint8 [out, blocks · bytes], value for value."""
    inputs, size = BLOCKS[suffix]
    blocks = raw.contiguous().view(len(raw), -1, size)
    width = blocks.shape[1] * inputs
    if suffix == ".q4_k":
        return _from_q4_k(blocks, width)
    scale = _halves(blocks[..., :2])
    if suffix == ".q8_0":
        # Signed bytes, from -128 on: the highest bit turned over is 128 more.
        stored = (blocks[..., 2:] ^ 128).reshape(len(raw), width)
        return QuantisedWeight("int8", width, stored, (scale,))
    return QuantisedWeight("int4", width, _nibbles(blocks[..., 2:]).reshape(len(raw), width), (scale,))


def _from_q4_k(blocks: Tensor, width: int) -> QuantisedWeight:
    """Of a block: d, dmin, twelve bytes with eight scales and eight minima of six bits, four times 32 bytes of two groups."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    s = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    m = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    rows = len(blocks)
    stored = _nibbles(blocks[..., 16:].reshape(rows, -1, SUPER // 2, GROUP)).reshape(rows, width)
    d, dmin = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return QuantisedWeight("int4_k", width, stored, (d, dmin, s.reshape(rows, -1), m.reshape(rows, -1)))


def _halves(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """All low halves of the last dimension's bytes, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)
