"""One nursery for every test here: it takes a second, or many on a busy machine, to import what workers need."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kv_transfer.nixl_agent import why_not
from tests.integration.processes.children import Nursery
from tests.integration.processes.cluster import Cluster, Setup, cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nursery(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nursery]:
    """A process that forks others at once."""
    async with Nursery(tmp_path_factory.mktemp("logs")) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tcp(nursery: Nursery) -> AsyncIterator[Cluster]:
    """A cluster whose KV travels through sockets."""
    async with cluster(Setup("tcp"), nursery) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shm(nursery: Nursery) -> AsyncIterator[Cluster]:
    """A cluster whose KV travels through shared memory."""
    async with cluster(Setup("shm"), nursery) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def nixl(nursery: Nursery) -> AsyncIterator[Cluster]:
    """A cluster whose KV travels through NIXL."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    async with cluster(Setup("nixl"), nursery) as made:
        yield made
