"""Any blocks through any connector in a narrow form: what arrives is within the form's error, and nobody else's block changed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.clock import MonotonicClock
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from kernels.dispatch import choose
from kernels.packing import LARGEST, Form, packed_bytes
from kv_transfer.choose import NetworkConfig, make_connectors
from kv_transfer.connector import ByteRange, Connector, Write
from kv_transfer.local import LocalConnector, LocalHub
from kv_transfer.memory_pool import MemoryPool
from kv_transfer.region import SharedRegion
from kv_transfer.staging import StagedConnector, StagedPool, StagingArea
from worker.packed_memory import PackedMemory

SHAPE = (8, 2, 2, 4, 3, 8)  # blocks, layers, K and V, block_size, heads, width
SIZE = packed_bytes(2, 4, 3, 8)
BLOCK_SIZE = SHAPE[3]


class End:
    """A worker's cache of `SHAPE` and the staging area before it."""

    def __init__(self, cache: torch.Tensor, form: Form, num_slots: int, stack: ExitStack) -> None:
        self.cache = cache
        self.region = stack.enter_context(SharedRegion(num_slots * SIZE))
        packing = choose("cpu", cache.dtype).packing(cache, form)
        self.area = StagingArea(PackedMemory(cache, packing, self.region.buffer, SIZE), self.region, SIZE)
        stack.callback(self.area.close)


def two_connectors(kind: str) -> tuple[Connector, Connector]:
    if kind == "local":
        hub, clock = LocalHub(), MonotonicClock()
        return LocalConnector(hub, clock), LocalConnector(hub, clock)
    (one,), (other,) = (make_connectors((kind,), NetworkConfig()) for _ in range(2))
    return one, other


async def carry(kind: str, source: End, target: End, blocks: list[int]) -> tuple[int, ...]:
    """The source's `blocks` into a lease of the target's pool; the blocks where they are now."""
    request = GenerationRequest("h", tuple(range(BLOCK_SIZE * len(blocks))), SamplingParams(), (1,))
    inner = MemoryPool(SHAPE[0], BLOCK_SIZE)
    pool = StagedPool(inner, target.area, BLOCK_SIZE)
    async with AsyncExitStack() as stack:
        plain, into = two_connectors(kind)
        out = StagedConnector(plain, source.area)
        for connector, region in ((out, source.region), (into, target.region)):
            stack.push_async_callback(connector.close)
            connector.expose(region)
        lease = await pool.reserve("h", BLOCK_SIZE * len(blocks), ())
        assert lease is not None
        key = into.open_window([ByteRange(slot * SIZE, SIZE) for slot in lease.slots])
        writes = [Write(block * SIZE, slot * SIZE, SIZE) for block, slot in zip(blocks, lease.slots, strict=True)]
        await out.write(into.address(), key, writes)
        assert into.close_window(key)
        await pool.adopt(request, lease, BLOCK_SIZE * len(blocks))
        assert source.area.num_free == source.area.num_slots
        assert target.area.num_free == target.area.num_slots
    return inner.adopted["h"].block_ids


@pytest.mark.parametrize("form", list(LARGEST))
@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 1 << 30),
    blocks=st.lists(st.integers(0, SHAPE[0] - 1), min_size=1, max_size=5, unique=True),
    num_slots=st.integers(1, 6),
    magnitude=st.sampled_from((0.0, 1e-4, 1.0, 1e4)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_what_arrives_is_within_the_form_s_error(
    kind: str, form: Form, seed: int, blocks: list[int], num_slots: int, magnitude: float, dtype: torch.dtype
) -> None:
    cache = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * magnitude).to(dtype)
    with ExitStack() as stack:
        source = End(cache.clone(), form, num_slots, stack)
        target = End(torch.full_like(cache, torch.nan), form, len(blocks), stack)
        arrived = asyncio.run(carry(kind, source, target, blocks))
        assert torch.equal(source.cache, cache)
        sent, found = cache[blocks].float(), target.cache[list(arrived)].float()
        largest = sent.abs().amax((3, 5), keepdim=True)
        lost = largest * (0.5 / 127) if form == "int8" else torch.maximum(sent.abs(), largest * 2**-6 / 448) * 2**-4
        rounding = sent.abs() * 2**-7 if dtype == torch.bfloat16 else sent.abs() * 2**-20
        assert bool(((found - sent).abs() <= lost * 1.0001 + rounding + 1e-30).all())
        others = [block for block in range(SHAPE[0]) if block not in arrived]
        assert target.cache[others].isnan().all()
