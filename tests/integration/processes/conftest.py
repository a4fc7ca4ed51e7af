"""One nursery for every test here: it takes a second, or many on a busy machine, to import what workers need."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

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
