"""The fake is a real check: any cell that is not what it should be changes the answer or is refused."""

import pytest

from contracts.errors import ConfigError
from contracts.kv_layout import KVLayout
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from engine.execution.fake import FakeModel, FakeRunner, FakeRunnerError, expected_tokens
from engine.execution.interface import ScheduledBatch, ScheduledRequest

LAYOUT = KVLayout("fake", "float32", 2, 1, 4, block_size=4)
MODEL = FakeModel(LAYOUT, vocab_size=1_000_003, max_model_len=32)
PROMPT = [5, 6, 7, 8, 9, 10]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


def share(token_ids, num_computed, block_ids=(2, 0), request_id="r", sampling=GREEDY, num_tokens=None):
    num_tokens = len(token_ids) - num_computed if num_tokens is None else num_tokens
    return ScheduledRequest(
        request_id, list(token_ids), len(PROMPT), num_computed, num_tokens, list(block_ids), sampling
    )


def execute(runner, *shares):
    return runner.execute(ScheduledBatch(shares))


@pytest.fixture
def buffer():
    return memoryview(bytearray(4 * LAYOUT.block_bytes))


@pytest.fixture
def runner(buffer):
    return FakeRunner(MODEL, 4, buffer)


def test_it_is_a_runner_and_its_answer_is_the_expected_one(runner):
    assert (runner.layout, runner.num_blocks, runner.vocab_size, runner.max_model_len) == (LAYOUT, 4, 1_000_003, 32)
    tokens = list(PROMPT)
    for num_computed in (0, 6, 7):
        (result,) = execute(runner, share(tokens, num_computed))
        tokens.append(result.token_id)
    assert tuple(tokens[6:]) == expected_tokens(GenerationRequest("r", tuple(PROMPT), GREEDY), MODEL)
    assert runner.num_steps == 3


@pytest.mark.parametrize("chunks", [(6,), (1, 5), (4, 2), (2, 2, 2)])
def test_chunks_do_not_matter(runner, chunks):
    num_computed = 0
    for chunk in chunks:
        (result,) = execute(runner, share(PROMPT, num_computed, num_tokens=chunk))
        num_computed += chunk
        assert (result.token_id is None) == (num_computed < 6)
    assert result.token_id == expected_tokens(GenerationRequest("r", tuple(PROMPT), GREEDY), MODEL)[0]


def test_every_byte_of_every_cell_counts_and_no_other(runner, buffer):
    execute(runner, share(PROMPT, 0, num_tokens=5))
    (good,) = execute(runner, share(PROMPT, 5))
    line = LAYOUT.num_kv_heads * LAYOUT.head_size * 4
    for offset in range(len(buffer)):
        buffer[offset] ^= 1
        (result,) = execute(runner, share(PROMPT, 5))
        buffer[offset] ^= 1
        block, position = offset // LAYOUT.block_bytes, offset // line % LAYOUT.block_size
        is_read = block == 2 or (block == 0 and position == 0)
        assert (result != good) == is_read, offset


def test_swapped_blocks_change_the_answer(runner, buffer):
    tokens = [*PROMPT, 1, 2, 3]
    execute(runner, share(tokens, 0, (0, 1, 2), num_tokens=8))
    (good,) = execute(runner, share(tokens, 8, (0, 1, 2)))
    (bad,) = execute(runner, share(tokens, 8, (1, 0, 2)))
    assert good != bad


def test_blocks_moved_to_another_memory_go_on_there(runner, buffer):
    execute(runner, share(PROMPT, 0, num_tokens=5))
    there = memoryview(bytearray(len(buffer)))
    other = FakeRunner(MODEL, 4, there)
    size = LAYOUT.block_bytes
    there[3 * size :] = buffer[2 * size : 3 * size]
    there[size : 2 * size] = buffer[:size]
    assert execute(other, share(PROMPT, 5, (3, 1))) == execute(runner, share(PROMPT, 5))


def test_cells_never_written_are_refused(runner):
    with pytest.raises(FakeRunnerError, match="never written"):
        execute(runner, share(PROMPT, 5))


@pytest.mark.parametrize(
    "shares",
    [
        (share(PROMPT, 0, num_tokens=7),),
        (share(PROMPT, 6),),
        (share(PROMPT, 0, (1,)),),
        (share([1] * 40, 0, [0] * 10),),
        (share(PROMPT, 0, (1, 2)), share(PROMPT, 0, (2, 3), "other")),
        (share(PROMPT, 0, (1, 1)),),
    ],
    ids=["too many", "none", "no room", "over the context", "written by two", "one block twice"],
)
def test_a_batch_that_cannot_be_right_is_refused(runner, shares):
    with pytest.raises(FakeRunnerError):
        execute(runner, *shares)


def test_seeds_matter_only_when_not_greedy():
    def answer(**params):
        return expected_tokens(GenerationRequest("r", tuple(PROMPT), SamplingParams(max_tokens=4, **params)), MODEL)

    assert answer(temperature=1.0, seed=1) != answer(temperature=1.0, seed=2)
    assert answer(temperature=1.0, seed=1) == answer(temperature=0.5, seed=1)
    assert answer(temperature=0.0, seed=1) == answer(temperature=0.0, seed=2)


def test_an_answer_that_goes_on_is_the_same_answer():
    request = GenerationRequest("r", tuple(PROMPT), SamplingParams(max_tokens=6, seed=3))
    whole = expected_tokens(request, MODEL)
    assert len(whole) == 6
    for length in range(6):
        assert expected_tokens(GenerationRequest("r", tuple(PROMPT), request.sampling, whole[:length]), MODEL) == whole


def test_min_tokens_bans_and_stops():
    small = FakeModel(LAYOUT, vocab_size=3, max_model_len=32, eos_token_ids=frozenset({0}))

    def answer(**params):
        return expected_tokens(GenerationRequest("r", (1, 2), SamplingParams(max_tokens=20, **params)), small)

    short = answer(seed=1)
    assert 0 not in short[:-1]
    assert short[-1] == 0
    assert 0 not in answer(seed=1, min_tokens=10)[:10]
    assert 0 not in answer(seed=1, logit_bias=((0, -100.0),))
    assert answer(seed=1, ignore_eos=True).count(0) > 1
    assert len(answer(seed=1, stop_token_ids=(1, 2))) == 1
    with pytest.raises(FakeRunnerError, match="ban every token"):
        answer(min_tokens=1, stop_token_ids=(1, 2))


def test_logprobs_when_asked_for(runner):
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
    (result,) = execute(runner, share(PROMPT, 0, sampling=params))
    assert result.logprob.token_id == result.token_id
    assert len(result.logprob.top) == 2
    assert [p.token_id for p in result.prompt_logprobs] == PROMPT[1:]


def test_memory_of_another_size_and_odd_layouts_are_refused():
    with pytest.raises(ConfigError, match="2 blocks need"):
        FakeRunner(MODEL, 2, memoryview(bytearray(7)))
    with pytest.raises(ConfigError, match="8-byte words"):
        FakeRunner(FakeModel(KVLayout("fake", "float32", 1, 1, 1, 4)), 2)


def test_without_strictness_unwritten_memory_gives_a_wrong_answer_silently(runner):
    loose = FakeRunner(MODEL, 4, strict=False)
    (wrong,) = execute(loose, share(PROMPT, 5))
    assert wrong.token_id != expected_tokens(GenerationRequest("r", tuple(PROMPT), GREEDY), MODEL)[0]
