"""Several answers over whole pools with a model that computes: each is the slow truth of its seed, whatever they share."""

from dataclasses import replace

import pytest

from contracts.request import GenerationRequest
from engine.config import SchedulerConfig
from router.serving.answers import derived_seed
from tests.equivalence.truth import GREEDY, SEEDED, real_model, truth
from tests.integration.pools import Setup
from tests.integration.test_router_pools import body, served

N, NUM_PROMPT, NUM_TOKENS = 4, 75, 20
PROMPT = tuple(3 + i * 11 % 900 for i in range(NUM_PROMPT))
SETUP = Setup(
    connector="shm",
    num_prefill=2,
    num_decode=2,
    scheduler=SchedulerConfig(max_num_batched_tokens=64),
    real=real_model(),
)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_each_is_the_truth_of_its_seed(tmp_path, sampling):
    asked = [
        GenerationRequest(
            f"{index}",
            PROMPT,
            replace(sampling, seed=derived_seed(7, index), max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        for index in range(N)
    ]
    expected = list(truth(asked).values())
    assert len(set(expected)) == (1 if sampling is GREEDY else N)
    fields = {
        name: getattr(sampling, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    }
    async with served(tmp_path, SETUP) as (running, workers):
        for route in ("disaggregated", "colocated"):
            ask = body(**fields, prompt=list(PROMPT), max_tokens=NUM_TOKENS, n=N, diptych={"route": route})
            got = (await running.http.post("/v1/completions", json=ask)).json()
            assert [tuple(choice["token_ids"]) for choice in got["choices"]] == expected, route
        await workers.idle()


async def test_the_prompts_log_probabilities_do_not_depend_on_the_way(tmp_path):
    async with served(tmp_path, SETUP) as (running, workers):
        seen = []
        for route in ("disaggregated", "colocated"):
            ask = body(prompt=list(PROMPT), max_tokens=3, n=2, echo=True, logprobs=2, diptych={"route": route})
            choices = (await running.http.post("/v1/completions", json=ask)).json()["choices"]
            seen += [choice["logprobs"]["token_logprobs"][:NUM_PROMPT] for choice in choices]
            alone = body(prompt=list(PROMPT), max_tokens=0, echo=True, logprobs=2, diptych={"route": route})
            only = (await running.http.post("/v1/completions", json=alone)).json()["choices"][0]
            seen.append(only["logprobs"]["token_logprobs"])
        first = seen[0]
        assert first[0] is None
        assert all(value < 0 for value in first[1:])
        for other in seen[1:]:
            assert other[1:] == pytest.approx(first[1:], abs=1e-4)
        await workers.idle()


async def test_several_prompts_in_one_request_have_the_answers_that_each_has_alone(tmp_path):
    prompts = [PROMPT, PROMPT[:40], tuple(3 + i * 7 % 900 for i in range(33)), PROMPT]
    asked = [
        GenerationRequest(
            f"{place}-{index}", prompt, replace(SEEDED, seed=derived_seed(7, index), max_tokens=9, ignore_eos=True)
        )
        for place, prompt in enumerate(prompts)
        for index in range(2)
    ]
    expected = list(truth(asked).values())
    fields = {
        name: getattr(SEEDED, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    }
    async with served(tmp_path, SETUP) as (running, workers):
        for route in ("disaggregated", "colocated"):
            ask = body(**fields, prompt=[list(p) for p in prompts], max_tokens=9, n=2, diptych={"route": route})
            got = (await running.http.post("/v1/completions", json=ask)).json()
            assert [tuple(choice["token_ids"]) for choice in got["choices"]] == expected, route
            assert got["usage"]["prompt_tokens"] == sum(map(len, prompts))
        await workers.idle()
