"""The real router in front of real workers with a fake model: one request, one answer, whichever way it goes."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from contracts.clock import MonotonicClock
from contracts.worker import WorkerInfo, WorkerKind
from engine.config import SchedulerConfig
from engine.execution.fake import FakeModel
from rpc.announce import AnnounceConfig, Announcer, GrpcRegistryClient
from tests.integration.pools import Setup, pools
from tests.integration.router_harness import MODEL, events, router_config, running_router

FAKE = FakeModel(vocab_size=1024, max_model_len=512, eos_token_ids=frozenset({1}))
PROMPT = list(range(40, 120))


@asynccontextmanager
async def served(tmp_path, setup, config=None):
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_router(config or router_config(tmp_path)))
        workers = await stack.enter_async_context(pools(setup))
        for kind, pool in ((WorkerKind.PREFILL, workers.prefill), (WorkerKind.DECODE, workers.decode)):
            for worker in pool:
                layout = setup.real.layout if setup.real else setup.model.layout
                info = WorkerInfo(worker.ref, kind, worker.address, MODEL, layout, (setup.connector,), 512, 128)
                info = replace(info, max_num_seqs=setup.scheduler.max_num_seqs)
                client = GrpcRegistryClient(running.target)
                announcer = Announcer(
                    client, info, worker.worker.load, MonotonicClock(), AnnounceConfig(interval_s=0.1)
                )
                assert await announcer.announce_once()
                task = asyncio.create_task(announcer.run())
                stack.push_async_callback(client.close)
                stack.callback(task.cancel)
        yield running, workers


def body(**changes):
    base = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "seed": 7, "ignore_eos": True, "return_token_ids": True}
    return {**base, **changes}


async def tokens(running, **changes):
    response = await running.http.post("/v1/completions", json=body(**changes))
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("connector", ["local", "shm", "tcp"])
async def test_both_ways_give_the_same_tokens_and_account_for_their_time(tmp_path, connector):
    setup = Setup(connector=connector, model=FAKE, step_s=0.005)
    async with served(tmp_path, setup) as (running, workers):
        got = {}
        for route in ("disaggregated", "colocated"):
            answer = await tokens(running, diptych={"route": route, "stages": True}, logprobs=2)
            got[route] = answer["choices"][0]["token_ids"]
            assert answer["diptych"]["route"] == route
            stages = answer["diptych"]["stages"]
            assert len(got[route]) == 24
            assert stages["prefill_compute_s"] > 0.004 or stages["first_step_s"] > 0.004, stages
            assert sum(stages.values()) < 1.0
        assert got["disaggregated"] == got["colocated"]
        unexplained_s = await running.metric("diptych_stage_seconds_sum", stage="ttft_unexplained")
        assert unexplained_s < 0.5, "two first tokens, connecting included"
        handoff = (await tokens(running, diptych={"stages": True}))["diptych"]["handoff"]
        assert handoff["connector"] == connector
        assert handoff["num_blocks"] + handoff["num_cached_blocks"] == 5
        await workers.idle()


async def test_many_at_once_leave_nothing_behind(tmp_path):
    setup = Setup(model=FAKE, num_prefill=2, num_decode=2, scheduler=SchedulerConfig(max_num_batched_tokens=64))
    async with served(tmp_path, setup) as (running, workers):

        async def ask(index, route):
            return (await tokens(running, prompt=PROMPT[index:], seed=index, diptych={"route": route}))["choices"][0]

        alone = [await ask(index, "colocated") for index in range(12)]
        together = await asyncio.gather(*(ask(index, "disaggregated") for index in range(12)))
        assert [c["token_ids"] for c in together] == [c["token_ids"] for c in alone]
        await workers.idle()


async def test_a_client_that_leaves_frees_both_pools(tmp_path):
    setup = Setup(model=FAKE, step_s=0.01)
    async with served(tmp_path, setup) as (running, workers):
        async with running.http.stream("POST", "/v1/completions", json=body(max_tokens=400, stream=True)) as response:
            seen = 0
            async for _ in response.aiter_bytes():
                seen += 1
                if seen == 4:
                    break
        await workers.idle()


async def test_a_stop_string_ends_the_decode_leg(tmp_path):
    setup = Setup(model=FAKE, step_s=0.01)
    async with served(tmp_path, setup) as (running, workers):
        ids = (await tokens(running))["choices"][0]["token_ids"]
        text = running.text(ids)
        stop = text[len(text) // 2 : len(text) // 2 + 3].strip("\ufffd") or text[-4:]
        choice = (await tokens(running, max_tokens=400, stop=[stop]))["choices"][0]
        assert choice["stop_reason"] == stop
        assert choice["text"] == text[: text.index(stop)]
        await workers.idle()


async def test_the_first_token_may_be_the_last(tmp_path):
    async with served(tmp_path, Setup(model=FAKE)) as (running, workers):
        first = (await tokens(running))["choices"][0]["token_ids"][0]
        for changes in ({"max_tokens": 1}, {"stop_token_ids": [first]}):
            answer = await tokens(running, diptych={"stages": True}, **changes)
            assert answer["choices"][0]["token_ids"] == [first]
            assert answer["diptych"]["handoff"] is None
        got = events((await running.http.post("/v1/completions", json=body(max_tokens=1, stream=True))).text)
        assert got[-2]["choices"][0]["finish_reason"] == "length"
        await workers.idle()


async def test_what_never_fits_is_refused_at_once(tmp_path):
    setup = Setup(model=FAKE, decode_blocks=8, prefill_blocks=8)
    async with served(tmp_path, setup) as (running, workers):
        for route in ("disaggregated", "colocated"):
            changes = {"max_tokens": 300, "diptych": {"route": route}}
            response = await running.http.post("/v1/completions", json=body(**changes))
            assert response.status_code == 400, response.text
        await workers.idle()


async def test_a_decode_worker_that_stops_mid_answer(tmp_path):
    setup = Setup(model=FAKE, num_decode=2, step_s=0.02)
    async with served(tmp_path, setup) as (running, workers):
        expected = (await tokens(running))["choices"][0]["token_ids"]
        asking = asyncio.create_task(tokens(running))
        await asyncio.sleep(0.25)
        busy = max(workers.decode, key=lambda w: w.worker.load().num_running)
        assert busy.worker.load().num_running == 1
        await busy.server.stop(0)
        assert (await asking)["choices"][0]["token_ids"] == expected
