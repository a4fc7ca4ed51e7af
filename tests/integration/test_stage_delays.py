"""A delay is in the stage of where it is, and nowhere else; there is one at each place that a request passes."""

import asyncio
import json
import time

import pytest

from contracts.worker import WorkerKind
from engine.execution.fake import FakeModel
from kv_transfer.local import WriteFault
from router.config import AdmissionConfig
from tests.integration.measuring_client import MeasuringClient
from tests.integration.pools import Setup
from tests.integration.router_harness import router_config, running_router
from tests.integration.test_router_pools import served as with_real_workers

DELAY_S = 0.2  # much more than what a busy machine puts anywhere
BODY = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 3, "seed": 1, "diptych": {"stages": True}}


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        running.prefill = await running.cluster.add(WorkerKind.PREFILL, "p1")
        running.decode = await running.cluster.add(WorkerKind.DECODE, "d1")
        yield running


async def ask(running, **changes):
    """What a client in a thread of its own sees."""

    def in_thread():
        with MeasuringClient(running.ports.http) as client:
            return client.ask(**{**BODY, **changes})

    return await asyncio.to_thread(in_thread)


async def when(what):
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0)


async def body_late(running):
    async def body():
        raw = json.dumps({**BODY, "stream": False}).encode()
        yield raw[:20]
        await asyncio.sleep(DELAY_S)
        yield raw[20:]

    answer = await running.http.post("/v1/completions", content=body(), headers={"Content-Type": "application/json"})
    return None, answer.json()["diptych"]


async def router_busy_as_it_comes(running):
    loop = asyncio.get_running_loop()

    def in_thread():
        with MeasuringClient(running.ports.http) as client:
            client.ask(**BODY)  # this connection is there
            loop.call_soon_threadsafe(time.sleep, DELAY_S)
            time.sleep(DELAY_S / 20)  # until it has begun
            return client.ask(**BODY)

    seen = await asyncio.to_thread(in_thread)
    return seen, seen.told


async def held(running, worker, *, busy=False):
    """That worker goes on DELAY_S after it has the request, of which it says nothing; or all is ready, and the router is busy."""
    worker.faults.hold.clear()
    asking = asyncio.create_task(ask(running))
    await when(lambda: worker.running)
    await asyncio.sleep(DELAY_S / 20 if busy else DELAY_S)
    worker.faults.hold.set()
    if busy:
        time.sleep(DELAY_S)  # noqa: ASYNC251 - that is what it is about
    seen = await asking
    return seen, seen.told


async def first_token_late(running):
    return await held(running, running.prefill)


async def router_busy_as_the_first_token_comes(running):
    return await held(running, running.prefill, busy=True)


async def second_token_late(running):
    return await held(running, running.decode)


async def router_busy_as_the_second_token_comes(running):
    return await held(running, running.decode, busy=True)


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        (body_late, "receive"),
        (router_busy_as_it_comes, "receive"),
        (first_token_late, "notify"),
        (router_busy_as_the_first_token_comes, "notify"),
        (second_token_late, "relay"),
        (router_busy_as_the_second_token_comes, "relay"),
    ],
)
async def test_a_delay_is_in_its_stage(served, place, stage):
    await ask(served)  # all connections are there
    seen, told = await place(served)
    found(told, {stage})
    if seen is not None and not seen.late:
        assert seen.ttft_s == pytest.approx(told["ttft_s"], abs=DELAY_S / 2)
        assert seen.gap_s == pytest.approx(told["gap_s"], abs=DELAY_S / 2)


async def test_a_turn_that_is_waited_for_is_admission(tmp_path):
    async with running_router(router_config(tmp_path, admission=AdmissionConfig(max_running=1))) as running:
        prefill = await running.cluster.add(WorkerKind.PREFILL, "p1")
        await running.cluster.add(WorkerKind.DECODE, "d1")
        await ask(running)  # all connections are there
        prefill.faults.hold.clear()
        first = asyncio.create_task(ask(running))
        await when(lambda: prefill.running)
        asyncio.get_running_loop().call_later(1.1 * DELAY_S, prefill.faults.hold.set)
        found((await ask(running)).told, {"admission"})
        found((await first).told, {"notify"})


def found(told, slow):
    """Each of these stages has the delay, and no other; stages and what is in none add up."""
    for name, duration_s in told["stages"].items():
        if name.removesuffix("_s") in slow:
            assert duration_s > 0.8 * DELAY_S, told
        else:
            assert 0 <= duration_s < DELAY_S / 2, (name, told)
    rest = told["unexplained_s"].values()  # of scripted workers, that say that they take 3 ms
    assert max(map(abs, rest)) < DELAY_S / 20, told


@pytest.mark.parametrize(
    ("changes", "slow"),
    [
        ({"faults": lambda index: WriteFault(delay_s=DELAY_S)}, {"transfer"}),
        ({"step_s": DELAY_S}, {"prefill_compute", "first_step"}),
    ],
)
async def test_what_workers_take_is_in_the_stages_of_what_they_do(tmp_path, changes, slow):
    setup = Setup(model=FakeModel(vocab_size=1024, max_model_len=512, eos_token_ids=frozenset({1})), **changes)
    async with with_real_workers(tmp_path, setup) as (running, workers):
        await ask(running)  # all connections are there
        seen = await ask(running, prompt=list(range(100, 120)))
        found(seen.told, slow)
        await workers.idle()
