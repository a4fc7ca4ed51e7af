"""The OpenAI door as the official Python client uses it: its types, its streams, its errors."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest

from contracts.errors import InvalidRequest
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerKind
from router.config import AdmissionConfig
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.scripted_workers import answer, says

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 1)
        yield running


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def alone(prompt, max_tokens=5, seed=3):
    return answer(GenerationRequest("x", tuple(prompt), SamplingParams(max_tokens=max_tokens, seed=seed)))


async def test_the_sync_client(served):
    def talk():
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).owned_by == "diptych"
            raw = client.chat.completions.with_raw_response.create(
                model=MODEL, messages=CHAT, max_tokens=9, seed=1, extra_headers={"X-Request-Id": "mine"}
            )
            assert raw.headers["x-request-id"] == raw.request_id == "mine"
            whole = raw.parse()
            assert whole._request_id == "mine"
            with client.chat.completions.stream(model=MODEL, messages=CHAT, max_tokens=9, seed=1) as stream:
                kinds = [event.type for event in stream]
                streamed = stream.get_final_completion()
            assert {"chunk", "content.delta", "content.done"} <= set(kinds)
            assert streamed.choices[0].message.content == whole.choices[0].message.content
            assert streamed.choices[0].finish_reason == "stop"
            with client.completions.with_streaming_response.create(model=MODEL, prompt="a", max_tokens=2) as response:
                assert response.status_code == 200
            return whole

    served.cluster.script = says(served.ids("hello"))
    whole = await asyncio.to_thread(talk)
    assert (whole.object, whole.model, whole.choices[0].message.role) == ("chat.completion", MODEL, "assistant")
    assert whole.system_fingerprint.startswith("fp_")


async def test_what_the_client_sends_back_of_an_answer_is_taken(client):
    first = await client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3)
    messages = [*CHAT, first.choices[0].message, {"role": "user", "content": "more"}]
    again = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3)
    assert again.usage.prompt_tokens > first.usage.prompt_tokens
    plain = [*CHAT, first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    await client.chat.completions.create(model=MODEL, messages=plain, max_tokens=3)


@pytest.mark.parametrize("form", ["text", "texts", "tokens", "lists of tokens"])
async def test_every_form_of_a_prompt(served, client, form):
    texts = ["one", "two words", "three"]
    ids = [served.ids(text) for text in texts]
    several = form in ("texts", "lists of tokens")
    given = {"text": texts[0], "texts": texts, "tokens": ids[0], "lists of tokens": ids}[form]
    got = await client.completions.create(
        model=MODEL, prompt=given, max_tokens=5, seed=3, extra_body={"return_token_ids": True}
    )
    expected = ids if several else ids[:1]
    assert [choice.index for choice in got.choices] == list(range(len(expected)))
    assert [choice.prompt_token_ids for choice in got.choices] == expected
    assert [choice.token_ids for choice in got.choices] == [alone(prompt) for prompt in expected]
    assert got.usage.prompt_tokens == sum(map(len, expected))
    assert got.usage.completion_tokens == 5 * len(expected)


async def test_answers_to_several_prompts_are_what_each_prompt_has_alone(served, client):
    prompts = [served.ids("one"), served.ids("two words")]
    body = {"model": MODEL, "max_tokens": 4, "n": 2, "seed": 9, "logprobs": 1, "echo": True}
    extra = {"return_token_ids": True, "prompt_logprobs": 1}
    together = await client.completions.create(prompt=prompts, extra_body=extra, **body)
    apart = [await client.completions.create(prompt=prompt, extra_body=extra, **body) for prompt in prompts]
    wanted = [choice for one in apart for choice in one.choices]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    for mine, other in zip(together.choices, wanted, strict=True):
        assert (mine.text, mine.token_ids) == (other.text, other.token_ids)
        assert (mine.logprobs, mine.prompt_token_ids) == (other.logprobs, other.prompt_token_ids)
        assert mine.prompt_logprobs == other.prompt_logprobs
    del extra["prompt_logprobs"]
    stream = await client.completions.create(
        prompt=prompts, stream=True, stream_options={"include_usage": True}, extra_body=extra, **body
    )
    texts, last = ["", "", "", ""], None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        last = chunk
    assert texts == [choice.text for choice in together.choices]
    assert last.usage.model_dump() == together.usage.model_dump()
    assert last.usage.prompt_tokens == sum(map(len, prompts))


async def test_without_a_seed_equal_prompts_have_answers_of_their_own(served, client):
    got = await client.completions.create(
        model=MODEL, prompt=["same"] * 8, max_tokens=4, extra_body={"return_token_ids": True}
    )
    assert len({tuple(choice.token_ids) for choice in got.choices}) > 1
    seeds = {request.sampling.seed for worker in served.cluster.workers for request in worker.seen}
    assert len(seeds) == 8


async def test_a_prompt_that_cannot_be_ends_the_request_by_its_place(served, client):
    for bad, field in [("word " * 2000, "prompt.1"), ([5000], "prompt.1"), ([-1], "prompt.1")]:
        prompts = ["fine", bad] if isinstance(bad, str) else [[5], bad]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt=prompts, max_tokens=4)
        assert caught.value.param == field, caught.value
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=[5000], max_tokens=4)
    assert caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=["a"] * 65, n=2, max_tokens=4)
    assert caught.value.param == "prompt"
    assert "128" in str(caught.value)
    await served.cluster.idle()


async def test_several_prompts_take_as_many_places(tmp_path):
    config = replace(router_config(tmp_path), admission=AdmissionConfig(max_running=4, max_waiting=0))
    async with running_router(config) as served:
        _, (worker,) = await served.cluster.pools(0, 1)
        worker.faults.hold.clear()
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            first = asyncio.create_task(client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=2))
            while len(worker.seen) < 2:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(model=MODEL, prompt="c", max_tokens=2)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.code == "overloaded"
            worker.faults.hold.set()
            assert len((await first).choices) == 4


async def test_the_clients_errors(served, client):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=CHAT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt="word " * 2000)
    assert long.value.code == "context_length_exceeded"
    asked = len(served.cluster.workers[0].seen)
    with pytest.raises(openai.APIStatusError) as late:
        served.cluster.workers[0].faults.hold.clear()
        patient = client.with_options(max_retries=2)
        await patient.completions.create(model=MODEL, prompt="x", extra_headers={"X-Request-Timeout": "0.2"})
    assert (late.value.status_code, late.value.code) == (408, "request_timeout")
    assert len(served.cluster.workers[0].seen) == asked + 1, "the client does not try again what it had no time for"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.post("/embeddings", body={}, cast_to=object)
    assert unknown.value.code == "not_found"
    with pytest.raises(openai.APIStatusError) as wrong:
        await client.get("/completions", cast_to=object)
    assert (wrong.value.status_code, wrong.value.code) == (405, "method_not_allowed")


async def test_every_answer_says_its_requests_name(served):
    paths = ["/health", "/ping", "/version", "/metrics", "/v1/models", "/v1/models/x", "/nowhere", "/v1/completions"]
    for path in paths:
        for given in ("mine-7", "", "x" * 200, "é"):
            headers = {"X-Request-Id": given.encode()} if given else {}
            response = await served.http.get(path, headers=headers)
            assert response.headers["x-request-id"] == given if given == "mine-7" else response.headers["x-request-id"]
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1})
    for status, content, kind in [
        (200, body, "application/json"),
        (400, "{", "application/json"),
        (415, "x", "text/plain"),
    ]:
        headers = {"X-Request-Id": "mine", "Content-Type": kind}
        response = await served.http.post("/v1/completions", content=content, headers=headers)
        assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")


async def test_the_end_of_text_is_no_stop_reason_unless_the_client_named_it(served, client):
    served.cluster.script = says(served.ids("the end"))
    for named, reason in (([], None), ([1], 1)):
        got = await client.completions.create(
            model=MODEL, prompt="x", max_tokens=50, extra_body={"stop_token_ids": named}
        )
        assert (got.choices[0].finish_reason, got.choices[0].stop_reason) == ("stop", reason)


@pytest.mark.parametrize("chat", [True, False])
async def test_usage_in_every_chunk_where_it_is_asked_for(served, client, chat):
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompt = {"messages": CHAT} if chat else {"prompt": "hi"}
    create = client.chat.completions.create if chat else client.completions.create
    usages = []
    async for chunk in await create(model=MODEL, max_tokens=6, n=2, stream=True, stream_options=options, **prompt):
        usages.append(chunk.usage)
    assert all(usage is not None for usage in usages)
    *running, last = usages
    assert max(usage.completion_tokens for usage in running) == 6
    assert {usage.prompt_tokens for usage in usages} == {last.prompt_tokens}
    assert last.completion_tokens == 12


async def test_a_prompt_is_cut_to_its_end_where_asked(served, client):
    ids = served.ids("one two three four")
    for prompt in ("one two three four", ids):
        got = await client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=2,
            echo=True,
            extra_body={"truncate_prompt_tokens": 2, "return_token_ids": True},
        )
        assert got.choices[0].prompt_token_ids == ids[-2:]
        assert got.choices[0].text.startswith(served.text(ids[-2:]))
    long = await client.completions.create(
        model=MODEL, prompt="word " * 2000, max_tokens=4, extra_body={"truncate_prompt_tokens": -1}
    )
    assert long.usage.total_tokens == served.card.max_model_len


async def test_stop_seed_and_both_bounds_of_a_chat(served, client):
    served.cluster.script = says(served.ids("one two STOP three"))
    got = await client.chat.completions.create(
        model=MODEL, messages=CHAT, stop=["STOP"], max_tokens=1, max_completion_tokens=40, seed=4, n=2
    )
    assert [choice.message.content for choice in got.choices] == ["one two ", "one two "]
    assert {choice.finish_reason for choice in got.choices} == {"stop"}
    assert {choice.stop_reason for choice in got.choices} == {"STOP"}


async def test_a_prompt_that_a_worker_refuses_ends_the_others(served, client):
    (decode,) = [worker for worker in served.cluster.workers if worker.kind is WorkerKind.DECODE]
    decode.faults.refuse = [InvalidRequest("prompt", "this one", "does not fit here")]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(
            model=MODEL, prompt=["a", "b", "c"], max_tokens=4, extra_body={"diptych": {"route": "colocated"}}
        )
    assert caught.value.param == "prompt"
    await served.cluster.idle()
    assert not decode.running


async def test_errors_name_fields_as_the_request_does(client):
    long = [{"role": "user", "content": "word " * 2000}]
    for asked, field in [
        ({"messages": long}, "messages"),
        ({"messages": CHAT, "max_tokens": 5000}, "max_tokens"),
        ({"messages": CHAT, "max_tokens": 4, "max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"messages": CHAT, "max_tokens": 4, "extra_body": {"min_tokens": 2**31}}, "min_tokens"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{"model": MODEL, **asked})
        assert caught.value.param == field
        assert caught.value.body["message"].startswith(f"{field}: ")
