"""Linear on quantised weights, on every instruction set: the truth's values, the same bits everywhere, nothing of a neighbour's."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.library import Library
from kernels.cpu.linear import PackedLinear, quantised_linear_of
from kernels.quantised import GROUP, Format, QuantisedLinear, QuantisedWeight, quantise, rounded, stacked

FORMATS: tuple[Format, ...] = ("int8", "int4", "int4_k")
# Inputs × outputs: a part of a group, groups that fill no line of scales, more than a panel, one more than whole panels.
SHAPES = [(7, 3), (32, 16), (96, 40), (320, 65), (600, 17)]


def weight_of(form: Format, outputs: int, inputs: int) -> QuantisedWeight:
    values = torch.randn(outputs, inputs)
    if form != "int4_k":
        return quantise(values, form)
    groups = -(-inputs // GROUP)
    supers = -(-groups // 8)
    d, dmin = (torch.rand(outputs, supers).half() / 8 for _ in range(2))
    s, m = (torch.randint(0, 64, (outputs, groups), dtype=torch.uint8) for _ in range(2))
    stored = torch.randint(0, 16, (outputs, groups * GROUP), dtype=torch.uint8)
    return QuantisedWeight(form, inputs, stored, (d[:, : -(-groups // 8)], dmin, s, m))


def made(library: Library, weight: QuantisedWeight, dtype: torch.dtype, bias: Tensor | None = None) -> PackedLinear:
    return quantised_linear_of(library)(weight, bias, dtype)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_values_are_those_of_the_truth(
    library: Library, form: Format, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    weight, bias = weight_of(form, outputs, inputs), torch.randn(outputs).to(dtype)
    x = torch.randn(5, inputs).to(dtype)
    residual = torch.randn(5, outputs).to(dtype)
    y = made(library, weight, dtype, bias)(x, residual)
    truth = QuantisedLinear(weight, bias)(x.float(), residual.float())
    size = QuantisedLinear(weight, None)(x.float()).abs().amax().item() + 4
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), truth, atol=tolerance * size, rtol=0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_company(library: Library, form: Format, dtype: torch.dtype) -> None:
    linear = made(library, weight_of(form, 70, 160), dtype)
    x = torch.randn(601, 160).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x[:40]])
    for count in (2, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 31, 40):
        assert torch.equal(linear(x[:count]), alone[:count]), count
    assert torch.equal(linear(x)[:40], alone)
    assert torch.equal(linear(x.flip(0)).flip(0), linear(x))


@pytest.mark.parametrize("form", FORMATS)
def test_chunks_of_wide_rows_are_cut_where_it_does_not_show(library: Library, form: Format) -> None:
    linear = made(library, weight_of(form, 33, 4864), torch.float32)
    x = torch.randn(130, 4864)
    assert torch.equal(linear(x), torch.cat([linear(part) for part in x.split(11)]))


@pytest.mark.parametrize("form", FORMATS)
def test_every_instruction_set_gives_the_same_bits(form: Format, libraries: list[Library]) -> None:
    weight, x = weight_of(form, 50, 288), torch.randn(9, 288)
    results = [made(library, weight, torch.float32)(x) for library in libraries]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("form", FORMATS)
def test_threads_do_not_show(library: Library, form: Format) -> None:
    linear, x = made(library, weight_of(form, 200, 96), torch.float32), torch.randn(20, 96)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(linear(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(library: Library, form: Format, poison: float) -> None:
    linear, x = made(library, weight_of(form, 20, 70), torch.float32), torch.randn(6, 70)
    clean = linear(x)
    x[2, 65] = poison
    y = linear(x)
    assert y[2].isnan().all()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(y[kept], clean[kept])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_weights_own(library: Library, form: Format, dtype: torch.dtype) -> None:
    weight = weight_of(form, 37, 100)
    ids = torch.tensor([36, 0, 15, 16, 0])
    assert torch.equal(made(library, weight, dtype).rows(ids), weight.dequantised()[ids].to(dtype))


@pytest.mark.parametrize("form", FORMATS)
def test_zeros_and_nothing(library: Library, form: Format) -> None:
    linear = made(library, weight_of(form, 18, 64), torch.float32)
    assert not linear(torch.zeros(3, 64)).any()
    assert not linear(torch.full((1, 64), 1e-38)).any()
    assert linear(torch.empty(0, 64)).shape == (0, 18)


@pytest.mark.parametrize(("form", "name"), [("int8", "Q8_0"), ("int4", "Q4_0")])
def test_quantising_is_ggufs(form: Format, name: str) -> None:
    """int4: as near as ours, for the library does not choose with the scale as it is stored."""
    values = torch.randn(40, 128)
    quant = gguf.GGMLQuantizationType[name]
    theirs = torch.from_numpy(np.asarray(gguf.dequantize(gguf.quantize(values.numpy(), quant), quant)))
    ours = quantise(values, form).dequantised()
    assert (ours - values).square().mean() <= 1.02 * (theirs - values).square().mean()


@pytest.mark.parametrize(("form", "most"), [("int8", 0.008), ("int4", 0.14)])
def test_what_rounding_costs(form: Format, most: float) -> None:
    values = torch.randn(64, 256)
    assert (quantise(values, form).dequantised() - values).norm() / values.norm() < most


def test_x_is_rounded_to_a_127th_of_its_groups_largest() -> None:
    x = torch.randn(4, 70)
    groups = torch.nn.functional.pad(x, (0, 26)).view(4, -1, GROUP).abs().amax(-1).repeat_interleave(GROUP, 1)[:, :70]
    assert ((rounded(x) - x).abs() <= groups / 253).all()


def test_weights_of_zeros_and_parts_one_below_the_other() -> None:
    zeros = quantise(torch.zeros(2, 40), "int4")
    assert not zeros.dequantised().any()
    parts = [quantise(torch.randn(rows, 40), "int4") for rows in (3, 5)]
    assert torch.equal(stacked(parts).dequantised(), torch.cat([part.dequantised() for part in parts]))
    with pytest.raises(AssertionError, match="unlike"):
        stacked([zeros, quantise(torch.zeros(2, 40), "int8")])
