"""The counter-based noise: published vectors, uniformity, and no trace of its counters."""

import itertools

import pytest

from engine.sampling.random import Purpose, keys, philox4x32

# kat_vectors of the Random123 distribution, philox4x32, 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_makes_the_published_vectors(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_keys_are_pinned_so_that_old_seeds_keep_their_text():
    assert keys(0, 0) == (0x6627E8D5E169C58D, 0xBC57AC4C9B00DBD8)
    assert keys(2**63 - 1, 2**40) == keys(2**63 - 1, 2**40, Purpose.TOKEN)


def numbers_of(seed, position, which=0):
    return keys(seed, position)[which] / 2**64


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("along", ["position", "seed"])
def test_keys_fill_their_range_evenly_along_either_counter(along, which):
    draws = 40_000
    numbers = [numbers_of(7, i, which) if along == "position" else numbers_of(i, 7, which) for i in range(draws)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    bins = 100
    counts = [0] * bins
    for number in numbers:
        counts[int(number * bins)] += 1
    expected = draws / bins
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    assert (
        55 < chi_square < 160
    )  # 99 degrees of freedom: 99.98 % of honest generators; the numbers are fixed, so no flake


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (2**32, 0), (0, 2**32)])
def test_neighbouring_counters_share_nothing(seed_step, position_step):
    pairs = [(numbers_of(s, p), numbers_of(s + seed_step, p + position_step)) for s in range(100) for p in range(100)]
    pairs += [(numbers_of(s, p, 0), numbers_of(s, p, 1)) for s in range(100) for p in range(100)]
    covariance = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
    assert abs(covariance * 12) < 0.05  # correlation; its standard error here is 0.01


def test_every_seed_and_position_draws_its_own_number():
    numbers = {keys(s, p) for s, p in itertools.product(range(100), range(100))}
    numbers |= {keys(s << 32, p << 32) for s, p in itertools.product(range(1, 30), range(1, 30))}
    assert len(numbers) == 100 * 100 + 29 * 29


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (0, -1), (2**64, 0), (0, 2**64)])
def test_out_of_range_counters_are_refused(seed, position):
    with pytest.raises(ValueError, match="from 0 to"):
        keys(seed, position)
