"""Echo: the prompt before the completion, its log-probabilities before those of the answer, in OpenAI's old form."""

import openai
import pytest

from tests.integration.pools import Setup
from tests.integration.router_harness import MODEL, events, router_config, running_router
from tests.integration.scripted_workers import says
from tests.integration.test_router_pools import FAKE, PROMPT, body, served, tokens


@pytest.fixture
async def scripted(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 1)
        yield running


async def complete(running, **changes):
    response = await running.http.post("/v1/completions", json={"model": MODEL, "seed": 3, "echo": True, **changes})
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(running, **changes):
    asked = {"model": MODEL, "seed": 3, "echo": True, "stream": True, **changes}
    return [e["choices"][0] for e in events((await running.http.post("/v1/completions", json=asked)).text)[:-1]]


def joined_logprobs(chunks):
    parts = [chunk["logprobs"] for chunk in chunks]
    return {key: [value for part in parts for value in part[key]] for key in parts[0]}


@pytest.mark.parametrize("form", ["text", "ids"])
async def test_the_prompt_comes_before_each_answer(scripted, form):
    prompt = "Emma, é 🙂"
    given = prompt if form == "text" else scripted.ids(prompt)
    scripted.cluster.script = says(scripted.ids(" was STOP"))
    got = await complete(scripted, prompt=given, max_tokens=50, n=2, stop="STOP")
    assert [c["text"] for c in got["choices"]] == [f"{prompt} was "] * 2
    assert got["usage"]["prompt_tokens"] == len(scripted.ids(prompt))
    chunks = await streamed(scripted, prompt=given, max_tokens=50, n=2, stop="STOP")
    for index in range(2):
        assert "".join(c["text"] for c in chunks if c["index"] == index) == f"{prompt} was "
    assert (await complete(scripted, prompt="Emma STOP", max_tokens=50, stop="STOP"))["choices"][0]["text"] == (
        "Emma STOP was "
    ), "a stop string is looked for in the answer only"


async def test_log_probabilities_begin_with_those_of_the_prompt(scripted):
    prompt, answer = scripted.ids("Emma was é"), scripted.ids(" so")
    scripted.cluster.script = says(answer)
    asked = {"prompt": prompt, "max_tokens": len(answer), "logprobs": 1}
    choice = (await complete(scripted, **asked))["choices"][0]
    got = choice["logprobs"]
    assert {len(values) for values in got.values()} == {len(prompt) + len(answer)}
    assert (got["token_logprobs"][0], got["top_logprobs"][0]) == (None, None)
    assert got["token_logprobs"][1:] == [-1.0] * (len(prompt) - 1) + [-0.5] * len(answer)
    assert got["text_offset"] == [sum(map(len, got["tokens"][:i])) for i in range(len(got["tokens"]))]
    assert "prompt_logprobs" not in choice
    chunks = await streamed(scripted, **asked)
    assert joined_logprobs(chunks) == got
    assert "".join(c["text"] for c in chunks) == choice["text"]
    both = (await complete(scripted, **asked, prompt_logprobs=1, n=2))["choices"]
    assert [c["logprobs"] for c in both] == [got, got]
    assert len(both[1]["prompt_logprobs"]) == len(prompt)


@pytest.mark.parametrize("eos", [False, True])
async def test_the_prompt_alone(scripted, eos):
    scripted.cluster.script = says([] if eos else scripted.ids("no"))
    prompt = scripted.ids("Emma was")
    got = await complete(scripted, prompt="Emma was", max_tokens=0, logprobs=0, return_token_ids=True)
    choice = got["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("Emma was", "length", [])
    assert choice["prompt_token_ids"] == prompt
    assert choice["logprobs"]["token_logprobs"] == [None] + [-1.0] * (len(prompt) - 1)
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (len(prompt), 0)
    chunks = await streamed(scripted, prompt="Emma was", max_tokens=0)
    assert [(c["text"], c["finish_reason"]) for c in chunks] == [("Emma was", "length")]
    prefill, decode = scripted.cluster.workers
    assert [r.sampling.max_tokens for r in prefill.seen] == [1, 1]
    assert not decode.running


async def test_the_official_client(scripted):
    client = openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    async with client:
        plain = await client.completions.create(model=MODEL, prompt="Once", max_tokens=3, seed=1)
        echoed = await client.completions.create(
            model=MODEL, prompt="Once", max_tokens=3, seed=1, echo=True, logprobs=2
        )
        assert echoed.choices[0].text == "Once" + plain.choices[0].text
        assert echoed.choices[0].logprobs.token_logprobs[0] is None
        assert len(echoed.choices[0].logprobs.tokens) == echoed.usage.total_tokens


async def test_both_ways_through_real_workers_are_one(tmp_path):
    async with served(tmp_path, Setup(model=FAKE, num_prefill=2, num_decode=2)) as (running, workers):
        plain = (await tokens(running))["choices"][0]
        got = {}
        for route in ("disaggregated", "colocated"):
            asked = body(echo=True, logprobs=2, n=3, temperature=1.0, diptych={"route": route})
            got[route] = (await running.http.post("/v1/completions", json=asked)).json()["choices"]
            alone = (await tokens(running, echo=True, max_tokens=0, diptych={"route": route}))["choices"][0]
            assert alone["text"] == running.text(PROMPT)
        assert got["disaggregated"] == got["colocated"]
        for choice in got["disaggregated"]:
            assert choice["text"].startswith(running.text(PROMPT))
            assert len(choice["logprobs"]["tokens"]) == len(PROMPT) + 24
        assert (await tokens(running, echo=True))["choices"][0]["token_ids"] == plain["token_ids"]
        await workers.idle()
