"""API keys at both doors of a real router: who has none gets nothing, and an official client hears it in its own words."""

import asyncio
import json
import logging
import os

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from contracts.errors import Unauthenticated, Unavailable
from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, registry_pb2, registry_pb2_grpc, types_pb2
from contracts.worker import WorkerLoad
from observability.log import LineFormatter
from router.config import AccessConfig, HttpConfig
from router.keys import hash_of, new_key
from router.service import Inference
from rpc.announce import GrpcRegistryClient
from rpc.channel import open_channel
from rpc.errors import from_rpc_error
from rpc.server import ServerConfig
from tests.integration.router_harness import MODEL, router_config, running_router

ALICE, BOB, REVOKED = new_key(), new_key(), new_key()
BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4}
SERVING = health_pb2.HealthCheckResponse.SERVING
WRONG = ["", "Bearer", "Bearer sk-diptych-no", f"Basic {ALICE}", f"Bearer {REVOKED}", f"Bearer {hash_of(ALICE)}"]


def key_file(folder, *more):
    entries = [
        {"name": "alice", "hash": hash_of(ALICE), "tokens_per_minute": 10_000_000},
        {"name": "carol", "hash": hash_of(REVOKED), "disabled": True},
        *more,
    ]
    path = folder / "keys.json"
    fresh = folder / "keys.fresh"
    fresh.write_text(json.dumps({"keys": entries}))
    fresh.replace(path)
    return path


@pytest.fixture
async def served(tmp_path):
    access = AccessConfig(api_keys=key_file(tmp_path), workers=ServerConfig(port=0))
    async with running_router(router_config(tmp_path, access=access)) as running:
        await running.cluster.pools(1, 1)
        yield running


def client(running, key: str) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, http_client=http)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_the_official_client_gets_in_with_a_key_and_an_authentication_error_without(served):
    async with client(served, ALICE) as mine:
        assert (await mine.completions.create(**BODY)).usage.completion_tokens == 4
        assert [model.id async for model in await mine.models.list()] == [MODEL]
    async with client(served, "sk-diptych-wrong") as wrong:
        with pytest.raises(openai.AuthenticationError) as caught:
            await wrong.completions.create(**BODY)
    assert caught.value.code == "invalid_api_key"
    assert caught.value.type == "invalid_request_error"
    assert "sk-diptych-wrong" not in str(caught.value)


@pytest.mark.parametrize("authorization", WRONG, ids=["none", "no key", "unknown", "basic", "revoked", "hash"])
async def test_no_path_but_the_named_ones_is_open(served, authorization):
    headers = {"Authorization": authorization} if authorization else {}
    for method, path in [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/no/such/path"),
        ("GET", "/health/"),
        ("GET", "/v1/%2e%2e/health"),
    ]:
        response = await served.http.request(method, path, headers=headers, json=BODY)
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert (await served.http.get("/health", headers=headers)).status_code == 200
    assert (await served.http.get("/version", headers=headers)).status_code == 200
    assert (await served.http.get("/metrics", headers=headers)).status_code == 200
    assert await served.metric("diptych_api_key_refusals_total", door="http") == 7


async def test_a_refusal_is_heard_by_a_client_that_sends_a_large_prompt(served):
    response = await served.http.post("/v1/completions", json={**BODY, "prompt": "x" * 900_000})
    assert response.status_code == 401


async def test_metrics_ask_for_a_key_where_they_are_protected(tmp_path):
    access = AccessConfig(api_keys=key_file(tmp_path), protect_metrics=True)
    async with running_router(router_config(tmp_path, access=access)) as running:
        assert (await running.http.get("/metrics")).status_code == 401
        assert (await running.http.get("/metrics", headers=bearer(ALICE))).status_code == 200
        assert (await running.http.get("/version")).status_code == 200


def generate() -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=types_pb2.SamplingParams(max_tokens=4))


