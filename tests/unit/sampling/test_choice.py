"""Filters and the draw against a slow truth in plain Python floats, and ties that no sort decides."""

import math

import pytest
import torch

from contracts.sampling import SamplingParams
from engine.sampling.choice import choose, largest
from engine.sampling.random import keys


def kept_tokens(logits, params):
    """{token id: weight} after temperature, min-p, top-k and top-p, the slow way."""
    scaled = [value / params.temperature for value in logits]
    peak = max(scaled)
    weights = {i: math.exp(value - peak) for i, value in enumerate(scaled)}
    ranked = sorted(weights, key=lambda i: (-logits[i], i))
    ranked = [i for i in ranked if weights[i] >= params.min_p]
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, mass, nucleus = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if nucleus and mass >= params.top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    return {i: weights[i] for i in sorted(nucleus)}


def splitmix64(state):
    """One output, by its definition."""
    bits = state & MASK
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
    return bits ^ bits >> 31


def drawn(kept, two_keys):
    """A run of 128 ids by its mass, then one of its ids: whoever arrives first."""
    masses = {}
    for token_id, weight in kept.items():
        masses[token_id // 128] = masses.get(token_id // 128, 0.0) + weight
    run = first(masses, two_keys[0])
    return run * 128 + first({i % 128: weight for i, weight in kept.items() if i // 128 == run}, two_keys[1])


def first(weights, key):
    arrivals = {}
    for i, weight in weights.items():
        uniform = ((splitmix64(key + (i + 1) * 0x9E3779B97F4A7C15) >> 12) + 0.5) / 2**52
        arrivals[i] = -math.log(uniform) / weight
    return min(arrivals, key=arrivals.__getitem__)


MASK = 2**64 - 1
SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"top_p": 0.99, "temperature": 4.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.01, "temperature": 1.5},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 300])
def test_a_draw_is_the_slow_draw(setting, vocab_size):
    params = SamplingParams(**setting)
    generator = torch.Generator().manual_seed(vocab_size)
    for trial in range(40):
        logits = torch.randn(vocab_size, generator=generator) * 3
        noise = keys(trial, vocab_size)
        assert choose(logits, params, noise) == drawn(kept_tokens(logits.tolist(), params), noise)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_is_drawn_is_one_of_what_was_kept(setting):
    params = SamplingParams(**setting)
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 3
    logits[[0, 299]] = float("-inf")
    kept = kept_tokens(logits.tolist(), params)
    assert {choose(logits, params, keys(position, 4)) for position in range(200)} <= set(kept)


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, float("-inf")])
    probabilities = torch.softmax(logits, 0).tolist()
    draws = 20_000
    counts = [0] * 5
    for position in range(draws):
        counts[choose(logits, SamplingParams(), keys(3, position))] += 1
    assert counts[4] == 0
    for count, probability in zip(counts[:4], probabilities[:4], strict=True):
        assert abs(count - draws * probability) < 4 * math.sqrt(draws * probability * (1 - probability))


def test_a_nucleus_larger_than_every_guess_is_exact():
    logits = torch.zeros(5_000)  # flat: half the mass is exactly half the tokens, lowest ids first
    ids = {choose(logits, SamplingParams(top_p=0.5), keys(1, i)) for i in range(2_000)}
    assert max(ids) < 2_500
    assert max(ids) > 2_450


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_are_ordered_by_value_then_id(dtype):
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 5, 64, 1000, 2000):
        values = torch.randint(0, 12, (1000,), generator=generator).to(dtype)
        expected = sorted(range(1000), key=lambda i, v=values: (-float(v[i]), i))[:count]
        assert largest(values, count).tolist() == expected


def test_top_k_keeps_exactly_k_of_equals():
    logits = torch.zeros(1000)
    assert {choose(logits, SamplingParams(top_k=3), keys(0, i)) for i in range(200)} == {0, 1, 2}
