"""Puts quantised weights into the native library's order: see src/quantised_tile.h for what lies where in a panel.

    panel of sixteen outputs:  [int4_k: d ‖ dmin of 8 groups, …]  [scales of each group]  [lines of each group]

Every part begins on a line of 64 bytes. Does not know how they are multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.pages import ARENA
from kernels.quantised import GROUP, SUPER, ZERO, QuantisedWeight

_LANES, _LINE, _WORD = 16, 64, 4
# Of rows that are put into order at a time, so that what lies between is small beside a large weight.
_ROWS_AT_ONCE = 8192


def packed(weight: QuantisedWeight) -> Tensor:
    """uint8: all panels, one behind the other; the last one's missing outputs are zeros."""
    groups = weight.stored.shape[1] // GROUP
    panels = -(-weight.outputs // _LANES)
    size = _panel_bytes(weight, groups)
    out = ARENA.empty(panels * size).view(panels, size)
    for first in range(0, weight.outputs, _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        part = QuantisedWeight(weight.format, weight.inputs, weight.stored[rows], tuple(s[rows] for s in weight.scales))
        block = _block(part, groups)
        out[first // _LANES : first // _LANES + len(block)] = block
    return out.view(-1)


def _panel_bytes(weight: QuantisedWeight, groups: int) -> int:
    supers = -(-groups // SUPER) * _LINE if weight.format == "int4_k" else 0
    lines = groups * GROUP * _LANES // (1 if weight.format == "int8" else 2)
    return supers + _whole_lines(groups * 2 * _LANES) + lines


def _whole_lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _block(weight: QuantisedWeight, groups: int) -> Tensor:
    """uint8 [panels, bytes of one]."""
    parts: list[Tensor] = []
    if weight.format == "int4_k":
        d, dmin, s, m = (_by_panels(scale) for scale in weight.scales)
        parts = [_bytes(torch.cat((d, dmin), dim=-1)), _bytes(torch.cat((s, m), dim=-1))]
    else:
        parts = [_bytes(_by_panels(weight.scales[0]))]
    padded = [torch.nn.functional.pad(part, (0, _whole_lines(part.shape[1]) - part.shape[1])) for part in parts]
    return torch.cat((*padded, _lines(weight, groups)), dim=1)


def _by_panels(rows: Tensor) -> Tensor:
    """[out, n] → [panels, n, 16]."""
    whole = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % _LANES))
    return whole.view(-1, _LANES, rows.shape[1]).transpose(1, 2)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(len(x), -1).view(torch.uint8)


def _lines(weight: QuantisedWeight, groups: int) -> Tensor:
    stored = weight.stored.view(weight.outputs, groups, GROUP)
    if weight.format != "int8":
        stored = stored[..., : GROUP // 2] | stored[..., GROUP // 2 :] << 4
    zero = ZERO[weight.format] if weight.format == "int8" else ZERO[weight.format] * 17
    whole = torch.nn.functional.pad(stored, (0, 0, 0, 0, 0, -weight.outputs % _LANES), value=zero)
    # [panels, outputs, groups, lines, inputs] → a line has all outputs of four inputs.
    words = whole.view(-1, _LANES, groups, stored.shape[-1] // _WORD, _WORD)
    return words.permute(0, 2, 3, 1, 4).reshape(len(words), -1)