async def code_of(call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    if caught.value.code() is grpc.StatusCode.UNAUTHENTICATED:
        assert type(from_rpc_error(caught.value, "router")) is Unauthenticated
    return caught.value.code()


async def first(stream):
    async for message in stream:
        return message
    return None


async def test_grpc_calls_need_a_key_and_health_does_not(served):
    async with open_channel(served.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        key = (("authorization", f"Bearer {ALICE}"),)
        assert sum([len(r.token_ids) async for r in stub.Generate(generate(), metadata=key)]) == 4
        assert (await stub.ListModels(pb.ListModelsRequest(), metadata=key)).models[0].name == MODEL
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="*")
        services = await first(reflection.ServerReflectionInfo(iter([listing]), metadata=key))
        assert "diptych.v1.Inference" in str(services)
        assert "diptych.v1.Registry" not in str(services)
        for authorization in WRONG:
            wrong = (("authorization", authorization),) if authorization else ()
            refused = [
                first(stub.Generate(generate(), metadata=wrong)),
                stub.ListModels(pb.ListModelsRequest(), metadata=wrong),
                first(reflection.ServerReflectionInfo(iter([listing]), metadata=wrong)),
            ]
            codes = [await code_of(call) for call in refused]
            assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 3
        assert await served.metric("diptych_api_key_refusals_total", door="grpc") == 3 * len(WRONG)
        health = health_pb2_grpc.HealthStub(channel)
        async with asyncio.timeout(5):  # it says what the router's housekeeping found last
            while (await health.Check(health_pb2.HealthCheckRequest())).status != SERVING:
                await asyncio.sleep(0.05)


async def test_a_call_without_a_key_is_answered_before_it_sends_anything(served):
    async with open_channel(served.target) as channel:
        never = asyncio.Event()

        async def silent():
            await never.wait()
            yield reflection_pb2.ServerReflectionRequest()

        async with asyncio.timeout(5):
            stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(silent())
            assert await code_of(first(stream)) is grpc.StatusCode.UNAUTHENTICATED


async def test_users_cannot_announce_workers(served):
    """With a user's key as little as without one: the registry is not at their port."""
    async with open_channel(served.target) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        for metadata in ((), (("authorization", f"Bearer {ALICE}"),)):
            assert await code_of(stub.Announce(registry_pb2.AnnounceRequest(), metadata=metadata)) in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.UNIMPLEMENTED,
            )
            assert await code_of(stub.Leave(registry_pb2.LeaveRequest(), metadata=metadata)) in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.UNIMPLEMENTED,
            )
    async with open_channel(f"127.0.0.1:{served.ports.workers}") as channel:
        call = inference_pb2_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest())
        assert await code_of(call) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_worker_that_knocks_at_the_users_port_is_told_where_to_go(served):
    """Not to bring a key: there is none for workers."""
    worker = served.cluster.workers[0]
    for address in (served.target, worker.info.address):
        registry = GrpcRegistryClient(address)
        for word in (registry.announce(worker.info, WorkerLoad()), registry.leave(worker.info.ref)):
            with pytest.raises(Unavailable, match=r"no workers are taken at this port .*--worker-port"):
                await word
        await registry.close()


@pytest.mark.parametrize(
    ("host", "keys", "said"), [("0.0.0.0", False, 1), ("0.0.0.0", True, 0), ("127.0.0.1", False, 0)]
)
async def test_a_router_that_asks_nobody_who_he_is_says_so(tmp_path, caplog, host, keys, said):
    access = AccessConfig(api_keys=key_file(tmp_path) if keys else None)
    grpc_door, http_door = ServerConfig(host=host, port=0), HttpConfig(host=host, port=0)
    async with running_router(router_config(tmp_path, access=access, grpc=grpc_door, http=http_door)):
        pass
    assert caplog.text.count("whoever reaches this router may use it") == said


async def test_both_doors_say_whose_request_it_is_and_so_does_the_log(served, monkeypatch, caplog):
    seen = []
    answer = Inference.answer

    def noting(self, ask, *others):
        seen.append((ask.caller.name, ask.caller.tokens_per_minute))
        return answer(self, ask, *others)

    monkeypatch.setattr(Inference, "answer", noting)
    caplog.set_level(logging.DEBUG)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", chat)):
        response = await served.http.post(path, json=body, headers=bearer(ALICE))
        assert response.status_code == 200, response.text
    async with open_channel(served.target) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            generate(), metadata=(("authorization", f"Bearer {ALICE}"),)
        )
        assert [r async for r in call]
    assert seen == [("alice", 10_000_000)] * 3
    formatter = LineFormatter("router")
    lines = [formatter.format(record) for record in caplog.records if record.getMessage() == "request"]
    assert [" caller=alice " in line for line in lines] == [True] * 3
    assert not [record for record in caplog.records if ALICE in formatter.format(record)]


async def test_keys_come_and_go_without_a_restart(served, tmp_path):
    async def status(key: str) -> int:
        return (await served.http.get("/v1/models", headers=bearer(key))).status_code

    assert await status(BOB) == 401
    key_file(tmp_path, {"name": "bob", "hash": hash_of(BOB)})
    async with asyncio.timeout(5):
        while await status(BOB) != 200:
            await asyncio.sleep(0.05)
    (tmp_path / "keys.json").write_text("{")
    os.utime(tmp_path / "keys.json", ns=(1, 1))
    await asyncio.sleep(0.6)
    assert await status(BOB) == 200, "a file that cannot be used takes no key away"
    key_file(tmp_path)
    async with asyncio.timeout(5):
        while await status(BOB) != 401:
            await asyncio.sleep(0.05)
    assert await status(ALICE) == 200
