"""A process that is stopped for longer than its lease and its word in the registry last, and then goes on as if nothing had been.

What it does then is late: others have taken its blocks or its requests. Its late writes land nowhere, its late words harm
nothing, and the client has the same tokens; a router that wakes finds its workers again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kv_transfer.config import Integrity, ReceiverConfig, SenderConfig
from router.config import RegistryConfig
from tests.integration.processes.checks import check_answered, check_whole_again
from tests.integration.processes.children import Nursery
from tests.integration.processes.cluster import Cluster, Setup, cluster
from tests.integration.processes.moments import MOMENTS

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
LEASE_S, TTL_S, STOPPED_S = 1.0, 1.5, 2.2
SENDER = SenderConfig(renew_every_s=0.2, integrity=Integrity.FULL)
RECEIVER = ReceiverConfig(lease_s=LEASE_S, integrity=Integrity.FULL)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["tcp", "shm"])
async def made(request: pytest.FixtureRequest, nursery: Nursery) -> AsyncIterator[Cluster]:
    setup = Setup(request.param, sender=SENDER, receiver=RECEIVER, registry=RegistryConfig(ttl_s=TTL_S))
    async with cluster(setup, nursery) as made:
        yield made


@pytest.mark.parametrize(
    ("who", "when"),
    [
        ("prefill", "mid_transfer"),
        ("prefill", "before_commit"),
        ("decode", "before_commit"),
        ("decode", "mid_decode"),
        ("router", "mid_decode"),
    ],
)
async def test_it_comes_back_late(made: Cluster, who: str, when: str) -> None:
    await made.whole()
    scene = await MOMENTS[when](made, f"late {made.setup.connector} {who} {when}", 160, seeded=who == "decode")
    name = {"prefill": scene.prefill, "decode": scene.decode}.get(who, who)
    made.freeze(name)
    scene.frozen = tuple(frozen for frozen in scene.frozen if frozen != name)
    scene.go_on()
    await asyncio.sleep(STOPPED_S)
    made.children[name].signal(signal.SIGCONT)
    await check_answered(made, scene.victim)
    print(f"{made.setup.connector} {who:8} {when:14} {scene.victim.longest_wait_s:6.2f} s")
    await check_whole_again(made, scene.victim)
