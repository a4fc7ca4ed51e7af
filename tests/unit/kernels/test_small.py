"""The native small ops against float64, on odd shapes, cut-out views and every instruction set."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import Library
from kernels.cpu.small import Small

# Rounded once: half a unit in the last place, and what float32 arithmetic adds.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8 * 1.01}
DTYPES = [torch.float32, torch.bfloat16]


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    error = (found.double() - exact).abs()
    assert (error <= ROUNDING[found.dtype] * exact.abs() + 1e-6).all(), (error / exact.abs()).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (2, 16), (5, 100), (7, 896), (3, 5, 64)], ids=str)
def test_rms_norm(library: Library, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = Small(library).rms_norm(x, weight, 1e-6)
    assert_rounded_once(found, exact)
    for row in range(shape[0]):
        assert torch.equal(Small(library).rms_norm(x[row : row + 1], weight, 1e-6)[0], found[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 1, 2), (3, 4, 10), (9, 3, 64), (2, 5, 128), (4, 2, 80)])
def test_rotary_of_heads_cut_out_of_a_projection(
    library: Library, dtype: torch.dtype, rows: int, heads: int, size: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, heads + 2, size).to(dtype)
    angles = 6 * torch.rand(rows, 1, size // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = Small(library).rotary(x[:, 1:-1], torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    first, second = x[:, 1:-1].double().chunk(2, -1)
    c, s = cos.double(), sin.double()
    exact = torch.cat((first * c - second * s, second * c + first * s), -1)
    # Two terms may cancel: the error is of their size.
    size_of = torch.cat((first.abs() + second.abs(),) * 2, -1)
    assert ((found.double() - exact).abs() <= ROUNDING[dtype] * size_of).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (2, 23), (1, 257), (5, 512), (3, 600)])
def test_silu_mul(library: Library, dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    x = (4 * torch.randn(rows, 2 * width)).to(dtype)
    x[0, 0] = -200
    gate, up = x.double().chunk(2, -1)
    found = Small(library).silu_mul(x)
    assert_rounded_once(found, gate * torch.sigmoid(gate) * up)


def test_no_rows_are_no_trouble(library: Library) -> None:
    small = Small(library)
    assert small.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert small.silu_mul(torch.empty(0, 8)).shape == (0, 4)
