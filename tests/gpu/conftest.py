"""Tests of the GPU path. Where there is none they are skipped, unless TRITON_INTERPRET=1: then kernels run in Triton's
interpreter on CPU tensors (what needs CUDA itself is still skipped).

Whether a kernel is interpreted is decided where it is defined, so this takes a process of its own:
tests/unit/kernels/test_triton_interpreted.py starts one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # noqa: TID251


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")


@pytest.fixture
def device() -> torch.device:
    """Where kernels run; skips where they cannot."""
    pytest.importorskip("triton", reason="triton is not installed (the extra gpu)")
    torch.manual_seed(0)
    if INTERPRETED:
        torch.set_num_threads(1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; TRITON_INTERPRET=1 runs the kernels without one")
    return torch.device("cuda")


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """A real GPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU, not the interpreter")
    return device


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found
