"""The OpenAI door over real HTTP: bodies, streams, refusals, and clients that leave."""

import asyncio

import openai
import pytest

from contracts.errors import InvalidRequest
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from router.config import AdmissionConfig, HttpConfig
from tests.integration.router_harness import MODEL, events, router_config, running_router
from tests.integration.scripted_workers import PREFILL_STAGES, answer, says

PROMPT = [5, 6, 7]
BASE = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "seed": 3}


def expected(max_tokens=8, seed=3, prompt=PROMPT):
    return answer(GenerationRequest("x", tuple(prompt), SamplingParams(max_tokens=max_tokens, seed=seed)))


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 1)
        yield running


@pytest.mark.parametrize("route", ["disaggregated", "colocated"])
async def test_a_completion(served, route):
    body = {**BASE, "return_token_ids": True, "diptych": {"route": route, "stages": True}}
    response = await served.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"] == "mine-1"
    got = response.json()
    choice = got["choices"][0]
    assert choice["token_ids"] == expected()
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == served.text(expected())
    assert choice["finish_reason"] == "length"
    assert got["usage"]["prompt_tokens"] == 3
    assert got["usage"]["completion_tokens"] == 8
    assert got["diptych"]["route"] == route
    assert (got["diptych"]["handoff"] is not None) == (route == "disaggregated")
    if route == "disaggregated":
        assert got["diptych"]["handoff"]["kv_bytes"] == 4096
        assert got["diptych"]["stages"]["prefill_compute_s"] == PREFILL_STAGES.prefill_compute_s
        assert got["diptych"]["stages"]["first_step_s"] > 0


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
async def test_a_stream(served, kind):
    body = {**BASE, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    if kind == "chat/completions":
        body |= {"messages": [{"role": "user", "content": "hi"}]}
        del body["prompt"]
    served.cluster.num_cached_tokens = 2
    got = events((await served.http.post(f"/v1/{kind}", json=body)).text)
    assert got[-1] == "[DONE]"
    usage = got[-2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    chunks = got[:-2]
    assert all(c["usage"] is None for c in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({c["id"] for c in got[:-1]}) == 1
    if kind == "chat/completions":
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        prompt = served.ids("user: hi\nassistant:")
        assert chunks[0]["prompt_token_ids"] == prompt
        text = "".join(c["choices"][0]["delta"]["content"] for c in chunks)
    else:
        prompt = PROMPT
        text = "".join(c["choices"][0]["text"] for c in chunks)
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == expected(prompt=prompt)
    assert text == served.text(expected(prompt=prompt))


async def test_text_that_spans_tokens_and_stop_strings(served):
    ids = served.ids("Say 🙂日本 and STOP here")
    served.cluster.script = says(ids)
    pieces = []
    body = {**BASE, "max_tokens": 50, "stop": ["nope", "STOP"], "stream": True}
    for event in events((await served.http.post("/v1/completions", json=body)).text)[:-1]:
        pieces.append(event["choices"][0])
    assert "".join(p["text"] for p in pieces) == "Say 🙂日本 and "
    assert not any("\ufffd" in p["text"] for p in pieces)
    assert pieces[-1]["finish_reason"] == "stop"
    assert pieces[-1]["stop_reason"] == "STOP"
    await served.cluster.idle()


async def test_end_of_text_and_special_tokens(served):
    ids = served.ids("the end")
    served.cluster.script = says(ids)
    got = (await served.http.post("/v1/completions", json={**BASE, "max_tokens": 50, "return_token_ids": True})).json()
    choice = got["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the end", "stop", None)
    assert choice["token_ids"] == [*ids, 1]
    served.cluster.script = says([])  # the first token is the end: no hand-off
    got = (await served.http.post("/v1/completions", json=BASE)).json()
    assert (got["choices"][0]["text"], got["choices"][0]["finish_reason"]) == ("", "stop")
    assert got["usage"]["completion_tokens"] == 1


async def test_logprobs(served):
    ids = served.ids("a é")
    served.cluster.script = says(ids)
    body = {**BASE, "max_tokens": len(ids), "logprobs": 2, "prompt_logprobs": 1}
    choice = (await served.http.post("/v1/completions", json=body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(ids)
    assert logprobs["text_offset"][0] == 0
    assert logprobs["tokens"][0] == served.text(ids[:1])
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(PROMPT[1])]["rank"] == 2
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": len(ids), "seed": 1}
    body = {**chat, "logprobs": True, "top_logprobs": 2, "stream": True}
    content = [
        entry
        for event in events((await served.http.post("/v1/chat/completions", json=body)).text)[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "a é"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_the_official_client(served):
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    async with client:
        assert [m.id async for m in client.models.list()] == [MODEL]
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": "be"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            max_completion_tokens=5,
            seed=9,
            stream=True,
            stream_options={"include_usage": True},
            user="me",
            extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 5
        whole = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
            max_tokens=5,
            seed=9,
        )
        assert whole.choices[0].message.content == "".join(
            c.choices[0].delta.content or "" for c in chunks if c.choices
        )
        text = await client.completions.create(model=MODEL, prompt=["Once upon"], max_tokens=3, logprobs=1)
        assert len(text.choices[0].logprobs.tokens) == 3
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-9", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt="x", best_of=2)
        assert refused.value.param == "best_of"


BAD = [
    ({"prompt": "word " * 2000}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [5, 1024]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [10**30]}, 400, "prompt"),
    ({"prompt": 7}, 400, "prompt"),
    ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ["a"] * 129}, 400, "prompt"),
    ({"prompt": [5, 6], "max_tokens": 1023}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -5}, 400, "max_tokens"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"max_tokens": 5.5}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"min_tokens": 9}, 400, "min_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5000": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"stop": [1]}, 400, "stop.0"),
    ({"stop_token_ids": [5000]}, 400, "stop_token_ids"),
    ({"seed": 2**63}, 400, "seed"),
    ({"seed": 2**70}, 400, "seed"),
    ({"priority": 2**40}, 400, "priority"),
    ({"top_k": 2**40}, 400, "top_k"),
    ({"request_id": "x" * 200}, 400, "request_id"),
    ({"model": "other"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"n": 0}, 400, "n"),
    ({"n": -1}, 400, "n"),
    ({"n": 129}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"n": "2"}, 400, "n"),
    ({"best_of": 2}, 400, "best_of"),
    ({"echo": 1}, 400, "echo"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, 400, "prompt_logprobs"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 1}, 400, "min_tokens"),
    ({"echo": True, "max_tokens": 0, "prompt": [5] * 1024}, 400, "prompt"),
    ({"echo": True, "max_tokens": -1}, 400, "max_tokens"),
    ({"echo": True, "prompt": [-1]}, 400, "prompt"),
    ({"suffix": "end"}, 400, "suffix"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usag": True}}, 400, "stream_options.include_usag"),
    ({"diptych": {"route": "sideways"}}, 400, "diptych.route"),
    ({"tempreature": 1}, 400, "tempreature"),
]


