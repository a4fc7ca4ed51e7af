"""The ground that native ops stand on: vector arithmetic, rounding, barriers, and one pool of threads for torch and us."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import I32, INT, PTR, Library, mapped_openmp_libraries

CORE = {
    "dt_exp": (PTR, PTR, INT, I32),
    "dt_round_to_bf16": (PTR, PTR, INT),
    "dt_row_sums": (PTR, PTR, INT, INT, I32),
}
NAN = float("nan")


def exp(library: Library, x: torch.Tensor, threads: int = 2) -> torch.Tensor:
    out = torch.full_like(x, NAN)
    library.bind(CORE)["dt_exp"](out.data_ptr(), x.data_ptr(), x.numel(), threads)
    return out


@pytest.mark.parametrize("count", [1, 15, 16, 17, 4099])
def test_exp_is_right_to_the_last_place(library: Library, count: int) -> None:
    x = torch.linspace(-87, 87, count)
    exact = x.double().exp()
    assert ((exp(library, x).double() - exact) / exact).abs().max() < 1.2e-7


def test_exp_of_what_is_no_number_or_beyond_all(library: Library) -> None:
    found = exp(library, torch.tensor([NAN, float("inf"), float("-inf"), -1000.0, 0.0]))
    assert found[0].isnan()
    assert found[1] > 1e38
    assert 0 <= found[2] < 1e-37
    assert 0 <= found[3] < 1e-37
    assert found[4] == 1


@pytest.mark.parametrize("count", [1, 16, 33, 5000])
def test_rounding_is_to_nearest_even_and_keeps_what_is_no_number(library: Library, count: int) -> None:
    torch.manual_seed(0)
    # All exponents but of denormals (the BF16 instructions make zero of those), ties, and largest values, which become infinity.
    x = torch.randn(count) * torch.exp2(torch.randint(-100, 120, (count,)).float())
    x[::7] = torch.randint(0, 2**15, (len(x[::7]),)).float() * 2 + 1
    x[0] = 3.4e38
    if count > 4:
        x[1:5] = torch.tensor([NAN, float("inf"), float("-inf"), 0.0])
    out = torch.full((count,), NAN, dtype=torch.bfloat16)
    library.bind(CORE)["dt_round_to_bf16"](out.data_ptr(), x.data_ptr(), count)
    assert torch.equal(out.nan_to_num(7), x.bfloat16().nan_to_num(7))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_meet_at_every_barrier(library: Library, threads: int) -> None:
    """Each row's sum is added to the one before, which another thread made: more threads than cores, too."""
    torch.manual_seed(0)
    x = torch.randint(-50, 50, (301, 37)).float()
    out = torch.full((301,), NAN)
    library.bind(CORE)["dt_row_sums"](out.data_ptr(), x.data_ptr(), 301, 37, threads)
    assert torch.equal(out, x.sum(1).cumsum(0))


def test_torch_and_the_library_share_one_pool_of_threads(library: Library) -> None:
    exp(library, torch.zeros(64))
    assert len(mapped_openmp_libraries()) == 1
