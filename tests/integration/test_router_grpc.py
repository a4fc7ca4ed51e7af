"""The gRPC door for clients, and the registry's door for workers."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from contracts.errors import LayoutMismatch, StaleEpoch
from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, types_pb2
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerKind, WorkerLoad
from router.serving.answers import derived_seed
from rpc.announce import GrpcRegistryClient
from rpc.channel import open_channel
from rpc.errors import from_rpc_error
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.scripted_workers import answer, says

PROMPT = (5, 6, 7)
SAMPLING = types_pb2.SamplingParams(max_tokens=6, seed=3)
TOKENS = answer(GenerationRequest("x", PROMPT, SamplingParams(max_tokens=6, seed=3)))


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 1)
        yield running


@pytest.fixture
async def stub(served):
    async with open_channel(served.target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def request(**changes) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"token_ids": pb.TokenIds(ids=PROMPT), "sampling": SAMPLING, **changes})


@pytest.mark.parametrize("route", [pb.ROUTE_UNSPECIFIED, pb.ROUTE_DISAGGREGATED, pb.ROUTE_COLOCATED])
async def test_tokens_text_usage_stages(served, stub, route):
    got = [r async for r in stub.Generate(request(request_id="mine", route=route))]
    assert [i for r in got for i in r.token_ids] == TOKENS
    assert "".join(r.text for r in got) == served.text(TOKENS)
    assert {r.request_id for r in got} == {"mine"}
    last = got[-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 6)
    assert last.route == (route or pb.ROUTE_DISAGGREGATED)
    assert last.HasField("handoff") == (last.route == pb.ROUTE_DISAGGREGATED)
    assert last.stages.first_step_s > 0
    assert all(r.finish_reason == 0 for r in got[:-1])


async def test_text_and_chat_are_tokenised_here(served, stub):
    prompts = {
        "text": ("Emma was", served.ids("Emma was")),
        "chat": (pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]), served.ids("user: hi\nassistant:")),
    }
    for field, (value, ids) in prompts.items():
        call = stub.Generate(pb.GenerateRequest(**{field: value}, sampling=SAMPLING))
        last = [r async for r in call][-1]
        assert last.usage.prompt_tokens == len(ids)
        assert list(served.cluster.workers[0].seen[-1].prompt_token_ids) == ids


async def test_stop_strings_and_the_default_length(served, stub):
    served.cluster.script = says(served.ids("so STOP there"))
    got = [r async for r in stub.Generate(request(stop=["STOP"], sampling=types_pb2.SamplingParams(seed=1)))]
    assert "".join(r.text for r in got) == "so "
    assert (got[-1].finish_reason, got[-1].stop_string) == (types_pb2.FINISH_REASON_STOP, "STOP")
    assert served.cluster.workers[0].seen[-1].sampling.max_tokens == 1024 - len(PROMPT)


TURN = pb.ChatMessage(role="user", content="x")
BAD = [
    (pb.GenerateRequest(), "input"),
    (request(token_ids=pb.TokenIds()), "token_ids"),
    (pb.GenerateRequest(text=""), "text"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x " * 1024)])), "chat"),
    (request(token_ids=pb.TokenIds(ids=[5000])), "token_ids"),
    (request(token_ids=pb.TokenIds(ids=[5] * 1024)), "token_ids"),
    (request(sampling=types_pb2.SamplingParams(temperature=float("nan"))), "sampling.temperature"),
    (request(sampling=types_pb2.SamplingParams(temperature=-1)), "sampling.temperature"),
    (request(sampling=types_pb2.SamplingParams(max_tokens=0)), "sampling.max_tokens"),
    (request(sampling=types_pb2.SamplingParams(seed=2**64 - 1)), "sampling.seed"),
    (request(stop=["x"] * 17), "stop"),
    (request(n=0), "n"),
    (request(n=129), "n"),
    (pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="king")])), "chat.messages[0].role"),
    # Each of these would be looked at one by one, on the loop on which all wait.
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="king")] * 16385)), "chat.messages"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[TURN], tools_json=["{"] * 129)), "chat.tools_json"),
    (
        pb.GenerateRequest(
            chat=pb.Chat(messages=[TURN, pb.ChatMessage(tool_calls=[pb.ToolCall()] * 129, role="tool")])
        ),
        "chat.messages[1].tool_calls",
    ),
    (request(sampling=types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))), "sampling.logit_bias"),
]


async def test_what_cannot_be_served_names_its_field(served, stub):
    for bad, field in BAD:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in stub.Generate(bad)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (bad, caught.value)
        violation = error_details_pb2.BadRequest()
        assert any(
            d.Unpack(violation) for d in rpc_status.from_call(caught.value).details if d.Is(violation.DESCRIPTOR)
        )
        assert violation.field_violations[0].field == field, bad
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [r async for r in stub.Generate(request(model="other"))]
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_several_answers_are_told_apart_by_their_index(served, stub):
    got = [r async for r in stub.Generate(request(n=3))]
    for index in range(3):
        seed = derived_seed(3, index)
        expected = answer(GenerationRequest("x", PROMPT, SamplingParams(max_tokens=6, seed=seed)))
        mine = [r for r in got if r.index == index]
        assert [i for r in mine for i in r.token_ids] == expected
        assert "".join(r.text for r in mine) == served.text(expected)
        assert [r.finish_reason for r in mine] == [0] * (len(mine) - 1) + [types_pb2.FINISH_REASON_LENGTH]
        assert mine[-1].HasField("handoff")
    assert [r.HasField("usage") for r in got] == [False] * (len(got) - 1) + [True]
    assert (got[-1].usage.prompt_tokens, got[-1].usage.completion_tokens) == (3, 18)


async def test_models(stub):
    models = (await stub.ListModels(pb.ListModelsRequest())).models
    assert [(m.name, m.max_model_len) for m in models] == [(MODEL, 1024)]


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_client_that_leaves_frees_everything(served, stub, how):
    served.cluster.step_s = 0.02
    sampling = types_pb2.SamplingParams(max_tokens=900)
    call = stub.Generate(request(sampling=sampling), timeout=0.3 if how == "deadline" else None)
    if how == "cancel":
        await call.read()
        await call.read()
        call.cancel()
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in call]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await served.cluster.idle(timeout_s=3.0)


async def test_health_follows_the_decode_pool(tmp_path):
    async with running_router(router_config(tmp_path)) as running, open_channel(running.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service="diptych.v1.Inference")
        assert (await health.Check(ask)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await running.cluster.pools(1, 1)
        async with asyncio.timeout(3):
            while (await health.Check(ask)).status != health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.02)


async def test_a_worker_that_does_not_fit_is_told_why(served):
    info = served.cluster.workers[1].info
    client = GrpcRegistryClient(served.target)
    odd = replace(info, ref=replace(info.ref, worker_id="d9"))
    with pytest.raises(LayoutMismatch, match="dtype"):
        await client.announce(replace(odd, layout=replace(info.layout, dtype="bfloat16")), WorkerLoad())
    with pytest.raises(LayoutMismatch, match="model_name"):
        await client.announce(replace(odd, model_name="other"), WorkerLoad())
    with pytest.raises(StaleEpoch):
        await client.announce(replace(info, ref=replace(info.ref, epoch=0)), WorkerLoad())
    await client.close()


async def test_a_router_that_drains_ends_what_runs_and_refuses_the_rest(tmp_path):
    async with running_router(router_config(tmp_path)) as running, open_channel(running.target) as channel:
        prefill, _ = await running.cluster.pools(1, 1)
        stub = inference_pb2_grpc.InferenceStub(channel)
        prefill[0].faults.hold.clear()

        async def ask():
            return [i async for r in stub.Generate(request()) for i in r.token_ids]

        asking = asyncio.create_task(ask())
        async with asyncio.timeout(3):
            while not prefill[0].running:
                await asyncio.sleep(0.01)
        draining = asyncio.create_task(running.router.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        assert (await running.http.get("/health")).status_code == 503
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in stub.Generate(request())]
        assert "stopping" in from_rpc_error(caught.value, "router").message
        prefill[0].faults.hold.set()
        assert await asking == TOKENS
        await asyncio.wait_for(draining, 3)
    assert WorkerKind.PREFILL in {w.kind for w in running.cluster.workers}