async def test_bad_completions_are_refused_by_name(served):
    for change, status, param in BAD:
        response = await served.http.post("/v1/completions", json={**BASE, **change})
        error = response.json().get("error", {})
        assert (response.status_code, error.get("param")) == (status, param), (change, response.text)
        assert param.split(".")[-1] in error["message"], error
        assert error["type"] == "invalid_request_error"
    assert (await served.http.post("/v1/completions", json=BASE)).status_code == 200
    assert not any(worker.running for worker in served.cluster.workers)


BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"prompt": "x"}, "prompt"),
]


async def test_bad_chats_are_refused_by_name(served):
    for change, param in BAD_CHATS:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **change}
        response = await served.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, (change, response.text)
        assert (response.json()["error"]["param"] or "").startswith(param), (change, response.text)


async def test_the_error_for_a_long_prompt_has_both_numbers(served):
    response = await served.http.post("/v1/completions", json={**BASE, "prompt": [5] * 1024})
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1024 tokens" in error["message"]
    assert "1023" in error["message"]


BAD_BODIES = [
    (b"{", "application/json", 400),
    (b"", "application/json", 400),
    (b"[]", "application/json", 400),
    (b'{"model": "tiny", "prompt": "\xff\xfe"}', "application/json", 400),
    (b'{"model": "tiny", "prompt": "\\ud800"}', "application/json", 400),
    (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "application/json", 400),
    (b'{"model": "tiny", "prompt": "x", "temperature": Infinity}', "application/json", 400),
    (b'{"model": "tiny", "prompt": "x", "temperature": 1e999}', "application/json", 400),
    (b"[" * 100_000, "application/json", 400),
    (b'{"prompt": "x"}', "text/plain", 415),
    (b'{"prompt": "x"}', "application/x-www-form-urlencoded", 415),
    (b'{"prompt": "x"}', "application/json; charset=utf-8", 200),
]


