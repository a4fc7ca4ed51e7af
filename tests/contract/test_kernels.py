"""Every implementation of every op against dense float64 arithmetic: odd shapes, both dtypes, NaN wherever nobody may look."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kernels.batch import Segment
from kernels.cpu.config import compiler
from kernels.cpu.kernels import native
from kernels.cpu.library import load, supported_isas
from kernels.dispatch import REFERENCE, TORCH, Kernels, choose
from kernels.torch_linear import size_for
from tests.gpu.dense import attended

# The best instruction set of this machine and the plainest, which proves it; those between have tests/unit/kernels.
NATIVE = (
    [native(load(isa)) for isa in dict.fromkeys(supported_isas()[:1] + supported_isas()[-1:])] if compiler() else []
)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=[REFERENCE, TORCH, *NATIVE], ids=lambda kernels: kernels.name)
def ops(request: pytest.FixtureRequest) -> Kernels:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: Kernels = request.param
    return found


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def assert_near(found: Tensor, exact: Tensor) -> None:
    limit = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), exact, atol=limit, rtol=limit)


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 67])
@pytest.mark.parametrize("shape", [(8, 8), (48, 40), (129, 65), (3, 17)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(ops: Kernels, dtype: torch.dtype, rows: int, shape: tuple[int, int], bias: bool) -> None:
    outs, ins = shape
    x, weight = torch.randn(rows, ins).to(dtype), (torch.randn(outs, ins) / ins**0.5).to(dtype)
    b = torch.randn(outs).to(dtype) if bias else None
    residual = torch.randn(rows, outs).to(dtype)
    kept = residual.clone()
    exact = x.double() @ weight.double().T + (b.double() if b is not None else 0)
    linear = ops.linear(weight, b)
    assert_near(linear(x), exact)
    assert_near(linear(x, residual), exact + kept.double())
    assert torch.equal(residual, kept)


def test_rows_come_in_few_sizes_and_little_is_computed_in_vain() -> None:
    sizes = {rows: size_for(rows) for rows in range(1, 2049)}
    assert all(rows <= size < rows * 17 / 16 for rows, size in sizes.items())
    assert all(size == rows for rows, size in sizes.items() if rows <= 32)
    assert all(size_for(size) == size for size in sizes.values())
    assert len(set(sizes.values())) <= 32 + 6 * 16


def test_linear_takes_rows_cut_out_of_a_larger_tensor(ops: Kernels, dtype: torch.dtype) -> None:
    wide, weight = torch.randn(6, 80).to(dtype), (torch.randn(24, 32) / 6).to(dtype)
    assert_near(ops.linear(weight, None)(wide[1:5, 16:48]), wide[1:5, 16:48].double() @ weight.double().T)


@pytest.mark.parametrize("shape", [(1, 64), (5, 33), (3, 4, 16)])
def test_rms_norm(ops: Kernels, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = (3 * torch.randn(shape)).to(dtype), torch.rand(shape[-1]).to(dtype)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_near(ops.rms_norm(x, weight, 1e-5), exact)


def test_rms_norm_of_heads_cut_out_of_a_projection(ops: Kernels, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 9, 16).to(dtype), torch.rand(16).to(dtype)
    wide = x[:, 2:5].double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_near(ops.rms_norm(x[:, 2:5], weight, 1e-6), exact)


@pytest.mark.parametrize("rows", [1, 5])
def test_rotary(ops: Kernels, dtype: torch.dtype, rows: int) -> None:
    heads, size = 3, 10
    x = torch.randn(rows, heads + 2, size).to(dtype)
    angles = 6 * torch.rand(rows, 1, size // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    kept = x.clone()
    found = ops.rotary(x[:, :heads], torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    first, second = x[:, :heads].double().chunk(2, -1)
    c, s = cos.double(), sin.double()
    assert_near(found, torch.cat((first * c - second * s, second * c + first * s), -1))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding(ops: Kernels, dtype: torch.dtype, tied: bool) -> None:
    """Bit for bit, and a tied one is the output matrix, too."""
    table = torch.randn(53, 24).to(dtype)
    ids = torch.tensor([0, 52, 17, 17, 31])
    if tied:
        look_up, head = ops.tied(table.clone())
        assert_near(head(table[:3]), table[:3].double() @ table.double().T)
    else:
        look_up = ops.embedding(table.clone())
    assert torch.equal(look_up(ids), table[ids])


@pytest.mark.parametrize("rows", [1, 9])
def test_silu_mul(ops: Kernels, dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 46).to(dtype)
    gate, up = x.double().chunk(2, -1)
    assert_near(ops.silu_mul(x), gate * torch.sigmoid(gate) * up)


LAYERS, BLOCK_SIZE, HEAD_SIZE = 2, 4, 8
# name: (query heads, KV heads), windows of the two layers, requests as (tokens computed before, tokens now)
STEPS = {
    "one decode row": [(9, 1)],
    "first token of all": [(0, 1)],
    "decode rows of one length": [(7, 1), (7, 1), (7, 1)],
    "ragged decode rows": [(0, 1), (30, 1), (3, 1), (15, 1), (16, 1)],
    "decode rows too unlike to pad": [(1200, 1), (2, 1), (1190, 1), (5, 1)],
    "whole prompts": [(0, 5), (0, 16), (0, 2)],
    "chunks on top of context": [(5, 3), (16, 7), (1, 2)],
    "decodes then chunks": [(12, 1), (3, 1), (0, 6), (9, 10)],
    "chunks between decodes": [(0, 6), (12, 1), (9, 10), (3, 1)],
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("windows", [(None, None), (6, None), (1, 40)], ids=str)
def test_attention(
    ops: Kernels, dtype: torch.dtype, step: str, heads: tuple[int, int], windows: tuple[int | None, int | None]
) -> None:
    """Unheld blocks, cells behind the last token and tokens of nobody are NaN, before and after."""
    work = STEPS[step]
    num_heads, num_kv_heads = heads
    held = [-(-(before + now) // BLOCK_SIZE) for before, now in work]
    num_blocks = sum(held) + 3
    ids = list(range(num_blocks))
    random.Random(1).shuffle(ids)
    cache = torch.full((num_blocks, LAYERS, 2, BLOCK_SIZE, num_kv_heads, HEAD_SIZE), float("nan"), dtype=dtype)
    segments, contexts = [], []
    row = 0
    for (before, now), count in zip(work, held, strict=True):
        block_ids = [ids.pop() for _ in range(count)]
        segments.append(Segment(row, now, before, block_ids))
        row += now
        context = torch.randn(before, LAYERS, 2, num_kv_heads, HEAD_SIZE).to(dtype)
        contexts.append(context)
        for position in range(before):
            cache[block_ids[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE] = context[position]
    memory = ops.kv_cache(cache, windows)
    attention = memory.attention(segments)
    for layer in reversed(range(LAYERS)):
        # As a decoder passes them: heads of one projection, side by side.
        qkv = torch.randn(row, num_heads + 2 * num_kv_heads, HEAD_SIZE).to(dtype)
        query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
        found = attention(layer, query, key, value)
        assert found.shape == (row, num_heads * HEAD_SIZE)
        for segment, context in zip(segments, contexts, strict=True):
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            keys = torch.cat((context[:, layer, 0], key[rows])).double()
            values = torch.cat((context[:, layer, 1], value[rows])).double()
            exact = attended(query[rows].double(), keys, values, segment.num_computed, windows[layer])
            assert_near(found[rows], exact.flatten(1))
            for position in range(segment.num_computed, segment.context_len):
                cell = cache[segment.block_ids[position // BLOCK_SIZE], layer, :, position % BLOCK_SIZE]
                at = segment.first_row + position - segment.num_computed
                assert torch.equal(cell, torch.stack((key[at], value[at])))
    untouched = torch.ones(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    for segment in segments:
        for position in range(segment.context_len):
            untouched[segment.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE] = False
    assert cache.permute(0, 3, 1, 2, 4, 5)[untouched].isnan().all()


def test_a_row_does_not_see_who_shares_its_step(ops: Kernels, dtype: torch.dtype) -> None:
    """Bit for bit where the kernels are exact; the matrix products of a library may depend on the number of rows."""
    torch.manual_seed(0)
    cache = torch.randn(9, 1, 2, BLOCK_SIZE, 2, HEAD_SIZE).to(dtype)
    query, key, value = (torch.randn(3, heads, HEAD_SIZE).to(dtype) for heads in (4, 2, 2))
    segments = [Segment(0, 1, 6, [3, 1]), Segment(1, 1, 11, [0, 2, 5]), Segment(2, 1, 0, [7])]
    together = ops.kv_cache(cache.clone(), (None,)).attention(segments)(0, query, key, value)
    for i, segment in enumerate(segments):
        alone = ops.kv_cache(cache.clone(), (None,)).attention(
            [Segment(0, 1, segment.num_computed, segment.block_ids)]
        )(0, query[i : i + 1], key[i : i + 1], value[i : i + 1])
        limit = 0 if ops.exact else TOLERANCE[dtype]
        torch.testing.assert_close(alone[0], together[i], atol=limit, rtol=limit)


def test_segments_with_a_gap_are_refused(ops: Kernels) -> None:
    if ops is REFERENCE:
        pytest.skip("it computes what it is told, and checks nothing")
    cache = ops.kv_cache(torch.zeros(4, 1, 2, BLOCK_SIZE, 1, 8), (None,))
    with pytest.raises(ValueError, match="starts at row 2, expected 1"):
        cache.attention([Segment(0, 1, 0, [0]), Segment(2, 1, 0, [1])])


def test_kv_memory_must_be_contiguous_and_have_a_window_per_layer(ops: Kernels) -> None:
    if ops is REFERENCE:
        pytest.skip("it computes what it is told, and checks nothing")
    cache = torch.zeros(4, 2, 2, BLOCK_SIZE, 1, 8)
    with pytest.raises(ValueError, match="contiguous"):
        ops.kv_cache(cache[:, :1], (None,))
    with pytest.raises(ValueError, match="1 windows for 2 layers"):
        ops.kv_cache(cache, (None,))


def test_choice_is_made_once_and_says_what_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    choose.cache_clear()
    with caplog.at_level("INFO", logger="kernels"):
        assert choose("cpu", torch.float32) is choose("cpu", torch.float32)
    assert len(caplog.records) == 1
    with pytest.raises(ValueError, match=r"tpu.*known: cpu, cuda"):
        choose("tpu", torch.float32)
    with pytest.raises(ValueError, match=r"float16.*known: torch\.float32, torch\.bfloat16"):
        choose("cpu", torch.float16)
