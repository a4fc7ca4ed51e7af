"""One connection is cut, nobody dies: the same tokens after a pause, every block back, nobody restarted.

data       prefill ──KV bytes──▶ decode                 run        router ──prompt──▶ prefill
control    prefill ──reserve, commit──▶ decode          session    router ◀──tokens── decode
"""

from __future__ import annotations

import pytest

from tests.integration.processes.checks import check_answered, check_whole_again
from tests.integration.processes.cluster import Cluster
from tests.integration.processes.moments import MOMENTS, Scene

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
PAUSE_S = 10.0  # what is measured is a fraction of a second; a busy machine adds to it


def cut(scene: Scene, what: str) -> int:
    """Cut this connection of the scene's request; how many there were."""
    doors = scene.cluster.doors
    match what:
        case "data":
            return doors[scene.decode].proxies["kv"].cut()
        case "control":
            return doors[scene.decode].proxies["grpc"].cut(scene.prefill)
        case "run":
            return doors[scene.prefill].proxies["grpc"].cut("router")
        case _:
            return doors[scene.decode].proxies["grpc"].cut("router")


@pytest.mark.parametrize(
    ("what", "when"),
    [
        *(("data", when) for when in ("mid_prefill", "mid_transfer")),
        *(("control", when) for when in ("mid_prefill", "mid_transfer", "before_commit", "mid_decode")),
        *(("run", when) for when in ("queued", "mid_prefill", "mid_transfer", "before_commit", "after_commit")),
        *(("session", when) for when in ("queued", "mid_prefill", "mid_transfer", "before_commit", "mid_decode")),
    ],
)
async def test_it_is_made_again(tcp: Cluster, what: str, when: str) -> None:
    await tcp.whole()
    scene = await MOMENTS[when](tcp, f"connection {what} {when}", 160, seeded=what in ("data", "session"))
    assert cut(scene, what)
    scene.go_on()
    for answer in (scene.victim, *scene.others):
        await check_answered(tcp, answer)
    print(f"{what:8} {when:14} {scene.victim.longest_wait_s:6.2f} s")
    assert scene.victim.longest_wait_s < PAUSE_S
    await check_whole_again(tcp, scene.victim)
