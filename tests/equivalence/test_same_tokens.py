"""One request, one answer: however it is batched, chunked, preempted, cached, handed off or continued.

Native kernels give a row the same bits in any company, so with them answers are compared with their log-probabilities, bit for
bit, in float32 and bfloat16; torch's do not, so with them tokens are compared, in float32.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from engine.config import SchedulerConfig
from tests.equivalence.truth import DTYPES, GREEDY, TINY, Said, engine, heard, real_model, requests, spoken, truth
from tests.integration.pools import Answer, Decoding, Setup, disaggregated, joined, pools

ASKED = requests(24)


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(dtype: str) -> dict[str, Said]:
    return spoken(ASKED, dtype=dtype)


def setup(connector: str, dtype: str, **changes: object) -> Setup:
    scheduler = SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=8)
    return replace(Setup(connector=connector, scheduler=scheduler, real=real_model(dtype=dtype)), **changes)


def said(answer: Answer) -> Said:
    whole = Said(())
    for delta in answer.deltas:
        whole = whole.and_then(delta)
    return whole


def test_the_truth_is_transformers_greedy() -> None:
    from transformers import AutoModelForCausalLM

    asked = [replace(r, sampling=replace(GREEDY, max_tokens=16, ignore_eos=True)) for r in ASKED[:8]]
    ours = truth(asked)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for request in asked:
        prompt = torch.tensor([request.prompt_token_ids])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16, pad_token_id=0
        )
        assert tuple(out[0, prompt.shape[1] :].tolist()) == ours[request.request_id]


@pytest.mark.parametrize("budget", [8, 17, 48, 256])
@pytest.mark.parametrize("caching", [True, False])
def test_chunked_and_batched(expected, dtype: str, budget: int, caching: bool) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=8, enable_prefix_caching=caching)
    assert heard(engine(scheduler, dtype=dtype), ASKED) == expected


@pytest.mark.parametrize("num_blocks", [8, 10, 14])
def test_preempted(expected, dtype: str, num_blocks: int) -> None:
    made = engine(SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8), num_blocks, dtype=dtype)
    assert heard(made, ASKED) == expected
    if num_blocks < 14:
        assert made.stats().num_preemptions > 0


def test_prefix_hits(dtype: str) -> None:
    asked = requests(10, shared=70, salt="p")
    expected = spoken(asked, dtype=dtype)
    made = engine(SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4), dtype=dtype)
    assert heard(made, asked) == expected
    hits = made.stats().num_prefix_hit_tokens
    assert heard(made, asked) == expected
    assert made.stats().num_prefix_hit_tokens > hits > 0


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_continued_from_its_tokens_so_far(expected, dtype: str, cut: int) -> None:
    """What migration after a lost worker does."""
    asked = [
        replace(r, output_token_ids=expected[r.request_id].tokens[:cut])
        for r in ASKED
        if len(expected[r.request_id].tokens) > cut
    ]
    assert len(asked) > 10
    got = heard(engine(SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8), dtype=dtype), asked)
    whole = [expected[r.request_id] for r in asked]
    assert got == {r.request_id: Said(w.tokens, w.logprobs[cut:]) for r, w in zip(asked, whole, strict=True)}


@pytest.mark.parametrize("connector", ["local", "shm", "tcp"])
async def test_disaggregated_under_concurrent_load(expected, dtype: str, connector: str) -> None:
    async with pools(setup(connector, dtype, num_prefill=2, num_decode=2)) as made:
        decodings = [Decoding(served) for served in made.decode]

        async def one(index: int) -> None:
            answer = await disaggregated(made, decodings[index % 2], ASKED[index], index // 2 % 2, index % 2)
            assert said(answer) == expected[ASKED[index].request_id]
            if answer.handed_off is not None:
                assert answer.handed_off.stats.connector == connector

        await asyncio.gather(*(one(index) for index in range(len(ASKED))))
        for decoding in decodings:
            await decoding.close()
        await made.idle()


@pytest.mark.parametrize("connector", ["shm", "tcp"])
async def test_disaggregated_with_blocks_that_decode_has(dtype: str, connector: str) -> None:
    asked = requests(8, shared=50, salt="d")
    expected = spoken(asked, dtype=dtype)
    async with pools(setup(connector, dtype)) as made:
        decoding = Decoding(made.decode[0])
        num_cached_blocks = 0
        for request in asked:
            answer = await disaggregated(made, decoding, request)
            assert said(answer) == expected[request.request_id]
            num_cached_blocks += answer.handed_off.stats.num_cached_blocks if answer.handed_off else 0
        assert num_cached_blocks >= 3 * (len(asked) - 2)
        await decoding.close()
        await made.idle()


async def test_disaggregated_into_a_pool_that_preempts(expected, dtype: str) -> None:
    async with pools(setup("shm", dtype, decode_blocks=10)) as made:
        decoding = Decoding(made.decode[0])
        answers = await asyncio.gather(*(disaggregated(made, decoding, request) for request in ASKED[:12]))
        assert [said(a) for a in answers] == [expected[r.request_id] for r in ASKED[:12]]
        await decoding.close()
        await made.idle()


async def test_alone_on_a_decode_worker(expected, dtype: str) -> None:
    async with pools(setup("local", dtype, num_prefill=0)) as made:
        decoding = Decoding(made.decode[0])
        for request in ASKED:
            await decoding.generate(request)
        for request in ASKED:
            assert said(joined(await decoding.whole(request.request_id))) == expected[request.request_id]
        await decoding.close()
        await made.idle()
