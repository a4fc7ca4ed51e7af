"""The pool without an engine is strict."""

import pytest

from contracts.errors import InternalError
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from kv_transfer.memory_pool import MemoryPool

REQUEST = GenerationRequest("h", (1, 2, 3, 4, 5), SamplingParams(), (6,))


@pytest.fixture
def pool():
    return MemoryPool(4, 2, {b"a": 4, b"b": 5})


async def test_a_lease_is_given_away_once(pool):
    lease = await pool.reserve("h", 5, (b"a", b"x", b"b"))
    assert (lease.block_ids[0], lease.num_cached_tokens, len(pool.free)) == (4, 2, 2)
    await pool.release(lease)
    assert len(pool.free) == 4
    for again in (pool.release(lease), pool.adopt(REQUEST, lease, 5)):
        with pytest.raises(InternalError, match="not out"):
            await again


async def test_everything_may_be_cached(pool):
    lease = await pool.reserve("h", 4, (b"a", b"b"))
    assert lease.block_ids == (4, 5)
    assert len(pool.free) == 4


async def test_adoption_is_checked(pool):
    with pytest.raises(InternalError, match="4 computed of 6"):
        await pool.adopt(REQUEST, await pool.reserve("h", 5, ()), 4)
    lease = await MemoryPool(9, 2).reserve("h", 5, ())
    with pytest.raises(InternalError, match="not out"):
        await pool.adopt(REQUEST, lease, 5)


async def test_nobody_is_adopted_twice():
    pool = MemoryPool(9, 2)
    await pool.adopt(REQUEST, await pool.reserve("h", 5, ()), 5)
    with pytest.raises(InternalError, match="twice"):
        await pool.adopt(REQUEST, await pool.reserve("h", 5, ()), 5)
    pool.finish("h")
    assert len(pool.free) == 6
