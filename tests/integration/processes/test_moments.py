"""Processes that are killed, stopped or cut off, at every moment of a request: what the client sees, and what is left.

    strike      who is struck      what the client sees
    kill        prefill, decode    the same tokens, after a pause
    stop        anybody            the same tokens, after the pause that it was stopped for
    cut         prefill, decode    the same tokens, after a pause
    kill, cut   router             its connection ends; both pools free everything; a router serves again

After each, every block is back, nobody else has died, nothing is left of the dead, and the same question gets its answer.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.integration.processes.client import Answer
from tests.integration.processes.cluster import Cluster, Setup, cluster
from tests.integration.processes.moments import LIMIT_S, MOMENTS, Scene

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
STOPPED_S = 0.4
WAITS: list[tuple[str, float]] = []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tcp(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with cluster(Setup("tcp"), tmp_path_factory.mktemp("tcp")) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with cluster(Setup("shm"), tmp_path_factory.mktemp("shm")) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def how_long_clients_waited() -> Iterator[None]:
    yield
    for cell, wait_s in WAITS:
        print(f"{cell:45} {wait_s:6.2f} s")


async def strike(scene: Scene, how: str, who: str) -> None:
    """Strike one process, and let the others go on."""
    name = {"prefill": scene.prefill, "decode": scene.decode}.get(who, who)
    child = scene.cluster.children[name]
    if how == "kill":
        child.signal(signal.SIGKILL)
        await asyncio.wait_for(child.ended.wait(), LIMIT_S)
        assert child.code == -signal.SIGKILL
        scene.go_on()
    elif how == "stop":
        child.signal(signal.SIGSTOP)
        scene.frozen = tuple(frozen for frozen in scene.frozen if frozen != name)
        scene.go_on()
        await asyncio.sleep(STOPPED_S)
        child.signal(signal.SIGCONT)
    else:
        assert scene.cluster.cut(name)
        scene.go_on()


async def check_answered(made: Cluster, answer: Answer) -> None:
    await answer.end(LIMIT_S)
    assert (answer.broken, answer.error, answer.status) == (None, None, 200), made.logs()
    assert answer.finish_reason == "length"
    assert answer.token_ids == await made.truth(answer.question)


async def check_cut_off(scene: Scene) -> None:
    """The client of a router that is gone: a connection that ends, and nothing that is wrong."""
    for answer in (scene.victim, *scene.others):
        await answer.end(LIMIT_S)
        assert answer.broken is not None
        assert (answer.error, answer.finish_reason) == (None, None)
        truth = await scene.cluster.truth(answer.question)
        assert answer.token_ids == truth[: len(answer.token_ids)]
    await scene.cluster.idle()


async def play(made: Cluster, how: str, who: str, when: str) -> None:
    """One cell, from a whole cluster to a whole cluster."""
    await made.whole()
    cell = f"{made.setup.connector} {how} {who} {when}"
    scene = await MOMENTS[when](made, cell, seeded=who != "decode")
    assert len(scene.victim.token_ids) == scene.seen
    await strike(scene, how, who)
    if who == "router" and how != "stop":
        await check_cut_off(scene)
    else:
        for answer in (scene.victim, *scene.others):
            await check_answered(made, answer)
    WAITS.append((cell, scene.victim.longest_wait_s))
    struck = {"prefill": scene.prefill, "decode": scene.decode}.get(who, who)
    dead = {name for name, child in made.children.items() if child.ended.is_set()}
    assert dead == ({struck} if how == "kill" else set()), made.logs()
    await made.whole()
    again = made.client.ask(scene.victim.question)
    await check_answered(made, again)
    if scene.victim.finish_reason is not None:
        assert scene.victim.text == again.text
    await made.idle()
    made.check_nothing_leaked()


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("who", ["prefill", "decode", "router"])
@pytest.mark.parametrize("how", ["kill", "stop", "cut"])
async def test_over_tcp(tcp: Cluster, how: str, who: str, when: str) -> None:
    await play(tcp, how, who, when)


@pytest.mark.parametrize("when", ["mid_prefill", "mid_transfer", "before_commit"])
@pytest.mark.parametrize("who", ["prefill", "decode", "router"])
@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_over_shared_memory(shm: Cluster, how: str, who: str, when: str) -> None:
    await play(shm, how, who, when)
