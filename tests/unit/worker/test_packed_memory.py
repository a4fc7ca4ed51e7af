"""Blocks go into the staging area packed, and out of it into blocks; what an earlier owner left has no say."""

from __future__ import annotations

import pytest
import torch

from contracts.errors import InternalError
from kernels.packing import TorchPacking, pack, packed_bytes, unpack
from kv_transfer.staging import Copy
from worker.packed_memory import PackedMemory

SHAPE = (5, 2, 2, 4, 2, 6)
SIZE = packed_bytes(2, 4, 2, 6)


def packed_memory(cache: torch.Tensor) -> tuple[PackedMemory, torch.Tensor]:
    staging = bytearray(3 * SIZE)
    made = PackedMemory(cache, TorchPacking(cache, "int8"), memoryview(staging), SIZE)
    return made, torch.frombuffer(staging, dtype=torch.uint8)


def test_blocks_are_packed_into_slots_and_back() -> None:
    cache = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    memory, staging = packed_memory(cache)
    memory.to_host([Copy(4 * SIZE, 0, SIZE), Copy(1 * SIZE, 2 * SIZE, SIZE)])
    packed = pack(cache[[4, 1]], "int8")
    assert torch.equal(staging.view(3, SIZE)[[0, 2]], packed)
    assert not staging[SIZE : 2 * SIZE].any()
    before = cache.clone()
    memory.to_device([Copy(0, 2 * SIZE, SIZE), Copy(3 * SIZE, 0, SIZE)])
    wanted = torch.empty_like(cache[:2])
    unpack(packed, wanted, "int8")
    assert torch.equal(cache[[3, 0]], wanted)
    assert torch.equal(cache[[1, 2, 4]], before[[1, 2, 4]])


def test_cleared_cells_have_no_say_in_a_block_s_scales() -> None:
    cache = torch.full(SHAPE, torch.nan)
    cache[2, :, :, :3] = 1.0
    memory, _ = packed_memory(cache)
    memory.blank(2, 3)
    assert bool((cache[2, :, :, :3] == 1.0).all())
    assert bool((cache[2, :, :, 3:] == 0.0).all())
    assert cache[[0, 1, 3, 4]].isnan().all()


@pytest.mark.parametrize("copy", [Copy(0, 0, SIZE - 1), Copy(SIZE + 1, 0, SIZE), Copy(0, 0, 2 * SIZE)])
def test_a_part_of_a_block_is_a_fault(copy: Copy) -> None:
    memory, _ = packed_memory(torch.zeros(SHAPE))
    for move in (memory.to_host, memory.to_device):
        with pytest.raises(InternalError, match=f"not a block of {SIZE} bytes"):
            move([copy])
