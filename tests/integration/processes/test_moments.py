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
from collections.abc import Iterator

import pytest

from tests.integration.processes.checks import check_answered, check_cut_off, check_whole_again
from tests.integration.processes.cluster import WORKERS, Cluster
from tests.integration.processes.moments import LIMIT_S, MOMENTS, Scene

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
STOPPED_S = 0.4
PAUSE_S = 10.0  # what is measured is a fraction of a second; a busy machine adds to it
NUM_LONG = {"prefill": 64, "decode": 160, "router": 500}  # tokens of answers that are being decoded, by who is struck
COMPUTED = "diptych_engine_scheduled_tokens_total"
Waits = list[tuple[str, float]]


@pytest.fixture(scope="module")
def waits() -> Iterator[Waits]:
    """How long the client of each cell waited at most; told at the end."""
    waits: Waits = []
    yield waits
    for cell, wait_s in waits:
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


async def play(made: Cluster, waits: Waits, how: str, who: str, when: str) -> None:
    """One cell, from a whole cluster to a whole cluster."""
    await made.whole()
    cell = f"{made.setup.connector} {how} {who} {when}"
    computed = {name: (await made.metrics(name))[COMPUTED] for name in WORKERS}
    scene = await MOMENTS[when](made, cell, NUM_LONG[who], seeded=who != "decode")
    assert len(scene.victim.token_ids) == scene.seen
    await strike(scene, how, who)
    if who == "router" and how != "stop":
        await check_cut_off(scene)
        if when in ("after_commit", "mid_decode"):  # it was stopped, and did not just come to its end
            now = (await made.metrics(scene.decode))[COMPUTED]
            assert now - computed[scene.decode] < NUM_LONG[who] * 0.8
    else:
        for answer in (scene.victim, *scene.others):
            await check_answered(made, answer)
    waits.append((cell, scene.victim.longest_wait_s))
    assert scene.victim.longest_wait_s < PAUSE_S
    struck = {"prefill": scene.prefill, "decode": scene.decode}.get(who, who)
    dead = {name for name, child in made.children.items() if child.ended.is_set()}
    assert dead == ({struck} if how == "kill" else set()), made.logs()
    await check_whole_again(made, scene.victim)


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("who", ["prefill", "decode", "router"])
@pytest.mark.parametrize("how", ["kill", "stop", "cut"])
async def test_over_tcp(tcp: Cluster, waits: Waits, how: str, who: str, when: str) -> None:
    await play(tcp, waits, how, who, when)


@pytest.mark.parametrize("when", ["mid_prefill", "mid_transfer", "before_commit"])
@pytest.mark.parametrize("who", ["prefill", "decode", "router"])
@pytest.mark.parametrize("how", ["kill", "stop", "cut"])
async def test_over_shared_memory(shm: Cluster, waits: Waits, how: str, who: str, when: str) -> None:
    await play(shm, waits, how, who, when)


@pytest.mark.long  # its pairs take long to meet: `mid_prefill` of a fresh pair is over before its KV has somewhere to go
@pytest.mark.parametrize("when", ["mid_prefill", "mid_transfer", "before_commit"])
@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["kill", "stop", "cut"])
async def test_over_nixl(nixl: Cluster, waits: Waits, how: str, who: str, when: str) -> None:
    await play(nixl, waits, how, who, when)
