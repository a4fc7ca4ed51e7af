"""Tokens from logits: the lowest of the likeliest, and what the CPU's race draws with the same keys."""

from __future__ import annotations

import pytest
import torch

from engine.sampling.choice import choose
from engine.sampling.race import exponentials
from engine.sampling.random import keys

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("vocab", [1, 97, 4096, 9001])
def test_the_lowest_of_the_likeliest(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    from kernels.triton.sampling import likeliest

    logits = torch.randint(-3, 3, (4, vocab)).to(dtype)
    logits[1] = -INF
    logits[2, vocab // 2] = NAN
    values, ids = (found.cpu() for found in likeliest(logits.to(device)))
    best, first = logits.float().max(-1)
    assert torch.equal(values.nan_to_num(5), best.nan_to_num(5))
    assert ids.tolist() == [
        int((row == row.max()).nonzero()[0]) if not row.isnan().any() else vocab // 2 for row in logits
    ]
    assert ids.tolist() == first.tolist()


@pytest.mark.parametrize("vocab", [1, 130, 5000])
def test_it_draws_what_the_cpu_draws(device: torch.device, vocab: int) -> None:
    from contracts.sampling import SamplingParams
    from kernels.triton.sampling import sample

    rows = 12
    logits = 2 * torch.randn(rows, vocab)
    temperatures = torch.tensor([0.0, 0.3, 0.8, 1.0, 1.7, 0.7] * 2)
    bits = [keys(seed, 7 * seed + 1) for seed in range(rows)]
    signed = torch.tensor([[_signed(key) for key in pair] for pair in bits])
    _, ids = sample(logits.to(device), temperatures.to(device), signed.to(device))
    expected = [
        int(row.argmax()) if not warmth else choose(row, SamplingParams(temperature=warmth), pair)
        for row, warmth, pair in zip(logits, temperatures.tolist(), bits, strict=True)
    ]
    assert ids.tolist() == expected


def test_the_noise_is_the_cpus(device: torch.device) -> None:
    """A single weight at place i arrives at E_i: what the kernel notes of a race is that very number."""
    from kernels.triton.sampling import run_race_kernel

    runs, key = 16, (1 << 63) + 12345
    logits = torch.full((1, 128 * runs), -INF, device=device)
    logits[0, 128 * 5 + 3] = 0.0
    arrivals = torch.full((1, 1), NAN, dtype=torch.float64, device=device)
    winners = torch.full((1, 1), -1, dtype=torch.int32, device=device)
    ones = torch.ones(1, device=device)
    signed = torch.tensor([[_signed(key), 0]], device=device)
    run_race_kernel[(1, 1)](
        logits, 0 * ones, ones, signed, arrivals, winners, 128 * runs, 128 * runs, 1, RUN=128, RUNS=runs
    )
    assert winners.item() == 5
    assert arrivals.item() == pytest.approx(exponentials(key, runs)[5], rel=1e-15)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
def test_a_row_that_is_not_finite_says_so(device: torch.device) -> None:
    from kernels.triton.sampling import sample

    logits = torch.zeros(3, 300, device=device)
    logits[0, 200], logits[1, 9], logits[2] = NAN, INF, -INF
    values, ids = sample(logits, torch.ones(3, device=device), torch.zeros(3, 2, dtype=torch.int64, device=device))
    assert not values.isfinite().any()
    assert all(0 <= i < 300 for i in ids.tolist())


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


FILTERS = [
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 10_000},
    {},
]


@pytest.mark.parametrize("tied", [False, True])
def test_filters_are_the_cpus(device: torch.device, tied: bool) -> None:
    from contracts.sampling import SamplingParams
    from kernels.sampling import Wish
    from kernels.triton.choosing import choose_tokens

    logits = 2 * torch.randn(len(FILTERS) + 3, 300)
    if tied:  # then ids decide what is kept
        logits = logits.round()
    wishes, expected = [], []
    rows = [*range(1, len(FILTERS) + 1)]
    for row, filters in zip(rows, FILTERS, strict=True):
        params = SamplingParams(temperature=0.7, **filters)
        pair = keys(row, 100 + row)
        wishes.append(Wish(0.7, params.top_k, params.top_p, params.min_p, pair))
        expected.append(choose(logits[row], params, pair))
    rows.append(0)
    wishes.append(Wish())
    expected.append(int(logits[0].argmax()))
    kept = logits.clone()
    on_device = logits.to(device)
    found = choose_tokens(on_device, rows, wishes)
    assert [drawn.token_id for drawn in found] == expected
    assert torch.equal(on_device.cpu(), kept)


def test_greedy_rows_alone_and_rows_without_a_token(device: torch.device) -> None:
    from kernels.sampling import Wish
    from kernels.triton.choosing import choose_tokens

    logits = torch.randn(3, 50, device=device)
    logits[1, 7] = NAN
    assert [d.token_id for d in choose_tokens(logits, range(3), [Wish()] * 3)] == [
        int(logits[0].argmax()),
        -1,
        int(logits[2].argmax()),
    ]
    assert choose_tokens(logits, [], []) == []
