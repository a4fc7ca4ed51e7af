"""A broken pool does not get a multiple of the load that broke it: all requests of a router share a budget of retries."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from contracts.errors import InternalError
from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc
from contracts.worker import WorkerKind
from router.config import BreakerConfig, RetryBudgetConfig, RetryConfig
from rpc.channel import open_channel
from tests.integration.router_harness import MODEL, router_config, running_router

BASE = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "diptych": {"route": "colocated"}}
BUDGET = RetryBudgetConfig(ratio=0.2, min_per_s=1.0, window_s=10.0)
NEVER = BreakerConfig(failures_in_a_row=10**6, min_requests=10**6)  # so that the budget alone is seen


def broken(worker):
    worker.faults.refuse = [InternalError("broken") for _ in range(1000)]


async def test_requests_to_a_broken_pool_end_early_and_say_when_to_come_back(tmp_path):
    config = router_config(tmp_path, retry=RetryConfig(backoff_s=0.001, max_failures=6, budget=BUDGET), breaker=NEVER)
    async with running_router(config) as running:
        _, decodes = await running.cluster.pools(0, 3)
        for worker in decodes:
            broken(worker)
        num_requests = 60
        responses = await asyncio.gather(
            *(running.http.post("/v1/completions", json=BASE) for _ in range(num_requests))
        )
        tried = sum(len(worker.seen) for worker in decodes)
        assert num_requests <= tried <= num_requests + 10 + 0.2 * num_requests, "seven times as many without a budget"
        spent = [r for r in responses if r.status_code == 503]
        assert len(spent) > num_requests / 2
        for response in spent:
            assert 1 <= int(response.headers["retry-after"]) <= 10
            assert "the last: broken" in response.json()["error"]["message"]
        assert await running.metric("diptych_retries_refused_total") == len(spent)
        async with open_channel(running.target) as channel:
            request = inference_pb2.GenerateRequest(model=MODEL, token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request):
                    pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        details = rpc_status.from_call(caught.value).details
        retry = error_details_pb2.RetryInfo()
        assert any(d.Is(retry.DESCRIPTOR) and d.Unpack(retry) for d in details)
        assert retry.retry_delay.seconds >= 1


async def test_what_moves_because_a_worker_has_gone_is_no_retry(tmp_path):
    budget = RetryBudgetConfig(ratio=0.0, min_per_s=0.0, window_s=10.0)
    config = router_config(
        tmp_path, retry=RetryConfig(backoff_s=0.001, worker_wait_s=2.0, budget=budget), breaker=NEVER
    )
    async with running_router(config) as running:
        running.cluster.step_s = 0.05
        _, (first, second) = await running.cluster.pools(0, 2)
        asked = [asyncio.ensure_future(running.http.post("/v1/completions", json=BASE)) for _ in range(16)]
        while min(len(first.running), len(second.running)) < 4:
            await asyncio.sleep(0.005)
        first.faults.die_after_tokens = 0
        responses = await asyncio.gather(*asked)
        assert [r.status_code for r in responses] == [200] * 16
        assert await running.metric("diptych_retries_refused_total") == 0
        assert first.kind is WorkerKind.DECODE
