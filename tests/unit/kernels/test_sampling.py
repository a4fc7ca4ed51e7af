"""Native sampling beside engine.sampling, its readable truth: the same tokens, ties, NaN and all, whatever shares the call."""

import dataclasses
import math

import pytest
import torch

from contracts.sampling import SamplingParams
from engine.sampling.choice import choose
from engine.sampling.random import keys
from kernels.cpu.sampling import NativeSampling
from kernels.sampling import Wish

WISHES = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5, "top_p": 0.5},
    {"top_k": 900, "top_p": 0.99},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.001, "top_p": 0.8},
    {"min_p": 0.2, "top_k": 50},
    {"min_p": 0.02, "top_k": 64, "top_p": 0.7},
]


@pytest.fixture
def sampling(library):
    return NativeSampling(library)


def wish_of(params, position=0):
    return Wish(params.temperature, params.top_k, params.top_p, params.min_p, keys(params.seed, position))


def logits_of(rows, vocab, seed, dtype=torch.float32, spread=3.0):
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 7, 127, 128, 129, 1_000, 20_003])
def test_tokens_are_those_of_the_truth(sampling, vocab, dtype):
    logits = logits_of(2, vocab, vocab, dtype)
    for number, options in enumerate(WISHES):
        for temperature in (0.3, 2.7):
            params = SamplingParams(temperature=temperature, seed=number, **options)
            rows = range(len(logits))
            drawn = sampling(logits, rows, [wish_of(params, row) for row in rows])
            truth = [choose(logits[row].float(), params, keys(number, row)) for row in rows]
            assert [one.token_id for one in drawn] == truth, (options, temperature)


@pytest.mark.parametrize("options", [{"top_p": 0.97}, {"top_k": 30_000, "top_p": 0.9}, {"top_k": 70_000}, {}])
def test_flat_distributions_keep_many(sampling, options):
    logits = logits_of(2, 100_003, 1, spread=0.2)
    params = SamplingParams(temperature=1.5, seed=3, **options)
    drawn = sampling(logits, [0, 1], [wish_of(params, row) for row in (0, 1)])
    assert [one.token_id for one in drawn] == [choose(logits[row], params, keys(3, row)) for row in (0, 1)]


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_k": 3, "top_p": 0.99}, {"top_p": 0.4}, {"min_p": 1.0}, {}])
def test_of_equal_logits_the_lowest_ids_are_kept(sampling, options):
    """bfloat16 logits tie all the time."""
    for vocab in (10, 300, 5_000):
        logits = logits_of(1, vocab, 2).mul(2).round().div(2)
        for seed in range(40):
            params = SamplingParams(seed=seed, **options)
            (drawn,) = sampling(logits, [0], [wish_of(params)])
            assert drawn.token_id == choose(logits[0], params, keys(seed, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 128, 1_000])
def test_the_likeliest_is_the_first_of_equal_ones(sampling, vocab, dtype):
    logits = torch.full((vocab, vocab), -1.0, dtype=dtype)
    for first in range(vocab):
        logits[first, first:] = 2.0
    drawn = sampling(logits, range(vocab), [Wish()] * vocab)
    assert [one.token_id for one in drawn] == list(range(vocab))
    assert {one.largest for one in drawn} == {2.0}


@pytest.mark.parametrize("vocab", [3, 130, 2_048])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.nan])
def test_what_is_not_finite_gives_no_token_wherever_it_stands(sampling, vocab, temperature, poison):
    for at in {0, vocab // 2, vocab - 1}:
        logits = logits_of(3, vocab, 5)
        logits[1, at] = poison
        first, second, third = sampling(logits, range(3), [Wish(temperature)] * 3)
        assert second.token_id == -1 and not math.isfinite(second.largest)
        assert first.token_id >= 0 and third.token_id >= 0
    (nothing,) = sampling(torch.full((1, vocab), -math.inf), [0], [Wish(temperature)])
    assert nothing.token_id == -1 and nothing.largest == -math.inf


def test_what_is_masked_is_never_drawn(sampling):
    logits = torch.full((1, 1_000), -math.inf)
    allowed = [3, 127, 128, 640]
    logits[0, allowed] = torch.tensor([0.0, 1.0, 0.5, -80.0])
    for options in WISHES:
        for seed in range(30):
            params = SamplingParams(seed=seed, temperature=5.0, **options)
            (drawn,) = sampling(logits, [0], [wish_of(params)])
            assert drawn.token_id in allowed
            assert drawn.token_id == choose(logits[0], params, keys(seed, 0))


def test_a_row_is_the_same_in_any_company_and_on_any_number_of_threads(sampling):
    logits = logits_of(9, 5_003, 8)
    all_params = [SamplingParams(seed=row, temperature=0.8, **WISHES[row]) for row in range(9)]
    wishes = [wish_of(params) for params in all_params]
    threads = torch.get_num_threads()
    try:
        seen = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            seen.append(sampling(logits, range(9), wishes))
            seen.append([sampling(logits, [row], [wish])[0] for row, wish in enumerate(wishes)])
            seen.append(sampling(logits, [*range(8, -1, -1)], wishes[::-1])[::-1])
    finally:
        torch.set_num_threads(threads)
    assert all(drawn == seen[0] for drawn in seen)


def test_rows_are_where_their_strides_say_and_nothing_else_is_read(sampling):
    whole = torch.full((6, 1_000), math.nan)
    part = whole[1::2, 100:857]
    part.copy_(logits_of(3, 757, 9))
    before = whole.clone()
    params = SamplingParams(seed=4, top_p=0.9)
    drawn = sampling(part, [0, 2], [wish_of(params, row) for row in (0, 2)])
    assert [one.token_id for one in drawn] == [choose(part[row].clone(), params, keys(4, row)) for row in (0, 2)]
    assert torch.equal(whole.nan_to_num(7.0), before.nan_to_num(7.0))
    turned = logits_of(757, 3, 9).t()
    assert [one.token_id for one in sampling(turned, [1], [Wish()])] == [int(turned[1].argmax())]


def test_what_does_not_fit_is_refused(sampling):
    logits = torch.zeros(2, 5)
    assert sampling(logits, [], []) == []
    for rows, wishes in (([2], [Wish()]), ([-1], [Wish()]), ([0], [])):
        with pytest.raises(ValueError):
            sampling(logits, rows, wishes)
    with pytest.raises(ValueError):
        sampling(torch.zeros(5), [0], [Wish()])


def test_frequencies_are_the_probabilities(sampling):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 4_000
    wish = Wish(temperature=1.0)
    many = [dataclasses.replace(wish, keys=keys(seed, 1)) for seed in range(count)]
    drawn = sampling(logits, [0] * count, many)
    seen = torch.bincount(torch.tensor([one.token_id for one in drawn]), minlength=4) / count
    assert torch.allclose(seen, logits[0].softmax(0), atol=0.03)
