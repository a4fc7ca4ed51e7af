"""Bytes that no client library sends, on the OpenAI door: each gets an answer, and nothing of it reaches another."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from observability.metrics import RouterMetrics
from router.config import ChatConfig, HttpConfig
from router.health import HealthReport
from router.http.body import FrontLimits
from router.http.front import HttpFront
from router.http.protocol import MAX_HEAD_BYTES
from router.http.server import HttpServer
from router.openai.chat import ChatRules
from router.server import new_id
from router.service import Inference
from router.text.model_card import load_model_card
from tests.integration.router_harness import MODEL, TINY, router_config, running_router

BASE = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 8, "seed": 3}
PATH = "/v1/completions"


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 1)
        yield running


def message(body, *headers, length=None):
    length = len(body) if length is None else length
    lines = [
        f"POST {PATH} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


async def exchange(served, *pieces):
    """Send the pieces one by one; the whole answer, which the server must end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.ports.http)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


def parsed(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
async def test_an_upgrade_that_is_not_served_is_not_heard(served, upgrade):
    whole = message(json.dumps(BASE).encode(), "Connection: close, Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}")
    status, body = parsed(await exchange(served, whole))
    assert status == 200, body
    assert body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("line", ["X-Long: ", "X-Many: 1\r\n"])
async def test_a_head_that_does_not_end_is_refused(served, line):
    pieces = [f"POST {PATH} HTTP/1.1\r\n".encode(), *[(line * 2000).encode()] * 30]
    assert len(b"".join(pieces)) > MAX_HEAD_BYTES
    try:
        status, body = parsed(await exchange(served, *pieces))
    except ConnectionError:  # closed while we still wrote
        return
    assert status == 431
    assert str(MAX_HEAD_BYTES) in body["error"]["message"]


async def test_heads_are_counted_one_by_one(served):
    reader, writer = await asyncio.open_connection("127.0.0.1", served.ports.http)
    for number in range(4):
        writer.write(message(json.dumps(BASE).encode(), "X-Long: " + "x" * (MAX_HEAD_BYTES // 2)))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), (number, head)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split()[1]))
    writer.close()


@pytest.mark.parametrize("size", [10, 200_000], ids=["short", "longer than is held"])
@pytest.mark.parametrize("cut", [1, 0.5, 0.01], ids=["at once", "in two", "in a hundred"])
async def test_requests_that_follow_each_other_without_waiting_are_answered_in_their_order(served, size, cut):
    served.cluster.step_s = 0.005
    bodies = [json.dumps({**BASE, "max_tokens": n, "user": "x" * size}).encode() for n in (2, 3, 4)]
    sent = b"".join(message(body, *(["Connection: close"] if body is bodies[-1] else [])) for body in bodies)
    width = int(len(sent) * cut)
    answer = await exchange(served, *(sent[at : at + width] for at in range(0, len(sent), width)))
    whole = [json.loads(part[part.index(b"{") :]) for part in answer.replace(b"HTTP/1.1 200", b"\0").split(b"\0")[1:]]
    assert [one["usage"]["completion_tokens"] for one in whole] == [2, 3, 4]


@pytest.mark.parametrize("num_behind", [0, 1, 3])
async def test_who_leaves_with_requests_behind_the_one_that_is_answered_is_heard(served, num_behind):
    """Not by what is written to them: a whole answer would come after 18 s."""
    served.cluster.step_s = 0.02
    _, writer = await asyncio.open_connection("127.0.0.1", served.ports.http)
    request = message(json.dumps({**BASE, "max_tokens": 900}).encode())
    writer.write(request)
    async with asyncio.timeout(5):
        while not any(worker.running for worker in served.cluster.workers):
            await asyncio.sleep(0.01)
    writer.write(request * num_behind)
    await asyncio.sleep(0.1)  # it has arrived
    writer.close()
    await served.cluster.idle(timeout_s=3.0)
    assert (await served.http.post(PATH, json={**BASE, "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"BREW / HTTP/1.1\r\n\r\n", b"\x00" * 99])
async def test_what_is_not_http_is_told_so_in_our_form(served, junk):
    status, body = parsed(await exchange(served, junk))
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"


async def test_a_body_that_does_not_come_is_not_waited_for_for_ever(tmp_path):
    config = replace(router_config(tmp_path), request_timeout_s=0.2)
    async with running_router(config) as running:
        status, body = parsed(await exchange(running, message(b"{", length=100)))
        assert status == 408
        assert "0.2 s" in body["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"request_id": "a\r\nSet-Cookie: b"}, "request_id"),
        ({"request_id": "ä"}, "request_id"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"n": True}, "n"),
        ({"model": "m" * 1_000_000}, "model"),
        ({"f" * 1_000_000: 1}, "fff"),
        ({"a\nb": 1}, "a\\nb"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_refusal_is_short_and_harms_no_header(served, change, param):
    response = await served.http.post(PATH, json={**BASE, **change})
    error = response.json()["error"]
    assert response.status_code in (400, 404)
    assert param in error["param"]
    assert len(response.content) < 1000
    assert "set-cookie" not in response.headers


async def test_an_encoding_that_is_not_read_is_named(served):
    response = await served.http.post(PATH, json=BASE, headers={"Content-Encoding": "gzip"})
    assert response.status_code == 415
    assert "gzip" in response.json()["error"]["message"]


class Faulty(Inference):
    """A service with a bug outside of any answer."""

    def __init__(self, card):
        self.card = card

    def check_model(self, name):
        raise RuntimeError(f"a bug at {name}")

    def answer(self, ask, timeout_s):
        raise RuntimeError(f"a bug at {ask.request_id}")


async def test_a_fault_of_ours_is_an_error_body_too(caplog):
    metrics = RouterMetrics(MODEL, list, lambda: (0, 0))
    health = HealthReport("ok", {}, (), {}, ())
    card = load_model_card(TINY, MODEL)
    rules = ChatRules(card, ChatConfig())
    app = HttpFront(Faulty(card), lambda: health, metrics, FrontLimits(1000, 1.0), new_id, rules).app
    server = HttpServer(HttpConfig(port=0), app)
    port = server.bind()
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            framed, direct = await client.get("/v1/models/tiny"), await client.post("/v1/completions", json=BASE)
    finally:
        await server.stop(0.0)
    for response in (framed, direct):
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert response.headers["x-request-id"]
    assert sum("Exception in ASGI application" in line for line in caplog.messages) == 2, "and each is logged"
