"""Native packing beside its readable truth, bit by bit; what it costs in digits; neighbours that are never touched."""

import math

import pytest
import torch

from kernels.cpu.packing import NativePacking
from kernels.dispatch import REFERENCE
from kernels.packing import LARGEST, TorchPacking, pack, packed_bytes, unpack

SHAPES = [(1, 1, 1, 1), (2, 16, 3, 64), (3, 5, 2, 20), (4, 16, 1, 80)]
DTYPES = [torch.float32, torch.bfloat16]


def cache_of(shape, dtype, seed=0):
    layers, size, heads, width = shape
    blocks = torch.randn(6, layers, 2, size, heads, width, generator=torch.Generator().manual_seed(seed))
    # Heads of unlike magnitudes, one of them all zeros.
    blocks *= torch.logspace(-3, 3, heads).view(1, 1, 1, 1, heads, 1)
    blocks[3, 0, 1, :, 0] = 0.0
    return blocks.to(dtype)


def rows_of(num_rows, num_bytes):
    """Rows with a byte between them, in an order of their own, and the memory that has them."""
    memory = torch.full((num_rows, num_bytes + 1), 0xAB, dtype=torch.uint8)
    return memory, [memory[i, :num_bytes] for i in reversed(range(num_rows))]


@pytest.mark.parametrize("form", list(LARGEST))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_and_values_are_those_of_the_truth(library, shape, dtype, form):
    cache = cache_of(shape, dtype)
    ids = [4, 0, 3]
    native = NativePacking(library, cache, form)
    assert native.block_bytes == packed_bytes(*shape)
    truth = pack(cache[ids], form)
    wanted = torch.full_like(cache[:3], math.nan)
    unpack(truth, wanted, form)
    for packing in (native, TorchPacking(cache, form)):
        memory, rows = rows_of(3, native.block_bytes)
        packing.pack(ids, rows)
        assert torch.equal(torch.stack(rows), truth)
        assert bool((memory[:, -1] == 0xAB).all())
        target = torch.full_like(cache, math.nan)
        (NativePacking(library, target, form) if packing is native else TorchPacking(target, form)).unpack(
            rows, [1, 5, 2]
        )
        assert torch.equal(target[[1, 5, 2]], wanted)
        assert target[[0, 3, 4]].isnan().all()


def test_the_kernels_of_a_machine_pack(library):
    from kernels.cpu.kernels import native

    cache = cache_of((2, 4, 1, 8), torch.float32)
    assert isinstance(native(library).packing(cache, "int8"), NativePacking)
    assert isinstance(REFERENCE.packing(cache, "int8"), TorchPacking)


@pytest.mark.parametrize(("form", "digits"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
def test_what_is_lost_is_no_more_than_the_form_says(form, digits):
    cache = cache_of((2, 16, 3, 64), torch.float32)
    back = torch.empty_like(cache)
    unpack(pack(cache, form), back, form)
    largest = cache.abs().amax((3, 5), keepdim=True)
    reach = largest if form == "int8" else torch.maximum(cache.abs(), largest * 2**-6 / 448)
    assert bool(((back - cache).abs() <= reach * digits * 1.0001).all())
    assert bool((back[3, 0, 1, :, 0] == 0).all())


@pytest.mark.parametrize("form", list(LARGEST))
def test_every_byte_of_a_form_is_read_and_written_as_torch_does(library, form):
    """All codes that packing can make, at a scale of one."""
    codes = torch.arange(256, dtype=torch.uint8)
    narrow = codes.view(torch.int8 if form == "int8" else torch.float8_e4m3fn)
    values = narrow.float()
    kept = values.isfinite() & (values.abs() <= LARGEST[form])
    values = torch.where(kept, values, torch.zeros_like(values))
    # Halves of neighbours too: ties go to even.
    ties = (values[:-1] + values[1:]) / 2
    whole = torch.cat((values, ties, torch.tensor([LARGEST[form]])))
    cache = torch.zeros(1, 1, 2, 1, 1, len(whole))
    cache[0, 0, :] = whole
    native = NativePacking(library, cache, form)
    packed = torch.empty(native.block_bytes, dtype=torch.uint8)
    native.pack([0], [packed])
    assert torch.equal(packed.view(1, -1), pack(cache, form))


def test_what_does_not_fit_is_refused(library):
    cache = cache_of((2, 16, 3, 64), torch.float32)
    native = NativePacking(library, cache, "int8")
    row = torch.empty(native.block_bytes, dtype=torch.uint8)
    native.pack([], [])
    for ids, rows in (([6], [row]), ([-1], [row]), ([0, 1], [row]), ([0], [row.float()]), ([0], [row[1:]])):
        with pytest.raises(ValueError):
            native.pack(ids, rows)
        with pytest.raises(ValueError):
            native.unpack(rows, ids)
    for wrong in (cache[0], cache.half(), cache.transpose(3, 4)):
        with pytest.raises(ValueError):
            NativePacking(library, wrong, "int8")
