"""Limits, deadlines and a full queue as clients of both doors see them."""

import asyncio
import json
import re

import grpc
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from contracts.errors import RateLimited
from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, types_pb2
from router.config import AccessConfig, AdmissionConfig, LimitsConfig
from router.keys import hash_of, new_key
from rpc.channel import open_channel
from rpc.errors import from_rpc_error
from tests.integration.router_harness import MODEL, events, router_config, running_router
from tests.integration.scripted_workers import says

PATH = "/v1/completions"
BASE = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 8, "seed": 3}
GENERATE = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=(5, 6, 7)), sampling=types_pb2.SamplingParams(max_tokens=8, seed=3)
)


@pytest.fixture
async def limited(tmp_path):
    """One caller for all: 1000 tokens and 6 requests per minute."""
    config = router_config(tmp_path, limits=LimitsConfig(requests_per_minute=6, tokens_per_minute=1000))
    async with running_router(config) as running:
        await running.cluster.pools(1, 1)
        yield running


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_say_what_is_left(limited, stream):
    response = await limited.http.post(PATH, json={**BASE, "max_tokens": 100, "stream": stream})
    assert response.status_code == 200
    headers = response.headers
    assert headers["x-ratelimit-limit-requests"] == "6"
    assert headers["x-ratelimit-remaining-requests"] == "5"
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 103)
    assert re.fullmatch(r"10(\.\d+)?s|9\.9\d*s", headers["x-ratelimit-reset-requests"])


async def test_what_an_answer_did_not_use_comes_back(limited):
    limited.cluster.script = says([7])
    first = await limited.http.post(PATH, json={**BASE, "max_tokens": 900})
    assert first.json()["usage"]["completion_tokens"] < 5
    assert first.headers["x-ratelimit-remaining-tokens"] == "97"
    second = await limited.http.post(PATH, json={**BASE, "max_tokens": 100})
    assert second.status_code == 200
    assert int(second.headers["x-ratelimit-remaining-tokens"]) > 1000 - 100 - 250


async def test_over_the_limit_is_429_as_openai_says_it(limited):
    async with openai.AsyncOpenAI(base_url=f"{limited.url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(6):
            await client.completions.create(**BASE)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**BASE)
    assert caught.value.code == "rate_limit_exceeded"
    headers = caught.value.response.headers
    assert 9 <= int(headers["retry-after"]) <= 10
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert "6 requests per minute" in caught.value.message
    assert (await limited.http.post(PATH, json={**BASE, "model": "none"})).status_code == 404
    assert await limited.metric("diptych_requests_total", outcome="RESOURCE_EXHAUSTED") == 1
    assert await limited.metric("diptych_requests_total", outcome="NOT_FOUND") == 1
    assert await limited.metric("diptych_slo_judged_requests_total") == 6, (
        "a caller's own limit or mistake misses nothing"
    )
    assert await limited.metric("diptych_slo_missed_requests_total", slo="errors") == 0
    assert await limited.metric("diptych_rate_limited_requests_total", kind="requests") == 1


