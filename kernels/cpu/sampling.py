"""Sampling by the native library: see src/sampling.h for how. Does not know requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.library import I32, INT, PTR, SHORT, Library
from kernels.sampling import Drawn, Wish

_RUN = 128
FUNCTIONS = {f"dt_sample_{short}": (PTR, INT, INT, PTR, I32) for short in SHORT.values()}

# `struct Row` of src/sampling.h, field by field.
ROW = np.dtype(
    [
        ("logits", np.uint64),
        ("temperature", np.float32),
        ("floor", np.float32),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("keys", np.uint64, 2),
        ("token", np.int64),
        ("largest", np.float32),
        ("unused", np.float32),
    ],
    align=True,
)


class NativeSampling:
    """See `kernels.sampling.Sampling`. Keeps its scratch from call to call, so it is one thread's."""

    def __init__(self, library: Library) -> None:
        calls = library.bind(FUNCTIONS)
        self._calls = {dtype: calls[f"dt_sample_{short}"] for dtype, short in SHORT.items()}
        self._scratch = np.empty(0, np.uint8)

    def __call__(self, logits: Tensor, rows: Sequence[int], wishes: Sequence[Wish]) -> list[Drawn]:
        """See `kernels.sampling.Sampling`. `logits` is on the CPU."""
        if logits.device.type != "cpu" or logits.dim() != 2 or len(rows) != len(wishes):
            raise ValueError(f"{tuple(logits.shape)} on {logits.device}, {len(rows)} rows, {len(wishes)} wishes")
        if not rows:
            return []
        if not 0 <= min(rows) <= max(rows) < len(logits):
            raise ValueError(f"rows {min(rows)} to {max(rows)} of {len(logits)}")
        if logits.dtype not in self._calls:
            logits = logits.to(torch.float32)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        vocab, row_bytes = logits.shape[1], logits.stride(0) * logits.element_size()
        asked = np.zeros(len(rows), ROW)
        first = logits.data_ptr()
        asked["logits"] = [first + row * row_bytes for row in rows]
        asked["temperature"] = [wish.temperature for wish in wishes]
        asked["floor"] = [math.log(wish.min_p) if wish.min_p > 0.0 else -math.inf for wish in wishes]
        asked["top_p"] = [wish.top_p for wish in wishes]
        asked["top_k"] = [wish.top_k for wish in wishes]
        asked["keys"] = [wish.keys for wish in wishes]
        self._calls[logits.dtype](
            asked.ctypes.data, len(rows), vocab, self._space(len(rows), vocab), torch.get_num_threads()
        )
        return [Drawn(*row) for row in zip(asked["token"].tolist(), asked["largest"].tolist(), strict=True)]

    def _space(self, rows: int, vocab: int) -> int:
        """At least scratch_bytes of src/sampling.h, at a multiple of 8."""
        needed = rows * -(-vocab // _RUN) * 12 + 64
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, np.uint8)
        return int(self._scratch.ctypes.data)
