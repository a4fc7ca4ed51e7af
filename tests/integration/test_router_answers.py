"""Several answers to one prompt: each what it would be alone, the prompt computed once, and nothing left behind."""

import asyncio
import contextlib

import openai
import pytest

from contracts.errors import InvalidRequest, TransferFailed
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerKind
from router.config import AdmissionConfig
from router.serving.answers import derived_seed
from tests.integration.pools import Setup
from tests.integration.router_harness import MODEL, events, router_config, running_router
from tests.integration.scripted_workers import answer
from tests.integration.test_router_pools import FAKE, PROMPT, body, served, tokens

BLOCK = FAKE.layout.block_size
TWO_EACH = Setup(model=FAKE, num_prefill=2, num_decode=2)
SHORT = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 12, "seed": 3, "n": 3, "return_token_ids": True}


def of_script(index):
    sampling = SamplingParams(max_tokens=12, seed=derived_seed(3, index))
    return answer(GenerationRequest("x", (5, 6, 7), sampling))


async def num_computed(pool):
    """Prompt tokens that the workers of a pool did not find in their prefix caches."""
    stats = [await worker.worker.driver.call(lambda engine: engine.stats()) for worker in pool]
    return sum(s.num_prefix_queried_tokens - s.num_prefix_hit_tokens for s in stats)


def sorted_ids(choices):
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["token_ids"] for choice in choices]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_way_to_ask_gives_the_same_answers(tmp_path, temperature):
    async with served(tmp_path, TWO_EACH) as (running, workers):
        asked = {"temperature": temperature, "n": 3}
        alone = [
            (await tokens(running, temperature=temperature, seed=derived_seed(7, i)))["choices"][0] for i in range(3)
        ]
        expected = [choice["token_ids"] for choice in alone]
        assert len({tuple(ids) for ids in expected}) == (1 if temperature == 0.0 else 3)
        for route in ("disaggregated", "colocated"):
            whole = await tokens(running, diptych={"route": route}, **asked)
            assert sorted_ids(whole["choices"]) == expected
            assert [c["text"] for c in whole["choices"]] == [c["text"] for c in alone]
            assert whole["usage"]["prompt_tokens"] == len(PROMPT)
            assert whole["usage"]["completion_tokens"] == 3 * 24
            stream = {"stream": True, "stream_options": {"include_usage": True}, "diptych": {"route": route}}
            got = events((await running.http.post("/v1/completions", json=body(**stream, **asked))).text)
            assert got[-1] == "[DONE]"
            assert got[-2]["usage"] == whole["usage"] | {"prompt_tokens_details": {"cached_tokens": 64}}
            for index, choice in enumerate(whole["choices"]):
                mine = [e["choices"][0] for e in got[:-2] if e["choices"][0]["index"] == index]
                assert [i for c in mine for i in c["token_ids"]] == choice["token_ids"]
                assert "".join(c["text"] for c in mine) == choice["text"]
                assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
        await workers.idle()


