"""Our logits equal transformers' within 1e-4 in float32: every family and variant, any chunking, any company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.models.decoder import Decoder
from engine.models.loader import load_model
from kernels.batch import Segment
from kernels.dispatch import REFERENCE
from tests.unit.models.families import CASES, make_model
from tests.unit.models.paged import PagedRun, random_schedule

TOLERANCE = 1e-4
LENGTHS = (61, 40, 1, 17, 33)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prompts_of(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(length)] for length in lengths]


def truth(model: PreTrainedModel, prompts: list[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.5, "logits too small for the tolerance to mean anything"
        difference = (ours - theirs).abs().max().item()
        assert difference <= TOLERANCE, difference  # a NaN fails too


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("model")
    theirs = make_model(request.param, directory)
    return load_model(directory, "float32"), theirs


def test_whole_prompt(pair: tuple[Decoder, PreTrainedModel]) -> None:
    model, theirs = pair
    prompts = prompts_of(1)
    run = PagedRun(model, prompts)
    for i, prompt in enumerate(prompts):
        run.step([(i, len(prompt))])
    assert_same(run.finish(), truth(theirs, prompts))


@pytest.mark.parametrize("chunk", [1, 3, 16, 37])
def test_chunked(pair: tuple[Decoder, PreTrainedModel], chunk: int) -> None:
    """A chunk of 1 is a decode step; chunks that end inside a block are the rule."""
    model, theirs = pair
    prompts = prompts_of(2, (59,))
    run = PagedRun(model, prompts)
    for start in range(0, 59, chunk):
        run.step([(0, min(chunk, 59 - start))])
    assert_same(run.finish(), truth(theirs, prompts))


def test_ragged_mixed_batches(pair: tuple[Decoder, PreTrainedModel]) -> None:
    model, theirs = pair
    prompts = prompts_of(3)
    run = PagedRun(model, prompts, seed=3)
    for step in random_schedule(prompts, random.Random(3)):
        run.step(step)
    assert_same(run.finish(), truth(theirs, prompts))


@pytest.mark.parametrize("case", ["llama/biased/default", "mistral/sliding/default", "qwen3/sliding/default"])
def test_on_the_reference_kernels(case: str, tmp_path: Path) -> None:
    theirs = make_model(case, tmp_path)
    prompts = prompts_of(4, (21, 9))
    run = PagedRun(load_model(tmp_path, "float32", REFERENCE), prompts)
    for step in random_schedule(prompts, random.Random(4)):
        run.step(step)
    assert_same(run.finish(), truth(theirs, prompts))


def test_dynamic_rope_beyond_its_context_is_a_token_by_token_run_however_it_is_cut(tmp_path: Path) -> None:
    """transformers rescales by the longest sequence seen, so only its token-by-token answer is one that chunks can share."""
    theirs = make_model("llama/plain/dynamic", tmp_path)
    prompt = prompts_of(5, (300,))[0]
    rows = []
    with torch.inference_mode():
        cache = None
        for position, token in enumerate(prompt):
            out = theirs(torch.tensor([[token]]), cache=cache, position_ids=torch.tensor([[position]]))
            cache = out.past_key_values if cache is None else cache
            rows.append(out.logits[0])
    model = load_model(tmp_path, "float32")
    for chunk in (300, 41):
        run = PagedRun(model, [prompt])
        for start in range(0, 300, chunk):
            run.step([(0, min(chunk, 300 - start))])
        assert_same(run.finish(), [torch.cat(rows)])


def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(tmp_path: Path) -> None:
    """Rounding differs between the two, so neither is the other's truth: both are measured against float32."""
    exact_model = make_model("qwen2/plain/default", tmp_path)
    prompts = prompts_of(6)
    exact = truth(exact_model, prompts)
    theirs = truth(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), prompts)
    run = PagedRun(load_model(tmp_path, "bfloat16"), prompts)
    for step in random_schedule(prompts, random.Random(6)):
        run.step(step)
    ours = run.finish()

    def error(found: list[Tensor]) -> float:
        return (
            torch.cat([(f.float() - e).pow(2).mean(-1) for f, e in zip(found, exact, strict=True)]).mean().sqrt().item()
        )

    assert 0 < error(ours) <= 1.1 * error(theirs)


def test_rows_that_are_not_wanted_change_nothing_but_the_output(tmp_path: Path) -> None:
    make_model("llama/plain/default", tmp_path)
    model = load_model(tmp_path, "float32")
    prompt = prompts_of(7, (19,))[0]
    whole, some = PagedRun(model, [prompt]), PagedRun(model, [prompt])
    whole.step([(0, 19)])
    with torch.inference_mode():
        attention = some.cache.attention([Segment(0, 19, 0, some.block_ids[0])])
        rows = torch.tensor([4, 18])
        hidden = model.forward(torch.tensor(prompt), torch.arange(19), attention, rows)
        logits = model.logits(hidden)
    torch.testing.assert_close(logits, whole.logits[0][0][rows], atol=1e-5, rtol=0)
    assert torch.equal(some.kv.nan_to_num(), whole.kv.nan_to_num())
