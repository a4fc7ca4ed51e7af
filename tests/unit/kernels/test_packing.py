"""Native packing beside its readable truth, bit by bit; what it costs in digits; neighbours that are never touched."""

import math

import pytest
import torch

from kernels.cpu.packing import NativePacking
from kernels.packing import LARGEST, pack, packed_bytes, unpack

SHAPES = [(1, 1, 1, 1), (2, 16, 3, 64), (3, 5, 2, 20), (4, 16, 1, 80)]
DTYPES = [torch.float32, torch.bfloat16]


def cache_of(shape, dtype, seed=0):
    layers, size, heads, width = shape
    blocks = torch.randn(6, layers, 2, size, heads, width, generator=torch.Generator().manual_seed(seed))
    # Heads of unlike magnitudes, one of them all zeros.
    blocks *= torch.logspace(-3, 3, heads).view(1, 1, 1, 1, heads, 1)
    blocks[3, 0, 1, :, 0] = 0.0
    return blocks.to(dtype)


@pytest.mark.parametrize("form", list(LARGEST))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_and_values_are_those_of_the_truth(library, shape, dtype, form):
    cache = cache_of(shape, dtype)
    ids = [4, 0, 3]
    native = NativePacking(library, cache, form)
    assert native.block_bytes == packed_bytes(*shape)
    packed = torch.full((3 * native.block_bytes,), 0xAB, dtype=torch.uint8)
    native.pack(ids, packed)
    truth = pack(cache[ids], form)
    assert torch.equal(packed.view(3, -1), truth)
    target = torch.full_like(cache, math.nan)
    NativePacking(library, target, form).unpack(packed, [1, 5, 2])
    wanted = torch.full_like(cache[:3], math.nan)
    unpack(truth, wanted, form)
    assert torch.equal(target[[1, 5, 2]], wanted)
    assert target[[0, 3, 4]].isnan().all()


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
    native.pack([0], packed)
    assert torch.equal(packed.view(1, -1), pack(cache, form))


def test_any_number_of_threads_makes_the_same_bytes(library):
    cache = cache_of((3, 5, 2, 20), torch.bfloat16)
    native = NativePacking(library, cache, "fp8")
    threads, seen = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            packed = torch.empty(6 * native.block_bytes, dtype=torch.uint8)
            native.pack(range(6), packed)
            seen.append(packed)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_what_does_not_fit_is_refused(library):
    cache = cache_of((2, 16, 3, 64), torch.float32)
    native = NativePacking(library, cache, "int8")
    room = torch.empty(native.block_bytes, dtype=torch.uint8)
    native.pack([], room)
    for ids, packed in (([6], room), ([-1], room), ([0, 1], room), ([0], room.float())):
        with pytest.raises(ValueError):
            native.pack(ids, packed)
        with pytest.raises(ValueError):
            native.unpack(packed, ids)
    for wrong in (cache[0], cache.half(), cache.transpose(3, 4)):
        with pytest.raises(ValueError):
            NativePacking(library, wrong, "int8")
