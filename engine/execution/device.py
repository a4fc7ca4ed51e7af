"""The device that a model runs on: which, what is free there, what a call needs, and memory for KV.

    "auto"   the GPU where torch sees one, else the CPU        "cuda"   the GPU, or a ConfigError that says why there is none

Does not know models or KV layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from contracts.errors import ConfigError
from engine.execution.memory import available_bytes, peak_bytes

T = TypeVar("T")


def resolve_device(asked: str) -> str:
    """ "cpu" or "cuda". Raises ConfigError when a GPU is asked for and none can be used."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        why = "torch sees none" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise ConfigError(f"device: got 'cuda', but there is no GPU to use: {why}")
    return "cuda"


def free_bytes(device: str) -> int:
    """Bytes that this process may still take on `device`."""
    if device == "cpu":
        return available_bytes()
    # What torch keeps for later allocations is free, too.
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return int(free)


def needed_bytes(device: str, call: Callable[[], T]) -> tuple[T, int]:
    """Run `call`; its result, and by how much the memory taken on `device` rose at most meanwhile."""
    if device == "cpu":
        return peak_bytes(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, max(0, torch.cuda.max_memory_allocated() - before)


def device_bytes(device: str, num_bytes: int) -> Tensor:
    """`num_bytes` zeroed bytes on `device`, for KV: uint8 [num_bytes]."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def finish(device: str) -> None:
    """Wait until all that was started on `device` has ended: what it wrote may be copied elsewhere."""
    if device != "cpu":
        torch.cuda.synchronize()