async def test_bad_bodies(served):
    for content, content_type, status in BAD_BODIES:
        headers = {"Content-Type": content_type}
        response = await served.http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == status, (content[:80], response.text)
        assert status == 200 or response.json()["error"]["message"]


async def test_bodies_over_the_limit(tmp_path):
    async def chunks():
        for _ in range(10):
            yield b"x" * 300

    async with running_router(router_config(tmp_path, http=HttpConfig(port=0, max_body_bytes=2000))) as running:
        for content in (b"x" * 2001, b"x" * 7000, chunks()):
            headers = {"Content-Type": "application/json"}
            response = await running.http.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert "2000" in response.json()["error"]["message"]


async def test_lengths_that_nobody_asked_for(served):
    prefill = served.cluster.workers[0]
    for prompt, max_tokens in (([5] * 10, 16), ([5] * 1020, 4), ([5] * 1023, 1)):
        body = {"model": MODEL, "prompt": prompt}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        assert prefill.seen[-1].sampling.max_tokens == max_tokens
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    await served.http.post("/v1/chat/completions", json={**chat, "max_completion_tokens": 3, "max_tokens": 9})
    assert prefill.seen[-1].sampling.max_tokens == 3
    await served.http.post("/v1/chat/completions", json=chat)
    num_prompt = len(prefill.seen[-1].prompt_token_ids)
    assert prefill.seen[-1].sampling.max_tokens == 1024 - num_prompt


