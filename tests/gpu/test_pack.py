"""KV blocks to bytes and back: each record's scale and bytes as their definition has them, and nobody else's block changed."""

from __future__ import annotations

import pytest
import torch

from kernels.packing import Form, TorchPacking, packed_bytes
from kernels.packing import pack as truth

NAN = float("nan")
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@pytest.mark.parametrize("shape", [(5, 2, 2, 4, 2, 8), (3, 1, 2, 5, 1, 6)], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_there_and_back(device: torch.device, dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    from kernels.triton.pack import LARGEST, pack, packed_bytes, unpack

    cache = torch.full(shape, NAN, dtype=dtype)
    ids = torch.tensor([2, 0], dtype=torch.int32)
    cache[ids.long()] = (torch.randn(2, *shape[1:]) * 10 ** (3 * torch.rand(2, *shape[1:]) - 2)).to(dtype)
    cache[2, 0, 1] = 0
    packed = pack(cache.to(device), ids.to(device), kind)
    _, layers, _, block_size, kv_heads, size = shape
    assert packed.shape == (2, packed_bytes(cache)) == (2, layers * 2 * kv_heads * (4 + block_size * size))
    records = packed.cpu().view(2, layers, 2, kv_heads, 4 + block_size * size)
    scale = records[..., :4].contiguous().view(torch.float32)
    wide = cache[ids.long()].float().permute(0, 1, 2, 4, 3, 5).reshape(2, layers, 2, kv_heads, -1)
    exact = wide.abs().amax(-1, keepdim=True) / LARGEST[kind]
    torch.testing.assert_close(scale, exact, rtol=1e-6, atol=0)
    divided = wide / torch.where(scale > 0, scale, 1.0)
    expected = divided.round() if kind == "int8" else divided
    assert torch.equal(records[..., 4:].contiguous().view(DTYPES[kind]).float(), expected.to(DTYPES[kind]).float())

    target = torch.full(shape, NAN, dtype=dtype, device=device)
    back = torch.tensor([1, 2], dtype=torch.int32, device=device)
    unpack(packed, target, back, kind)
    found = target.cpu()
    steps = records[..., 4:].contiguous().view(DTYPES[kind]).float() * scale
    expected = steps.view(2, layers, 2, kv_heads, block_size, size).permute(0, 1, 2, 4, 3, 5).to(dtype)
    # The interpreter cuts float32 to bfloat16 where a GPU rounds.
    cut = 2**-7 if device.type == "cpu" and dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(found[1:3], expected, rtol=cut, atol=0)
    assert found[[i for i in range(shape[0]) if i not in (1, 2)]].isnan().all()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_worker_s_rows_are_those_of_the_truth(device: torch.device, kind: Form) -> None:
    """Rows of the host's memory, in any place: what transfers give. In float32, which the interpreter rounds as a GPU does."""
    from kernels.triton.pack import TritonPacking

    cache = torch.randn(5, 2, 2, 4, 2, 8)
    memory = torch.full((3, packed_bytes(2, 4, 2, 8) + 3), 0xAB, dtype=torch.uint8)
    rows = [memory[i, :-3] for i in (2, 0, 1)]
    TritonPacking(cache.to(device), kind).pack([4, 0, 2], rows)
    assert torch.equal(torch.stack(rows), truth(cache[[4, 0, 2]], kind))
    assert bool((memory[:, -3:] == 0xAB).all())
    wanted, found = torch.full_like(cache, NAN), torch.full_like(cache, NAN).to(device)
    TorchPacking(wanted, kind).unpack(rows, [1, 3, 4])
    TritonPacking(found, kind).unpack(rows, [1, 3, 4])
    assert torch.equal(found.cpu().nan_to_num(7e7), wanted.nan_to_num(7e7))


def test_no_blocks_and_wrong_sizes(device: torch.device) -> None:
    from kernels.triton.pack import pack, unpack

    cache = torch.zeros(2, 1, 2, 4, 1, 8, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    packed = pack(cache, none, "int8")
    unpack(packed, cache, none, "int8")
    with pytest.raises(ValueError, match=r"packed KV is \(0, 72\), expected \(1, 72\)"):
        unpack(packed, cache, torch.zeros(1, dtype=torch.int32, device=device), "int8")
