"""KV memory is where the model is: on the host one region, on a device a tensor with a staging area beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from contracts.errors import ConfigError
from contracts.kv_layout import KVLayout
from kernels.packing import LARGEST, Form, pack
from kv_transfer.staging import Copy
from worker.kv_memory import make_kv_memory

LAYOUT = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, head_size=2, block_size=4)
BLOCK = LAYOUT.block_bytes


@dataclass
class Loaded:
    """As much of a LoadedModel as is asked for; its device is the CPU whatever it is called."""

    device: str = "cpu"
    layout: KVLayout = field(default_factory=lambda: LAYOUT)
    max_model_len: int = 12

    def device_memory(self, num_blocks: int) -> torch.Tensor:
        return torch.arange(num_blocks * BLOCK, dtype=torch.int64).to(torch.uint8)


def test_on_the_host_there_is_one_memory() -> None:
    memory = make_kv_memory(Loaded(), 3, 1)
    assert memory.buffer is memory.region.buffer
    assert memory.region.num_bytes == 3 * BLOCK
    assert memory.staging is None
    memory.close()
    memory.close()


def test_on_a_device_a_staging_area_is_beside_it() -> None:
    memory = make_kv_memory(Loaded("gpu"), 4, 3 * BLOCK + 1)
    assert memory.staging is not None
    assert (memory.staging.num_slots, memory.region.num_bytes) == (3, 3 * BLOCK)
    assert isinstance(memory.buffer, torch.Tensor)
    device = memory.staging._device
    device.to_host([Copy(BLOCK + 1, 2 * BLOCK, 5)])
    assert list(memory.region.buffer[2 * BLOCK - 1 : 2 * BLOCK + 6]) == [0, *range(BLOCK + 1, BLOCK + 6), 0]
    device.to_device([Copy(7, 2 * BLOCK, 2)])
    assert memory.buffer[5:11].tolist() == [5, 6, BLOCK + 1, BLOCK + 2, 9, 10]
    memory.close()
    memory.close()


def test_no_more_slots_than_blocks() -> None:
    memory = make_kv_memory(Loaded("gpu"), 2, 100 * BLOCK)
    assert memory.staging is not None
    assert memory.staging.num_slots == 2
    memory.close()


def test_a_staging_area_without_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"kv_staging: got {BLOCK - 1} bytes, a block of this model has {BLOCK}"):
        make_kv_memory(Loaded("gpu"), 2, BLOCK - 1)


@pytest.mark.parametrize("form", list(LARGEST))
def test_on_the_host_blocks_in_a_narrow_form_pass_through_a_staging_area(form: Form) -> None:
    sent = LAYOUT.sent_as(form).sent_block_bytes
    memory = make_kv_memory(Loaded(), 4, 3 * sent + 1, form)
    assert memory.staging is not None
    assert memory.own is not None
    assert memory.buffer is memory.own.buffer
    assert (memory.own.num_bytes, memory.staging.num_slots, memory.region.num_bytes) == (4 * BLOCK, 3, 3 * sent)
    cache = torch.frombuffer(memory.own.buffer, dtype=torch.float32).view(4, 1, 2, 4, 1, 2)
    cache[2] = torch.randn(1, 2, 4, 1, 2)
    memory.staging._device.to_host([Copy(2 * sent, sent, sent)])
    assert bytes(memory.region.buffer[sent : 2 * sent]) == bytes(pack(cache[2:3], form).numpy())
    del cache
    memory.close()
    memory.close()


def test_a_staging_area_is_asked_to_hold_a_narrow_block() -> None:
    sent = LAYOUT.sent_as("fp8").sent_block_bytes
    with pytest.raises(ConfigError, match=f"kv_staging: got {sent - 1} bytes, a block of this model has {sent}"):
        make_kv_memory(Loaded(), 2, sent - 1, "fp8")
