"""A session stays on its workers, however the client names it and at whichever door."""

import pytest

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, types_pb2
from router.config import PolicyConfig
from rpc.channel import open_channel
from tests.integration.router_harness import MODEL, router_config, running_router

STICKY = PolicyConfig("session_affinity", "session_affinity")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path, policies=STICKY)) as running:
        await running.cluster.pools(3, 3)
        yield running


async def over_http(running, number, headers=None, **named):
    kind = {"prompt": [number + 2] * 3} if number % 2 else CHAT
    path = "/v1/completions" if number % 2 else "/v1/chat/completions"
    body = {"model": MODEL, "max_tokens": 3, "diptych": {"route": "disaggregated"}, **kind, **named}
    response = await running.http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text


async def over_grpc(running, number, session):
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[number + 2] * 3),
        sampling=types_pb2.SamplingParams(max_tokens=3),
        route=pb.ROUTE_DISAGGREGATED,
    )
    async with open_channel(running.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert [piece async for piece in stub.Generate(message, metadata=(("x-session-id", session),))]


WAYS = {
    "header": lambda running, n, session: over_http(running, n, {"X-Session-Id": session}, user=f"u{n}"),
    "prompt_cache_key": lambda running, n, session: over_http(running, n, prompt_cache_key=session, user=f"u{n}"),
    "user": lambda running, n, session: over_http(running, n, user=session),
    "metadata": over_grpc,
}


def places(running):
    """Each prefill worker that was asked, and each decode worker that was attached to."""
    workers = running.cluster.workers
    return {w.ref.worker_id for w in workers if w.seen or w.attached}


@pytest.mark.parametrize("way", WAYS)
async def test_a_session_stays_where_it_is(served, way):
    for number in range(8):
        await WAYS[way](served, number, "mine")
    assert len(places(served)) == 2, "one of each pool, whatever the prompts"
    for number in range(12):
        await WAYS[way](served, number, f"another {number}")
    assert len(places(served)) > 3, "others are elsewhere"


async def test_one_name_is_one_session_at_every_door(served):
    for number, way in enumerate(WAYS.values()):
        await way(served, number, "mine")
    assert len(places(served)) == 2
