"""The two ends of a router's life: requests that come before its workers, and requests that outlast its patience."""

import asyncio
from dataclasses import replace

import grpc
import httpx
import pytest

from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from router.config import AdmissionConfig, RetryConfig
from tests.integration.router_harness import MODEL, events, router_config, running_router

BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 900, "seed": 3}
STOPPED = "this router stopped before the answer was whole"


def patient(tmp_path, **changes):
    retry = RetryConfig(backoff_s=0.01, worker_wait_s=5.0, **changes)
    return router_config(tmp_path, retry=retry)


@pytest.mark.parametrize("route", ["disaggregated", "colocated"])
async def test_a_young_router_waits_for_the_workers_of_its_last_life(tmp_path, route):
    async with running_router(patient(tmp_path, first_worker_wait_s=5.0)) as running:
        body = {**BODY, "max_tokens": 4, "diptych": {"route": route}}
        asked = asyncio.create_task(running.http.post("/v1/completions", json=body))
        await asyncio.sleep(0.2)
        assert not asked.done()
        await running.cluster.pools(1, 1)
        assert (await asked).status_code == 200


async def test_it_does_not_wait_for_ever(tmp_path):
    async with running_router(patient(tmp_path, first_worker_wait_s=0.5)) as running:
        began = asyncio.get_running_loop().time()
        assert (await running.http.post("/v1/completions", json=BODY)).status_code == 503
        assert asyncio.get_running_loop().time() - began > 0.1
        assert (await running.http.post("/v1/completions", json=BODY)).status_code == 503


@pytest.mark.parametrize("route", ["disaggregated", "colocated"])
async def test_answers_that_are_cut_by_a_stop_end_with_a_word(tmp_path, route):
    """Over HTTP streamed and not, over gRPC, and one that still waits to be let in."""
    config = replace(router_config(tmp_path), admission=AdmissionConfig(max_running=3))
    async with running_router(config) as running:
        await running.cluster.pools(1, 1)
        running.cluster.step_s = 0.02
        body = {**BODY, "diptych": {"route": route}}
        stream = asyncio.create_task(running.http.post("/v1/completions", json={**body, "stream": True}))
        whole = asyncio.create_task(running.http.post("/v1/completions", json=body))
        async with grpc.aio.insecure_channel(running.target) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(
                    token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]), sampling=types_pb2.SamplingParams(max_tokens=900)
                )
            )
            await call.read()
            while await running.metric("diptych_requests_running") < 3:
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(running.http.post("/v1/completions", json=body))
            while await running.metric("diptych_requests_waiting") < 1:
                await asyncio.sleep(0.01)
            await running.router.stop()
            with pytest.raises(grpc.aio.AioRpcError) as cut:
                while await call.read() is not grpc.aio.EOF:
                    pass
        assert (cut.value.code(), cut.value.details()) == (grpc.StatusCode.UNAVAILABLE, STOPPED)
        got = events((await stream).text)
        assert got[-1] == "[DONE]"
        assert got[-2]["error"]["message"] == STOPPED
        answered: httpx.Response = await whole
        assert (answered.status_code, answered.json()["error"]["message"]) == (503, STOPPED)
        sent_away: httpx.Response = await waiting
        assert (sent_away.status_code, sent_away.json()["error"]["message"]) == (503, "this router is stopping")


async def test_a_request_that_waits_for_a_worker_ends_with_the_router(tmp_path):
    async with running_router(patient(tmp_path, first_worker_wait_s=30.0)) as running:
        asked = asyncio.create_task(running.http.post("/v1/completions", json=BODY))
        await asyncio.sleep(0.1)
        await running.router.stop()
        response = await asked
        assert (response.status_code, response.json()["error"]["message"]) == (503, STOPPED)