async def test_names_and_traces_are_passed_on(served):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for headers, body_id, name, passed in (
        ({"X-Request-Id": "head", "traceparent": trace}, "body", "head", trace),
        ({"traceparent": "nonsense"}, "body", "body", ""),
        ({"traceparent": "ff" + trace[2:]}, "body", "body", ""),
        ({"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}, "body", "body", ""),
        ({"traceparent": f"{trace[:36]}{'0' * 16}-01"}, "body", "body", ""),
    ):
        response = await served.http.post("/v1/completions", json={**BASE, "request_id": body_id}, headers=headers)
        assert response.headers["x-request-id"] == name
        assert response.json()["id"] == f"cmpl-{name}"
        assert served.cluster.workers[0].seen[-1].traceparent == passed


async def test_other_paths_and_methods(served):
    assert (await served.http.get("/nothing")).status_code == 404
    response = await served.http.get("/v1/completions")
    assert response.status_code == 405
    assert "error" in response.json()
    assert (await served.http.get("/v1/models/tiny")).json()["max_model_len"] == 1024
    assert (await served.http.get("/v1/models/other")).status_code == 404
    assert (await served.http.get("/version")).json()["version"]
    bad = await served.http.post("/v1/completions", json=BASE, headers={"X-Request-Id": "x" * 200})
    assert bad.status_code == 400


async def test_health_says_what_is_missing(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        response = await running.http.get("/health")
        assert response.status_code == 503
        assert response.json()["missing"] == ["no prefill worker is ready", "no decode worker is ready"]
        refused = await running.http.post("/v1/completions", json=BASE)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "no decode worker is ready"
        await running.cluster.pools(0, 1)
        response = await running.http.get("/health")
        assert (response.status_code, response.json()["missing"]) == (200, ["no prefill worker is ready"])
        assert (await running.http.post("/v1/completions", json=BASE)).status_code == 200
        forced = await running.http.post("/v1/completions", json={**BASE, "diptych": {"route": "disaggregated"}})
        assert forced.status_code == 503


@pytest.mark.parametrize("route", ["disaggregated", "colocated"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_both_legs(served, route, stream):
    served.cluster.step_s = 0.02
    body = {**BASE, "max_tokens": 900, "stream": stream, "diptych": {"route": route}}
    _prefill, decode = served.cluster.workers

    async def ask() -> None:
        async with served.http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                pass

    task = asyncio.create_task(ask())
    async with asyncio.timeout(5):
        while not decode.running:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait((task,))
    await served.cluster.idle(timeout_s=3.0)
    assert len(decode.cancelled) == 1
    assert await served.metric("diptych_requests_total", outcome="CANCELLED") == 1


async def test_a_client_that_leaves_during_prefill(served):
    prefill, decode = served.cluster.workers
    prefill.faults.hold.clear()
    task = asyncio.create_task(served.http.post("/v1/completions", json=BASE))
    async with asyncio.timeout(5):
        while not prefill.running:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait((task,))
    await served.cluster.idle(timeout_s=3.0)
    assert len(prefill.cancelled) == 1
    async with asyncio.timeout(3):
        while not decode.cancelled:
            await asyncio.sleep(0.01)


async def test_overload_is_429_with_a_time_to_come_back(tmp_path):
    config = router_config(tmp_path, admission=AdmissionConfig(max_running=1, max_waiting=1))
    async with running_router(config) as running:
        prefill, _ = await running.cluster.pools(1, 1)
        prefill[0].faults.hold.clear()
        waiting = [asyncio.create_task(running.http.post("/v1/completions", json=BASE)) for _ in range(2)]
        async with asyncio.timeout(5):
            while await running.metric("diptych_requests_waiting") != 1:
                await asyncio.sleep(0.01)
        refused = await running.http.post("/v1/completions", json=BASE)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        prefill[0].faults.hold.set()
        assert [r.status_code for r in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_deadline_is_408_and_after_the_first_byte_a_last_event(tmp_path):
    async with running_router(router_config(tmp_path, request_timeout_s=0.8)) as running:
        _prefill, decode = await running.cluster.pools(1, 1)
        decode[0].faults.hold.clear()
        whole = await running.http.post("/v1/completions", json=BASE)
        assert (whole.status_code, whole.json()["error"]["type"]) == (408, "timeout_error")
        got = events((await running.http.post("/v1/completions", json={**BASE, "stream": True})).text)
        assert got[0]["choices"][0]["text"] == running.text(expected()[:1])
        assert got[-2]["error"]["code"] == "request_timeout"
        assert got[-1] == "[DONE]"
        await running.cluster.idle()


@pytest.mark.parametrize("route", ["disaggregated", "colocated"])
async def test_a_workers_refusal_reaches_the_client(served, route):
    for worker in served.cluster.workers:
        worker.faults.refuse.append(InvalidRequest("prompt", "9 tokens", "at most 8 fit the KV pool"))
    response = await served.http.post("/v1/completions", json={**BASE, "diptych": {"route": route}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert response.json()["error"]["message"] == "prompt: got '9 tokens', at most 8 fit the KV pool"


async def test_metrics_have_both_families_of_names(served):
    for _ in range(2):
        assert (await served.http.post("/v1/completions", json=BASE)).status_code == 200
    assert await served.metric("diptych_requests_total", outcome="length", route="disaggregated") == 2
    assert await served.metric("vllm:request_success_total", finished_reason="length") == 2
    assert await served.metric("vllm:time_to_first_token_seconds_count") == 2
    assert await served.metric("diptych_itl_seconds_count") == 14
    assert await served.metric("diptych_handoff_kv_bytes_total", connector="local") == 8192
    assert await served.metric("diptych_stage_seconds_count", stage="prefill_compute") == 2
    assert await served.metric("diptych_workers", pool="decode", state="ready") == 1
    assert await served.metric("vllm:num_requests_running") == 0
