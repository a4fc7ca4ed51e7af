"""The race: SplitMix64's published numbers, honest frequencies, and draws that do not hang on last bits."""

import math

import numpy as np
import pytest
import torch

from contracts.sampling import SamplingParams
from engine.sampling.choice import choose
from engine.sampling.race import draw, exponentials
from engine.sampling.random import keys

# The first outputs of SplitMix64 from the state 1234567, as in its authors' test program.
KNOWN = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)


def test_the_noise_is_made_of_splitmix64():
    expected = [-math.log(((word >> 12) + 0.5) / 2**52) for word in KNOWN]
    assert exponentials(1234567, 5).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_noise_is_exponential_over_indices_and_over_keys():
    for numbers in (exponentials(keys(1, 2)[0], 40_000), [exponentials(keys(3, i)[1], 3)[2] for i in range(40_000)]):
        uniform = np.exp(-np.asarray(numbers))
        counts, _ = np.histogram(uniform, bins=100, range=(0.0, 1.0))
        assert 55 < float(((counts - 400) ** 2 / 400).sum()) < 160  # chi square, 99 degrees of freedom
        assert uniform.min() > 0.0
        assert uniform.max() < 1.0


def test_the_noise_is_above_zero_whatever_the_bits():
    assert exponentials(0, 1_000_000).min() > 0.0


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 300, 1024])
def test_only_what_has_weight_is_drawn(size):
    weights = torch.zeros(size)
    weights[[0, size // 2, size - 1]] = torch.tensor([1e-30, 1.0, 1e-3])
    drawn = {draw(weights, keys(5, i)) for i in range(300)}
    assert drawn <= {0, size // 2, size - 1}
    assert size // 2 in drawn or size < 3


@pytest.mark.parametrize("size", [6, 700])
def test_frequencies_are_the_weights(size):
    """Also of runs as wholes, and where a run is a single large weight."""
    weights = torch.rand(size, generator=torch.Generator().manual_seed(size)) ** 8
    weights[size // 2] = float(weights.sum())
    shares = (weights / weights.sum()).tolist()
    draws = 30_000
    counts = [0] * size
    for position in range(draws):
        counts[draw(weights, keys(3, position))] += 1
    expected = [(count, share * draws) for count, share in zip(counts, shares, strict=True)]
    for count, mean in expected:
        assert abs(count - mean) < 5 * math.sqrt(mean) + 5
    big = [(count, mean) for count, mean in expected if mean > 20]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in big)
    assert chi_square < len(big) + 5 * math.sqrt(2 * len(big))


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.95}, {"min_p": 0.001}, {"temperature": 2.0}], ids=str)
def test_logits_that_differ_in_their_last_bits_draw_the_same(setting):
    """A vocabulary of a real size and the rounding of float32. An inverse CDF in vocabulary order fails this every 150 draws."""
    generator = torch.Generator().manual_seed(6)
    params = SamplingParams(**setting)
    differing = 0
    for trial in range(400):
        logits = torch.randn(49_152, generator=generator) * 3
        nudged = logits + torch.randn(49_152, generator=generator) * 1e-5
        differing += choose(logits, params, keys(trial, 9)) != choose(nudged, params, keys(trial, 9))
    assert differing == 0
