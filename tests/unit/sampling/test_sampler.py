"""What a request's parameters mean for its tokens."""

import math

import pytest
import torch

from engine.sampling.logprobs import prompt_logprobs, token_logprob
from engine.sampling.race import draw
from engine.sampling.random import keys
from engine.sampling.sampler import GREEDY_TEMPERATURE, Sampler
from kernels.cpu.config import compiler
from kernels.cpu.library import load, supported_isas
from kernels.cpu.sampling import NativeSampling

VOCAB = 50
EOS = 2


@pytest.fixture(params=["torch", "native"])
def kernel(request):
    if request.param == "torch":
        return None
    if not (compiler() and supported_isas()):
        pytest.skip("no compiler, or not Linux")
    return NativeSampling(load(supported_isas()[0]))


@pytest.fixture
def sampler(kernel):
    return Sampler(VOCAB, frozenset({EOS}), kernel)


@pytest.fixture
def logits():
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 3


def token(sampler, logits, row):
    return sampler.sample(logits, [row])[0].token_id


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [7, 1_000, 151_936])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_greedy_takes_the_first_of_equal_maxima(make_row, dtype, vocab_size, num_rows, kernel):
    logits = torch.zeros(num_rows, vocab_size, dtype=dtype)
    first = [(17 * i + 3) % (vocab_size // 2 + 1) for i in range(num_rows)]
    for i, low in enumerate(first):
        logits[i, low:] = 1
    sampler = Sampler(vocab_size, frozenset({EOS}), kernel)
    assert [s.token_id for s in sampler.sample(logits, [make_row(temperature=0.0)] * num_rows)] == first


def test_a_tiny_temperature_is_greedy(sampler, logits, make_row):
    for temperature in (1e-6, 9.9e-6):
        assert token(sampler, logits, make_row(temperature=temperature, seed=9)) == int(logits.argmax())


def test_inputs_are_left_as_they_were(sampler, logits, make_row):
    before = logits.clone()
    row = make_row(output=(1, 1), min_tokens=5, repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((3, 9.0),))
    token(sampler, logits, row)
    assert torch.equal(logits, before)


def test_the_noise_belongs_to_seed_and_position_only(sampler, make_row):
    weights = torch.ones(VOCAB)
    for seed in (0, 5):
        for output in ((), (9,), (9, 9, 9)):
            row = make_row(output=output, seed=seed)
            assert token(sampler, torch.zeros(1, VOCAB), row) == draw(weights, keys(seed, 3 + len(output)))


def test_a_prompt_that_holds_the_same_tokens_draws_the_same(sampler, logits, make_row):
    """A continuation elsewhere, where output became prompt, is the same draw."""
    here = make_row(prompt=(5, 6), output=(7, 8), seed=11)
    there = make_row(prompt=(5, 6, 7, 8), output=(), seed=11)
    assert token(sampler, logits, here) == token(sampler, logits, there)


def test_min_tokens_bans_eos_and_stop_ids_until_reached(sampler, make_row):
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 9]] = torch.tensor([50.0, 40.0])
    for ignore_eos in (False, True):
        for temperature in (0.0, 1.0):
            ask = {"min_tokens": 2, "stop_token_ids": (9,), "ignore_eos": ignore_eos, "temperature": temperature}
            assert token(sampler, logits, make_row(output=(1,), **ask)) not in (EOS, 9)
            assert token(sampler, logits, make_row(output=(1, 1), **ask)) == EOS


def test_ignore_eos_alone_changes_no_token(sampler, make_row):
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 50.0
    assert token(sampler, logits, make_row(temperature=0.0, ignore_eos=True)) == EOS


def test_eos_beyond_the_output_layer_needs_no_mask(make_row, kernel):
    sampler = Sampler(VOCAB, frozenset({VOCAB + 3}), kernel)
    assert token(sampler, torch.ones(1, VOCAB), make_row(temperature=0.0, min_tokens=3)) == 0


def expected_logits(raw, row):
    """vLLM's order, one float at a time."""
    params, values = row.sampling, raw[0].tolist()
    output = row.token_ids[row.num_prompt_tokens :]
    if len(output) < params.min_tokens:
        for i in {EOS, *params.stop_token_ids}:
            values[i] = -math.inf
    for i, bias in params.logit_bias:
        values[i] += bias
    for i in set(row.token_ids):
        values[i] = values[i] / params.repetition_penalty if values[i] > 0 else values[i] * params.repetition_penalty
    for i in set(output):
        values[i] -= params.frequency_penalty * output.count(i)
        values[i] -= params.presence_penalty
    return torch.tensor([values])


