"""A decode worker that is lost before the commit: the router aims at another at once, and tells old outcomes from new ones."""

import asyncio
import json
import time

import pytest

from contracts.worker import WorkerKind
from router.config import RetryConfig
from tests.integration.router_harness import router_config, running_router
from tests.integration.test_router_flow import BASE, EXPECTED, all_workers, complete

VERDICT_S = 30.0  # how long the prefill worker's word would be awaited
SOON_S = 5.0  # on a busy machine; tests/faults/test_retarget.py says how soon it really is


@pytest.fixture
async def served(tmp_path):
    config = router_config(tmp_path, retry=RetryConfig(handoff_verdict_s=VERDICT_S))
    async with running_router(config) as running:
        await running.cluster.pools(1, 3)
        yield running


async def attached(running):
    """The decode worker that the one request is aimed at, once its prefill worker has the prompt."""
    async with asyncio.timeout(5):
        (prefill,) = all_workers(running, WorkerKind.PREFILL)
        while not prefill.running:
            await asyncio.sleep(0.005)
        while not (aimed := [w for w in all_workers(running, WorkerKind.DECODE) if w.attached]):
            await asyncio.sleep(0.005)
    return aimed[-1]


@pytest.mark.parametrize("moment", ["while it computes", "between Reserve and Commit"])
async def test_a_decode_worker_that_dies_before_the_commit_costs_no_second_prefill_and_no_wait(served, moment):
    (prefill,) = all_workers(served, WorkerKind.PREFILL)
    prefill.faults.wait_for_retarget = 1
    if moment == "while it computes":
        prefill.faults.hold.clear()
    asking = asyncio.create_task(complete(served))
    victim = await attached(served)
    began = time.monotonic()
    await victim.stop()
    async with asyncio.timeout(5):
        while not [w for w in all_workers(served, WorkerKind.DECODE) if w is not victim and w.attached]:
            await asyncio.sleep(0.005)
    prefill.faults.hold.set()
    body = await asking
    assert time.monotonic() - began < SOON_S
    assert body["diptych"]["route"] == "disaggregated"
    assert len(prefill.seen) == 1, "the prompt was computed once"
    assert len(prefill.retargets) == 1
    assert await served.metric("diptych_failed_attempts_total", code="UNAVAILABLE") == 0
    assert await served.metric("diptych_failed_handoffs_total") == 1


async def test_a_hand_off_that_was_committed_before_the_other_target_came_is_not_taken_for_it(served):
    """Both words cross: the KV is on a worker that is lost, the answer is made again, and every token comes once."""
    (prefill,) = all_workers(served, WorkerKind.PREFILL)
    prefill.faults.wait_for_retarget = 1
    prefill.faults.too_late = 1
    asking = asyncio.create_task(complete(served))
    victim = await attached(served)
    await victim.stop()
    await asking
    assert len(prefill.seen) == 2
    assert len(prefill.seen[1].output_token_ids) == 1, "from the tokens so far"
    assert await served.metric("diptych_failed_attempts_total", code="UNAVAILABLE") == 1


async def test_a_commit_that_the_prefill_worker_did_not_hear_of_is_one_once_its_tokens_come(served):
    """The way back between the two was cut: the answer goes on where it is, and the prefill worker holds no KV for it."""
    (prefill,) = all_workers(served, WorkerKind.PREFILL)
    prefill.faults.commit_unheard = asyncio.Event()
    served.cluster.step_s = 0.02
    tokens = []
    async with served.http.stream("POST", "/v1/completions", json={**BASE, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line
                tokens += [t for c in json.loads(line[6:])["choices"] for t in c.get("token_ids") or ()]
            if len(tokens) == 3:
                prefill.faults.commit_unheard.set()
    assert tokens == EXPECTED
    assert prefill.retargets == []
    assert await served.metric("diptych_failed_handoffs_total") == 0