@pytest.mark.parametrize("num_prompt", [5, 64, 75, 80])
async def test_the_prompt_is_computed_once_and_its_blocks_are_shared(tmp_path, num_prompt):
    n, prompt = 6, PROMPT[:num_prompt]
    async with served(tmp_path, TWO_EACH) as (running, workers):
        got = await tokens(running, n=n, prompt=prompt, temperature=1.0, diptych={"stages": True})
        assert len({tuple(ids) for ids in sorted_ids(got["choices"])}) == n
        assert await num_computed(workers.prefill) <= num_prompt + (n - 1) * BLOCK
        assert await num_computed(workers.decode) <= num_prompt + (n - 1) * BLOCK
        accounts = [choice["diptych"]["handoff"] for choice in got["choices"]]
        assert got["diptych"]["handoff"] == accounts[0]
        assert sum(account["num_blocks"] for account in accounts) <= -(-num_prompt // BLOCK) + n - 1
        assert await running.metric("diptych_handoffs_total", connector="local") == n
        assert await running.metric("diptych_prompt_tokens_total") == num_prompt
        assert await running.metric("diptych_generated_tokens_total") == n * 24
        await workers.idle()


async def test_alone_on_a_decode_worker_the_prompt_is_computed_once_too(tmp_path):
    async with served(tmp_path, TWO_EACH) as (running, workers):
        await tokens(running, n=5, temperature=1.0, diptych={"route": "colocated"})
        assert await num_computed(workers.decode) <= len(PROMPT) + 4 * BLOCK
        assert await num_computed(workers.prefill) == 0
        await workers.idle()


async def test_the_others_start_at_the_commit_and_not_before(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        (prefill,), (decode,) = await running.cluster.pools(1, 1)
        decode.faults.hold.clear()  # no second token until the test says so
        prefill.faults.hold.clear()
        asking = asyncio.create_task(running.http.post("/v1/completions", json=SHORT))
        async with asyncio.timeout(5):
            while not prefill.running:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            assert len(prefill.seen) == 1
            prefill.faults.hold.set()
            while len(prefill.seen) < 3:
                await asyncio.sleep(0.005)
        decode.faults.hold.set()
        assert sorted_ids((await asking).json()["choices"]) == [of_script(i) for i in range(3)]
        await running.cluster.idle()


async def test_a_client_that_leaves_frees_both_pools(tmp_path):
    async with served(tmp_path, Setup(model=FAKE, step_s=0.01)) as (running, workers):
        asked = body(max_tokens=400, stream=True, n=4)
        async with running.http.stream("POST", "/v1/completions", json=asked) as response:
            seen = set()
            async for line in response.aiter_lines():
                if line:
                    seen |= {c["index"] for e in events(line + "\n\n") for c in e["choices"]}
                if len(seen) == 4:
                    break
        await workers.idle()
        assert await running.metric("diptych_requests_running") == 0


async def test_a_decode_worker_that_stops_mid_answer(tmp_path):
    async with served(tmp_path, Setup(model=FAKE, num_decode=2, step_s=0.02)) as (running, workers):
        expected = sorted_ids((await tokens(running, n=3, temperature=1.0))["choices"])
        asking = asyncio.create_task(tokens(running, n=3, temperature=1.0))
        async with asyncio.timeout(10):
            while max(w.worker.load().num_running for w in workers.decode) < 3:
                await asyncio.sleep(0.01)
        await max(workers.decode, key=lambda w: w.worker.load().num_running).server.stop(0)
        assert sorted_ids((await asking)["choices"]) == expected


async def test_more_answers_than_the_pools_hold_at_once(tmp_path):
    async with served(tmp_path, Setup(model=FAKE, decode_blocks=24, prefill_blocks=16)) as (running, workers):
        got = await tokens(running, n=20, temperature=1.0)
        alone = await tokens(running, temperature=1.0, seed=derived_seed(7, 19))
        assert got["choices"][19]["token_ids"] == alone["choices"][0]["token_ids"]
        assert got["usage"]["completion_tokens"] == 20 * 24
        await workers.idle()


@pytest.fixture
async def scripted(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(2, 2)
        yield running


@pytest.mark.parametrize(
    "fault", [("die_before_first", 1), ("die_after_first", 1), ("die_after_tokens", 3), ("skip_a_token", 1), None]
)
async def test_what_breaks_costs_only_time(scripted, fault):
    for worker in scripted.cluster.workers:
        if fault is None:
            worker.faults.handoff_failures.append(TransferFailed("lost"))
        else:
            setattr(worker.faults, *fault)
    got = (await scripted.http.post("/v1/completions", json=SHORT)).json()
    assert sorted_ids(got["choices"]) == [of_script(i) for i in range(3)]
    await scripted.cluster.idle()


async def test_answers_of_different_lengths_end_one_by_one(scripted):
    own = {derived_seed(3, i): 2 + 3 * i for i in range(3)}
    scripted.cluster.script = lambda request, index: 5 if index < own[request.sampling.seed] else 1
    got = (await scripted.http.post("/v1/completions", json=SHORT)).json()
    assert [len(c["token_ids"]) for c in got["choices"]] == [3, 6, 9]
    assert {c["finish_reason"] for c in got["choices"]} == {"stop"}
    assert got["usage"]["completion_tokens"] == 18


async def test_the_first_token_of_the_first_may_be_its_last(scripted):
    scripted.cluster.script = lambda request, index: 1 if request.sampling.seed == 3 else 5
    got = (await scripted.http.post("/v1/completions", json=SHORT)).json()
    assert sorted_ids(got["choices"]) == [[1], [5] * 12, [5] * 12]


async def one_fails(running, stream):
    """Ask for three answers of which one of the later two is refused by its worker."""
    prefill = [w for w in running.cluster.workers if w.kind is WorkerKind.PREFILL]
    decode = [w for w in running.cluster.workers if w.kind is WorkerKind.DECODE]
    for worker in decode:
        worker.faults.hold.clear()
    for worker in prefill:  # so the commit of the first, with which the others begin, is known late
        worker.faults.books_late_s = 0.3
    asking = asyncio.create_task(running.http.post("/v1/completions", json={**SHORT, "stream": stream}))
    async with asyncio.timeout(5):
        while not any(w.attached for w in decode) or not any(w.seen for w in prefill):
            await asyncio.sleep(0.01)
    for worker in prefill:
        worker.faults.refuse.append(InvalidRequest("prompt", "9 tokens", "at most 8 fit the KV pool"))
    for worker in decode:
        worker.faults.hold.set()
    return await asking


async def test_the_failure_of_one_is_the_error_of_all(scripted):
    whole = await one_fails(scripted, stream=False)
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "prompt")
    await scripted.cluster.idle()


async def test_after_the_first_byte_it_is_the_last_event(scripted):
    got = events((await one_fails(scripted, stream=True)).text)
    assert got[0]["choices"][0]["index"] == 0
    assert (got[-2]["error"]["param"], got[-1]) == ("prompt", "[DONE]")
    assert sum("error" in event for event in got[:-1]) == 1
    await scripted.cluster.idle()


async def test_requests_of_many_answers_wait_for_each_other_and_not_for_ever(tmp_path):
    config = router_config(tmp_path, admission=AdmissionConfig(max_running=3, max_waiting=9))
    async with running_router(config) as running:
        await running.cluster.pools(1, 1)
        running.cluster.step_s = 0.01
        several = [{**SHORT, "n": n} for n in (2, 2, 5, 1, 3)]
        asking = [running.http.post("/v1/completions", json=asked) for asked in several]
        got = [response.json()["choices"] for response in await asyncio.gather(*asking)]
        assert [sorted_ids(choices) for choices in got] == [[of_script(i) for i in range(len(c))] for c in got]
        assert [len(choices) for choices in got] == [2, 2, 5, 1, 3]
        assert await running.metric("diptych_requests_running") == 0


async def test_clients_that_leave_at_any_moment_leave_nothing(tmp_path):
    async with served(tmp_path, Setup(model=FAKE, num_prefill=2, num_decode=2, step_s=0.002)) as (running, workers):

        async def leave_after(delay_s, index):
            asked = body(prompt=PROMPT[index % 7 :], max_tokens=200, n=4, stream=index % 2 == 0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await running.http.post("/v1/completions", json=asked)

        await asyncio.gather(*(leave_after(0.012 * index, index) for index in range(24)))
        await workers.idle()
        async with asyncio.timeout(3):
            while await running.metric("diptych_requests_running"):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("when", ["before the others", "beside the others"])
async def test_a_deadline_ends_all(tmp_path, when):
    async with running_router(router_config(tmp_path, request_timeout_s=0.8)) as running:
        _, decode = await running.cluster.pools(1, 1)
        if when == "before the others":
            decode[0].faults.hold.clear()
        else:
            running.cluster.step_s = 0.05
        response = await running.http.post("/v1/completions", json={**SHORT, "max_tokens": 200})
        assert (response.status_code, response.json()["error"]["type"]) == (408, "timeout_error")
        await running.cluster.idle(timeout_s=3.0)
        assert await running.metric("diptych_requests_running") == 0


async def test_the_official_client(scripted):
    client = openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    async with client:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 9, "n": 3}
        whole = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in whole.choices}) == 3
        assert whole.usage.completion_tokens == 15
        one = await client.chat.completions.create(**{**asked, "n": 1})
        assert one.choices[0].message.content == whole.choices[0].message.content
        chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]
        for choice in whole.choices:
            assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 5
            mine = [c.choices[0].delta for c in chunks if c.choices and c.choices[0].index == choice.index]
            assert [delta.role for delta in mine] == ["assistant"] + [None] * (len(mine) - 1)
            assert "".join(delta.content or "" for delta in mine) == choice.message.content
        text = await client.completions.create(model=MODEL, prompt="Once", max_tokens=3, logprobs=1, n=2)
        assert [choice.index for choice in text.choices] == [0, 1]
        for choice in text.choices:
            assert len(choice.logprobs.tokens) == 3
            assert choice.logprobs.text_offset[0] == 0


async def test_log_probabilities_of_the_prompt_are_those_of_all(scripted):
    got = (await scripted.http.post("/v1/completions", json={**SHORT, "prompt_logprobs": 1})).json()
    first, *others = (choice["prompt_logprobs"] for choice in got["choices"])
    assert (first[0], len(first)) == (None, 3)
    assert others == [first, first]
    prefills = [r for w in scripted.cluster.workers for r in w.seen]
    assert [r.sampling.prompt_logprobs for r in prefills] == [1, None, None]
