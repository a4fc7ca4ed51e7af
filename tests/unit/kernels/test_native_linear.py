"""Native linear on every instruction set: against float64, within its own memory, and a row's bits whoever shares its call."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import Library
from kernels.cpu.linear import FUNCTIONS, PackedLinear, linear_of
from kernels.cpu.pages import CHUNK, HUGE_PAGE, Arena

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# (outputs, inputs): single ones, odd pairs, panels not full, more panels than threads, a whole tile of everything.
SHAPES = [(1, 1), (3, 17), (16, 2), (33, 65), (129, 40), (240, 301)]
# Below and above what one tile, one chunk and several chunks of rows hold.
ROWS = [1, 2, 5, 8, 15, 29, 67, 301]
GUARD = 40


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def guarded(values: Tensor) -> tuple[Tensor, Tensor]:
    """A copy between two stretches of NaN: what reads or writes beyond it shows. Returns (the whole, the copy)."""
    whole = torch.full((values.numel() + 2 * GUARD,), float("nan"), dtype=values.dtype)
    inner = whole[GUARD:-GUARD].view(values.shape)
    inner.copy_(values)
    return whole, inner


def made(library: Library, outs: int, ins: int, dtype: torch.dtype, bias: bool) -> tuple[PackedLinear, Tensor, Tensor]:
    """The op, and its weight and bias in float64."""
    weight = (torch.randn(outs, ins) / ins**0.5).to(dtype)
    b = torch.randn(outs).to(dtype) if bias else None
    return linear_of(library)(weight, b), weight.double(), torch.zeros(outs).double() if b is None else b.double()


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_as_float64_and_nothing_beyond_its_memory(
    library: Library, dtype: torch.dtype, shape: tuple[int, int], bias: bool
) -> None:
    outs, ins = shape
    linear, weight, b = made(library, outs, ins, dtype, bias)
    call = library.bind(FUNCTIONS)["dt_linear_f32" if dtype == torch.float32 else "dt_linear_bf16"]
    for rows in ROWS:
        _, x = guarded(torch.randn(rows, ins).to(dtype))
        around_residual, residual = guarded(torch.randn(rows, outs).to(dtype))
        kept = around_residual.clone()
        exact = x.double() @ weight.T + b
        for added, expected in ((None, exact), (residual.data_ptr(), exact + residual.double())):
            for threads in (1, 3):
                around, y = guarded(torch.full((rows, outs), float("nan"), dtype=dtype))
                call(linear._at, x.data_ptr(), rows, added, y.data_ptr(), threads)
                limit = 2e-5 if dtype == torch.float32 else 2**-8
                torch.testing.assert_close(y.double(), expected, atol=limit, rtol=limit)
                assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all()
        assert torch.equal(around_residual.nan_to_num(), kept.nan_to_num())


@DTYPES
@pytest.mark.parametrize("shape", [(33, 65), (240, 301)], ids=str)
def test_a_row_has_the_same_bits_whatever_shares_its_call(
    library: Library, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    outs, ins = shape
    linear, _, _ = made(library, outs, ins, dtype, bias=True)
    call = library.bind(FUNCTIONS)["dt_linear_f32" if dtype == torch.float32 else "dt_linear_bf16"]
    x, residual = torch.randn(max(ROWS), ins).to(dtype), torch.randn(max(ROWS), outs).to(dtype)
    alone = torch.cat([linear(x[i : i + 1], residual[i : i + 1]) for i in range(len(x))])
    for rows in ROWS:
        for first in {0, (max(ROWS) - rows) // 2, max(ROWS) - rows}:
            part = slice(first, first + rows)
            threads = 1 + (first + rows) % 4
            y = torch.full((rows, outs), float("nan"), dtype=dtype)
            call(linear._at, x[part].data_ptr(), rows, residual[part].data_ptr(), y.data_ptr(), threads)
            assert torch.equal(y, alone[part]), f"rows {first}…, {rows} of them, {threads} threads"


@DTYPES
def test_a_row_that_is_nan_or_infinite_stays_alone(library: Library, dtype: torch.dtype) -> None:
    linear, _, _ = made(library, 33, 65, dtype, bias=True)
    x = torch.randn(9, 65).to(dtype)
    clean = linear(x)
    poisoned = x.clone()
    poisoned[3], poisoned[7] = float("nan"), float("inf")
    found = linear(poisoned)
    others = [i for i in range(9) if i not in (3, 7)]
    assert torch.equal(found[others], clean[others])
    assert found[3].isnan().all() and not found[7].isfinite().any()


@DTYPES
def test_sums_are_float32_and_rounded_once_to_nearest_even(library: Library, dtype: torch.dtype) -> None:
    """Whole numbers that float32 adds exactly: any order gives the same, and rounding is all that is left."""
    weight = torch.randint(-8, 9, (48, 301)).to(dtype)
    x, bias = torch.randint(-8, 9, (7, 301)).to(dtype), torch.randint(-99, 100, (48,)).to(dtype)
    residual = torch.randint(-99, 100, (7, 48)).to(dtype)
    exact = x.double() @ weight.double().T + bias.double() + residual.double()
    assert torch.equal(linear_of(library)(weight, bias)(x, residual), exact.to(dtype))


@DTYPES
def test_the_result_may_take_the_residual_s_place(library: Library, dtype: torch.dtype) -> None:
    linear, _, _ = made(library, 129, 40, dtype, bias=True)
    call = library.bind(FUNCTIONS)["dt_linear_f32" if dtype == torch.float32 else "dt_linear_bf16"]
    x, residual = torch.randn(6, 40).to(dtype), torch.randn(6, 129).to(dtype)
    expected = linear(x, residual)
    call(linear._at, x.data_ptr(), 6, residual.data_ptr(), residual.data_ptr(), 2)
    assert torch.equal(residual, expected)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_the_weight_come_back_bit_for_bit(library: Library, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(dtype)
    linear = linear_of(library)(weight, None)
    ids = torch.randint(0, shape[0], (2 * shape[0],))
    assert torch.equal(linear.rows(ids), weight[ids])
    assert linear.rows(ids[:0]).shape == (0, shape[1])


def test_what_does_not_fit_is_refused(library: Library) -> None:
    linear, _, _ = made(library, 5, 8, torch.float32, bias=False)
    assert linear(torch.randn(0, 8)).shape == (0, 5)
    for x, residual in (
        (torch.randn(3, 7), None),
        (torch.randn(8), None),
        (torch.randn(3, 8).bfloat16(), None),
        (torch.randn(3, 8), torch.randn(2, 5)),
        (torch.randn(3, 8), torch.randn(3, 6)),
    ):
        with pytest.raises(AssertionError):
            linear(x, residual)
    for ids in (torch.tensor([5]), torch.tensor([-1]), torch.tensor([0.0])):
        with pytest.raises(AssertionError):
            linear.rows(ids)


def test_memory_is_shared_by_neighbours_starts_on_pages_and_goes_with_its_last_user() -> None:
    arena = Arena()
    small, next_to_it, large = arena.empty(5000), arena.empty(3), arena.empty(CHUNK + 1)
    assert next_to_it.data_ptr() == small.data_ptr() + 8192
    assert small.data_ptr() % HUGE_PAGE == 0 and large.data_ptr() % HUGE_PAGE == 0
    for memory in (small, next_to_it, large):
        assert not memory.any()
        memory.fill_(1)
    chunk = arena._open
    assert chunk is not None and chunk() is not None
    gone: weakref.ref[Tensor] = weakref.ref(large)
    del large, memory
    gc.collect()
    assert gone() is None and chunk() is None
    assert small.all() and next_to_it.all()
    assert not arena.empty(7).any()