async def test_over_the_limit_over_grpc(limited):
    async with open_channel(limited.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(6):
            call = stub.Generate(GENERATE)
            assert [piece async for piece in call]
            assert dict(await call.initial_metadata())["x-ratelimit-limit-requests"] == "6"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(GENERATE).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = from_rpc_error(caught.value, "router")
    assert isinstance(error, RateLimited)
    assert 9 < error.retry_after_s <= 10
    details = rpc_status.from_call(caught.value).details
    retry = error_details_pb2.RetryInfo()
    assert any(d.Is(retry.DESCRIPTOR) and d.Unpack(retry) for d in details)
    assert 9 <= retry.retry_delay.seconds <= 10
    assert any(d.Is(error_details_pb2.QuotaFailure.DESCRIPTOR) for d in details)


async def test_text_that_is_only_read_counts_at_both_doors(limited):
    """A request comes back every ten seconds, and 17 tokens each: what is left is less than it was, or nothing at last."""
    ids = (await limited.http.post("/tokenize", json={"prompt": "one two three four " * 20})).json()["tokens"]
    assert 40 < len(ids) < 300
    back = await limited.http.post("/detokenize", json={"tokens": ids})
    assert back.headers["x-ratelimit-remaining-requests"] in ("4", "5")
    assert 1000 - 2 * len(ids) - 20 < int(back.headers["x-ratelimit-remaining-tokens"]) < 1000 - len(ids)
    wrong = await limited.http.post("/detokenize", json={"tokens": [10**6]})
    assert wrong.status_code == 400, "and is not counted"
    large = await limited.http.post("/tokenize", json={"prompt": "x " * 4000})
    assert (large.status_code, large.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "tokens per minute" in large.json()["error"]["message"]
    async with open_channel(limited.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = (
            lambda: stub.Tokenize(pb.TokenizeRequest(text="x")),
            lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=[5])),
        )
        for call in calls:
            done = call()
            await done
            assert int(dict(await done.initial_metadata())["x-ratelimit-remaining-requests"]) <= 4
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                for _ in range(20):
                    await call()
            assert isinstance(from_rpc_error(caught.value, "router"), RateLimited)


async def test_a_key_that_has_much_text_read_does_not_delay_anothers(tmp_path):
    """Two texts are read at once; of those that wait, each key's next has its turn."""
    keys, path = {name: new_key() for name in ("much", "little")}, tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": name, "hash": hash_of(key)} for name, key in keys.items()]}))
    done = []

    async def read(running, name):
        body, headers = {"prompt": "a b c d " * 1500}, {"Authorization": f"Bearer {keys[name]}"}
        assert (await running.http.post("/tokenize", json=body, headers=headers)).status_code == 200
        done.append(name)

    async with running_router(router_config(tmp_path, access=AccessConfig(api_keys=path))) as running:
        reading = [asyncio.create_task(read(running, "much")) for _ in range(24)]
        async with asyncio.timeout(10):
            while not done:
                await asyncio.sleep(0.001)
        before = len(done)
        await read(running, "little")
        assert len(done) - before <= 8
        await asyncio.gather(*reading)


async def test_a_request_that_is_refused_by_name_is_not_counted(limited):
    for _ in range(20):
        assert (await limited.http.post(PATH, json={**BASE, "prompt": [10**6]})).status_code == 400
    response = await limited.http.post(PATH, json=BASE)
    assert response.headers["x-ratelimit-remaining-requests"] == "5"


@pytest.fixture
async def served(tmp_path):
    config = router_config(tmp_path, admission=AdmissionConfig(max_running=1, max_waiting=4))
    async with running_router(config) as running:
        await running.cluster.pools(1, 1)
        yield running


def hold(served):
    for worker in served.cluster.workers:
        worker.faults.hold.clear()


def go_on(served):
    for worker in served.cluster.workers:
        worker.faults.hold.set()


async def waiting(served, number):
    async with asyncio.timeout(5):
        while await served.metric("diptych_requests_waiting") != number:
            await asyncio.sleep(0.01)


async def test_a_clients_own_time_bounds_its_wait_its_prompt_and_its_answer(served):
    hold(served)
    runs = asyncio.create_task(served.http.post(PATH, json=BASE, headers={"X-Request-Timeout": "0.6"}))
    await asyncio.sleep(0.05)
    waits = await served.http.post(PATH, json=BASE, headers={"X-Request-Timeout": "0.2"})
    assert (waits.status_code, waits.json()["error"]["code"]) == (408, "request_timeout")
    assert "waited to be let in" in waits.json()["error"]["message"]
    response = await runs
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")
    go_on(served)
    served.cluster.workers[1].faults.hold.clear()
    streamed = {**BASE, "stream": True, "diptych": {"route": "disaggregated"}}
    text = (await served.http.post(PATH, json=streamed, headers={"X-Request-Timeout": "0.3"})).text
    assert events(text)[-2]["error"]["code"] == "request_timeout"
    go_on(served)
    assert (await served.http.post(PATH, json=BASE)).status_code == 200
    await served.cluster.idle()
    assert await served.metric("diptych_requests_running") == 0


@pytest.mark.parametrize("bad", ["0", "-1", "nan", "inf", "1e99", "soon", "", "1_0", "5s"])
async def test_a_time_that_is_none_is_refused_by_name(served, bad):
    response = await served.http.post(PATH, json=BASE, headers={"X-Request-Timeout": bad})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


async def test_who_cannot_be_in_time_is_429_at_once(served):
    began = asyncio.get_running_loop().time()
    for _ in range(4):  # it learns what requests take
        hold(served)
        visit = asyncio.create_task(served.http.post(PATH, json=BASE))
        await asyncio.sleep(0.3)
        go_on(served)
        assert (await visit).json()["usage"]["total_tokens"] == 11
    token_s = (asyncio.get_running_loop().time() - began) / 44
    hold(served)
    visits = [asyncio.create_task(served.http.post(PATH, json=BASE))]
    async with asyncio.timeout(5):
        while await served.metric("diptych_requests_running") != 1:
            await asyncio.sleep(0.01)
    visits += [asyncio.create_task(served.http.post(PATH, json={**BASE, "max_tokens": 48})) for _ in range(4)]
    await waiting(served, 4)
    full = await served.http.post(PATH, json=BASE)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
    assert int(full.headers["retry-after"]) == pytest.approx(4 * 51 * token_s, rel=0.3), (
        "as long as those that wait will take"
    )
    late = await served.http.post(PATH, json=BASE, headers={"X-Request-Timeout": "0.4"})
    assert late.status_code == 429
    assert late.json()["error"]["code"] == "overloaded"
    assert int(late.headers["retry-after"]) >= 1
    assert await served.metric("diptych_shed_requests_total", reason="deadline") == 1
    assert await served.metric("diptych_slo_missed_requests_total", slo="errors") == 2, "both were ours to answer"
    assert await served.metric("diptych_queue_wait_seconds") > 0.8
    async with open_channel(served.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(GENERATE, timeout=0.4).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    go_on(served)
    assert [r.status_code for r in await asyncio.gather(*visits)] == [200] * 5


async def test_a_key_has_no_better_priority_than_its_best_at_workers_too(tmp_path):
    key = new_key()
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "a", "hash": hash_of(key), "best_priority": 3}]}))
    async with running_router(router_config(tmp_path, access=AccessConfig(api_keys=keys))) as running:
        await running.cluster.pools(1, 1)
        for priority in (-5, 7):
            body = {**BASE, "priority": priority, "diptych": {"route": "colocated"}}
            response = await running.http.post(PATH, json=body, headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == 200
        assert [request.priority for request in running.cluster.workers[1].seen] == [3, 7]
