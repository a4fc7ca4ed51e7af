"""RMS norm, rotary and SiLU·mul against float64: odd shapes, rows cut out of larger tensors, nothing left unwritten."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import rms_norm as reference_rms_norm
from tests.gpu.dense import assert_near


@pytest.fixture(autouse=True)
def _empty_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write shows."""
    empty = torch.empty

    def filled(*shape: object, **more: object) -> torch.Tensor:
        made = empty(*shape, **more)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(99)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("shape", [(1, 64), (5, 33), (3, 4, 16)])
def test_rms_norm(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from kernels.triton.small import rms_norm

    x, weight = (3 * torch.randn(shape)).to(dtype), torch.rand(shape[-1]).to(dtype)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_near(rms_norm(x.to(device), weight.to(device), 1e-5), exact)


def test_rms_norm_of_heads_cut_out_of_a_projection(device: torch.device, dtype: torch.dtype) -> None:
    from kernels.triton.small import rms_norm

    x, weight = torch.randn(3, 9, 16).to(dtype).to(device), torch.rand(16).to(dtype).to(device)
    assert_near(rms_norm(x[:, 2:5], weight, 1e-6), reference_rms_norm(x[:, 2:5].double(), weight.double(), 1e-6).cpu())


def test_rms_norm_of_a_sum(device: torch.device, dtype: torch.dtype) -> None:
    from kernels.triton.small import add_rms_norm

    x, residual, weight = (torch.randn(s).to(dtype).to(device) for s in ((5, 48), (5, 48), (48,)))
    kept = residual.clone()
    normed, summed = add_rms_norm(x, residual, weight, 1e-5)
    # The interpreter cuts float32 to bfloat16 where a GPU rounds.
    cut = 2**-7 if device.type == "cpu" and dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(summed, x + residual, rtol=cut, atol=0)
    assert torch.equal(residual, kept)
    assert_near(normed, reference_rms_norm(summed.double(), weight.double(), 1e-5).cpu())


@pytest.mark.parametrize("rows", [1, 5])
def test_rotary(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    from kernels.triton.small import rotary

    heads, size = 9, 10
    x = torch.randn(rows, heads + 2, size).to(dtype)
    angles = 6 * torch.rand(rows, 1, size // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = rotary(x.to(device)[:, :heads], torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device))
    first, second = x[:, :heads].double().chunk(2, -1)
    c, s = cos.double(), sin.double()
    assert_near(found, torch.cat((first * c - second * s, second * c + first * s), -1))


@pytest.mark.parametrize("size", [23, 2100])
def test_silu_mul(device: torch.device, dtype: torch.dtype, size: int) -> None:
    from kernels.triton.small import silu_mul

    x = torch.randn(3, 2 * size).to(dtype)
    gate, up = x.double().chunk(2, -1)
    assert_near(silu_mul(x.to(device)), gate * torch.sigmoid(gate) * up)


def test_no_rows_are_no_work(device: torch.device, dtype: torch.dtype) -> None:
    from kernels.triton.small import add_rms_norm, rms_norm, rotary, silu_mul

    nothing = torch.zeros(0, 8, dtype=dtype, device=device)
    weight = torch.ones(8, dtype=dtype, device=device)
    assert rms_norm(nothing, weight, 1e-5).shape == (0, 8)
    assert add_rms_norm(nothing, nothing, weight, 1e-5)[0].shape == (0, 8)
    assert silu_mul(nothing).shape == (0, 4)
    empty = nothing.view(0, 1, 8)
    assert rotary(empty, empty, empty).shape == (0, 1, 8)
