"""The runner on the trained tiny model: transformers' tokens under any schedule, KV in the given bytes, prompt logprobs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from contracts.errors import ConfigError
from contracts.kv_layout import KVLayout
from contracts.sampling import SamplingParams
from engine.build import ModelRuntimeConfig, load
from engine.execution.input_batch import build_input_batch
from engine.execution.interface import ModelRunner, ScheduledBatch, ScheduledRequest
from engine.execution.kv_storage import kv_tensor
from engine.execution.torch_runner import TorchRunner
from engine.models.loader import load_model
from tests.unit.execution.greedy import GREEDY, Driven

MODEL = Path("tests/fixtures/tiny-austen")
NUM_BLOCKS = 64
NAN = b"\xff\xff\xff\xff"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def theirs() -> Iterator[transformers.PreTrainedModel]:
    yield transformers.AutoModelForCausalLM.from_pretrained(MODEL)


def make_runner(dtype: str = "float32", num_blocks: int = NUM_BLOCKS) -> tuple[TorchRunner, bytearray]:
    """A runner whose KV memory is all NaN."""
    model = load_model(MODEL, dtype)
    layout = KVLayout(model.fingerprint, dtype, 4, 2, 32, 16)
    memory = bytearray(NAN * (num_blocks * layout.block_bytes // 4))
    return TorchRunner(model, layout, memoryview(memory), num_blocks, 1024), memory


def generated(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("chunk", [1, 7, 16, 90])
def test_greedy_equals_transformers_generate(theirs: transformers.PreTrainedModel, chunk: int) -> None:
    rng = random.Random(chunk)
    requests = [Driven([rng.randrange(1024) for _ in range(n)], []) for n in (90, 3, 41, 1)]
    ids = list(range(NUM_BLOCKS))
    rng.shuffle(ids)
    for request in requests:
        request.block_ids = [ids.pop() for _ in range(9)]
    expected = [generated(theirs, r.tokens, 20) for r in requests]
    runner, _ = make_runner()
    while True:
        working = [r for r in requests if len(r.output) < 20]
        if not working:
            break
        batch = tuple(r.share(min(chunk, len(r.tokens) - r.computed)) for r in working)
        for request, result in zip(working, runner.execute(ScheduledBatch(batch)), strict=True):
            if request.computed < len(request.tokens):
                assert result.token_id is None
            else:
                assert result.token_id is not None
                request.tokens.append(result.token_id)
    assert [r.output for r in requests] == expected


def test_kv_is_in_the_given_bytes_and_another_runner_can_go_on_from_them() -> None:
    """What a hand-off relies on: copy whole blocks to other places of another pool, and the logits stay."""
    prompt = [random.Random(2).randrange(1024) for _ in range(37)]
    first, source = make_runner()
    first.execute(ScheduledBatch((Driven(prompt[:36], [5, 50, 8]).share(36),)))
    second, target = make_runner()
    size = first.layout.block_bytes
    for here, there in zip([5, 50, 8], [60, 2, 3], strict=True):
        target[there * size : (there + 1) * size] = source[here * size : (here + 1) * size]

    def last(runner: TorchRunner, blocks: list[int]) -> torch.Tensor:
        return runner.logits(ScheduledBatch((ScheduledRequest("r", prompt, 37, 36, 1, blocks, GREEDY),)))

    assert torch.equal(last(first, [5, 50, 8]), last(second, [60, 2, 3]))
    cell = kv_tensor(memoryview(source), first.layout, NUM_BLOCKS)
    assert cell[[5, 50, 8]].flatten(3).isnan().sum() == 11 * 64 * 2 * 4  # the last block's 11 unused positions


def test_prompt_logprobs_arrive_with_the_chunks_and_are_the_full_models(theirs: transformers.PreTrainedModel) -> None:
    prompt = [random.Random(3).randrange(1024) for _ in range(150)]
    with torch.inference_mode():
        exact = torch.log_softmax(theirs(torch.tensor([prompt])).logits[0], -1)
    asking = Driven(prompt, list(range(12)), SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1))
    plain = Driven(prompt[:20], [20, 21])
    runner, _ = make_runner()
    found = []
    for count in (100, 49, 1):
        batch = [asking.share(count)] if count != 49 else [plain.share(20), asking.share(count)]
        results = runner.execute(ScheduledBatch(tuple(batch)))
        found.append(results[-1].prompt_logprobs)
        assert results[0].prompt_logprobs == () or results[0] is results[-1]
    assert [len(f) for f in found] == [100, 49, 0]
    entries = [entry for some in found for entry in some]
    for position, entry in enumerate(entries):
        assert entry.token_id == prompt[position + 1]
        assert entry.logprob == pytest.approx(exact[position, prompt[position + 1]].item(), abs=1e-4)
        assert entry.top[0][0] == exact[position].argmax().item()
        assert len(entry.top) == 2
    assert results[-1].logprob is not None
    assert results[-1].logprob.token_id == exact[149].argmax().item()


def test_prompt_logprobs_stop_at_the_prompt_when_output_is_recomputed() -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    request = ScheduledRequest("r", list(range(10, 20)), 6, 0, 10, [0], sampling)
    runner, _ = make_runner()
    assert [e.token_id for e in runner.execute(ScheduledBatch((request,)))[0].prompt_logprobs] == [11, 12, 13, 14, 15]


def test_seeded_sampling_does_not_depend_on_schedule_or_company() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
    prompt = [random.Random(4).randrange(1024) for _ in range(30)]

    def run(chunk: int, company: bool) -> list[int]:
        runner, _ = make_runner()
        request = Driven(prompt, [9, 4, 30, 31], sampling)
        other = Driven(prompt[:5], [40, 41, 42, 43])
        while len(request.output) < 25:
            batch = [request.share(min(chunk, len(request.tokens) - request.computed))]
            if company:
                batch.insert(0, other.share(len(other.tokens) - other.computed))
            results = runner.execute(ScheduledBatch(tuple(batch)))
            if company:
                assert results[0].token_id is not None
                other.tokens.append(results[0].token_id)
            if results[-1].token_id is not None:
                request.tokens.append(results[-1].token_id)
        return request.output

    answers = [run(30, False), run(4, False), run(30, True), run(13, True)]
    assert len(set(map(tuple, answers))) == 1


def test_only_rows_that_are_wanted_are_computed_to_the_end() -> None:
    chunk = Driven(list(range(9)), [0]).share(4)
    decode = ScheduledRequest("d", [1, 2, 3], 2, 2, 1, [1], GREEDY)
    inputs = build_input_batch(ScheduledBatch((decode, chunk)))
    assert inputs.rows is not None
    assert inputs.rows.tolist() == [0]
    assert inputs.samples == [0]
    assert inputs.token_ids.tolist() == [3, 0, 1, 2, 3]
    assert inputs.positions.tolist() == [2, 0, 1, 2, 3]
    assert build_input_batch(ScheduledBatch((decode,))).rows is None


def test_a_step_in_which_nobody_samples_still_writes_kv() -> None:
    runner, memory = make_runner()
    results = runner.execute(ScheduledBatch((Driven(list(range(9)), [0]).share(4),)))
    assert [r.token_id for r in results] == [None]
    assert kv_tensor(memoryview(memory), runner.layout, NUM_BLOCKS)[0, 3, :, :4].isfinite().all()


def test_it_is_a_model_runner_and_says_what_it_has() -> None:
    runner: ModelRunner = make_runner("bfloat16")[0]
    assert (runner.num_blocks, runner.vocab_size, runner.max_model_len) == (NUM_BLOCKS, 1024, 1024)
    assert runner.eos_token_ids == frozenset({1})
    assert runner.layout.dtype == "bfloat16"


def test_kv_bytes_of_the_wrong_size_or_dtype_are_refused() -> None:
    layout = KVLayout("m", "float32", 2, 1, 8, 4)
    with pytest.raises(ConfigError, match=r"kv memory: 100 bytes, expected 3 blocks of 512 bytes"):
        kv_tensor(memoryview(bytearray(100)), layout, 3)
    with pytest.raises(ConfigError, match="kv dtype: got 'float16'"):
        kv_tensor(memoryview(bytearray(768)), KVLayout("m", "float16", 2, 1, 8, 4), 3)


def test_smallest_pool_still_runs() -> None:
    loaded = load(ModelRuntimeConfig(MODEL, threads=1))
    num_blocks = loaded.num_blocks_for(2 * loaded.layout.block_bytes)
    runner = loaded.runner(memoryview(bytearray(num_blocks * loaded.layout.block_bytes)), num_blocks)
    assert runner.max_model_len == 32