@pytest.mark.parametrize(
    "ask",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 2.0},
        {"logit_bias": ((0, 5.0), (5, -100.0), (49, 4.5))},
        {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.7,
            "presence_penalty": 0.4,
            "logit_bias": ((5, 3.0), (11, 2.0)),
            "min_tokens": 9,
            "stop_token_ids": (4,),
        },
    ],
    ids=str,
)
def test_penalties_and_bias_follow_their_formulas(sampler, make_row, ask):
    generator = torch.Generator().manual_seed(8)
    changed = 0
    for trial in range(60):
        raw = torch.randn(1, VOCAB, generator=generator) * 2
        likeliest = raw[0].topk(6).indices.tolist()
        tokens = {"prompt": likeliest[:3], "output": (likeliest[0], likeliest[0], likeliest[4])}
        for temperature in (0.0, 0.8):
            row = make_row(**tokens, seed=trial, temperature=temperature, **ask)
            plain = make_row(**tokens, seed=trial, temperature=temperature)
            assert token(sampler, raw, row) == token(sampler, expected_logits(raw, row), plain)
            changed += token(sampler, raw, row) != token(sampler, raw, plain)
    assert changed  # or the test proves nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_raw_logits(sampler, logits, make_row, dtype):
    raw = logits.to(dtype)
    row = make_row(temperature=0.5, repetition_penalty=1.5, logit_bias=((3, 100.0),), logprobs=4)
    sampled = sampler.sample(raw, [row])[0]
    assert sampled.token_id == 3
    expected = torch.log_softmax(raw[0].float(), 0)
    assert sampled.logprob.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert sampled.logprob.rank == 1 + int((expected > expected[3]).sum())
    best = expected.topk(4)
    assert [i for i, _ in sampled.logprob.top] == best.indices.tolist()
    assert [p for _, p in sampled.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_logprobs_zero_has_the_token_but_no_list_and_none_has_nothing(sampler, logits, make_row):
    assert sampler.sample(logits, [make_row(logprobs=0)])[0].logprob.top == ()
    assert sampler.sample(logits, [make_row()])[0].logprob is None


def test_asking_for_logprobs_does_not_change_the_token(sampler, logits, make_row):
    for temperature in (0.0, 1.0):
        for seed in range(20):
            ask = {"temperature": temperature, "seed": seed}
            assert token(sampler, logits, make_row(**ask)) == token(sampler, logits, make_row(**ask, logprobs=5))


def test_ranks_are_unique_and_agree_with_the_list():
    row = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0])
    assert [token_logprob(row, i, 0).rank for i in range(5)] == [4, 1, 2, 5, 3]
    assert [i for i, _ in token_logprob(row, 0, 20).top] == [1, 2, 4, 0, 3]


def test_prompt_logprobs_are_the_token_logprobs_of_each_row():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    assert prompt_logprobs(logits, [4, 0, 49], 2) == tuple(
        token_logprob(logits[i], token_id, 2) for i, token_id in enumerate([4, 0, 49])
    )
    with pytest.raises(ValueError, match="3 rows of logits for 2 tokens"):
        prompt_logprobs(logits, [1, 2], 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_said_aloud_by_their_row_alone(sampler, logits, make_row, temperature, bad):
    rows = [make_row(temperature=temperature)] * 2
    whole = sampler.sample(logits.repeat(2, 1), rows)
    logits = logits.repeat(2, 1)
    logits[1, 7] = bad
    good, broken = sampler.sample(logits, rows)
    assert good == whole[0]
    assert (broken.token_id, broken.logprob) == (None, None)
    assert "not finite" in broken.fault


def test_a_ban_on_every_token_is_said_aloud(make_row, kernel):
    row = make_row(prompt=(1,), min_tokens=1, stop_token_ids=(1,))
    (banned,) = Sampler(2, frozenset({0}), kernel).sample(torch.zeros(1, 2), [row])
    assert banned.token_id is None
    assert "not finite" in banned.fault


@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_no_bounded_parameter_makes_logits_infinite(make_row, penalty, kernel):
    """Each bound at its end, on logits far beyond any model's, twenty times the same token in the output."""
    row = make_row(
        output=(1,) * 20,
        repetition_penalty=penalty,
        frequency_penalty=-2.0,
        presence_penalty=-2.0,
        logit_bias=((1, 100.0), (2, -100.0)),
        temperature=GREEDY_TEMPERATURE,
        logprobs=0,
    )
    row.sampling.validate(VOCAB)
    logits = torch.linspace(-1e6, 1e6, VOCAB).unsqueeze(0)
    (sampled,) = Sampler(VOCAB, frozenset(), kernel).sample(logits, [row])
    assert sampled.fault is None
    assert math.isfinite(sampled.logprob.logprob)


def test_logits_of_another_shape_are_refused(sampler, make_row):
    with pytest.raises(ValueError, match="expected"):
        sampler.sample(torch.zeros(1, VOCAB + 1), [make_row()])
