"""Paged attention and KV writes against dense float64: ragged steps, windows, NaN in every cell that nobody may see."""

from __future__ import annotations

import pytest
import torch

from kernels.batch import Segment
from kernels.reference import rotary
from tests.gpu.dense import TOLERANCE, Work, assert_near, world

STEPS: dict[str, Work] = {
    "one decode row": [(9, 1)],
    "ragged decode rows over several parts": [(0, 1), (530, 1), (3, 1), (255, 1), (256, 1)],
    "a row of more parts than are added up at once": [(2100, 1)],
    "whole prompts": [(0, 5), (0, 130), (0, 2)],
    "chunks on top of context": [(5, 3), (70, 67)],
    "chunks between decodes": [(0, 6), (12, 1), (9, 10), (3, 1)],
}
HEAD_SIZE = 8


@pytest.mark.parametrize(
    ("heads", "windows"), [((4, 4), (None, 6)), ((6, 2), (None, None)), ((5, 1), (6, 300))], ids=str
)
@pytest.mark.parametrize("step", STEPS)
def test_attention(
    device: torch.device, step: str, heads: tuple[int, int], windows: tuple[int | None, int | None]
) -> None:
    _attention(device, torch.float32, (step, heads, windows))


@pytest.mark.parametrize("step", ["ragged decode rows over several parts", "chunks between decodes"])
def test_attention_in_bfloat16(device: torch.device, step: str) -> None:
    _attention(device, torch.bfloat16, (step, (6, 2), (None, 6)))


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    case: tuple[str, tuple[int, int], tuple[int | None, int | None]],
) -> None:
    from kernels.triton.cache import TritonKVCache

    step, (heads, kv_heads), windows = case
    before = world(STEPS[step], (2, kv_heads, HEAD_SIZE), dtype)
    cache = TritonKVCache(before.cache.to(device), windows)
    attention = cache.attention(before.segments)
    for layer in (1, 0):
        qkv = torch.randn(before.num_rows, heads + 2 * kv_heads, HEAD_SIZE).to(dtype)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), 1)
        found = attention(layer, *(part for part in qkv.to(device).split((heads, kv_heads, kv_heads), 1)))
        assert_near(found, before.exact(layer, windows[layer], query, key, value))
        before.cache.copy_(cache.tensor)
        assert torch.equal(before.cells(layer), torch.stack((key, value), 1))
    assert before.untouched().isnan().all()


def test_rotation_and_write_in_one_pass_are_those_of_two(device: torch.device, dtype: torch.dtype) -> None:
    from kernels.triton.cache import TritonKVCache

    heads, kv_heads, size = 5, 1, 10
    before = world([(7, 1), (0, 6)], (2, kv_heads, size), dtype)
    qkv = torch.randn(before.num_rows, heads + 2 * kv_heads, size).to(dtype)
    angles = 6 * torch.rand(before.num_rows, 1, size // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    query, key, value = qkv.double().split((heads, kv_heads, kv_heads), 1)
    turned = [rotary(x, cos.double(), sin.double()).to(dtype) for x in (query, key)]
    cache = TritonKVCache(before.cache.to(device), (None, None))
    found = cache.attention(before.segments).rotate_and_attend(1, *(x.to(device) for x in (qkv, cos, sin)))
    assert_near(found, before.exact(1, None, *turned, value.to(dtype)))
    before.cache.copy_(cache.tensor)
    torch.testing.assert_close(before.cells(1)[:, 0], turned[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(before.cells(1)[:, 1], value.to(dtype))
    assert before.untouched().isnan().all()


def test_a_row_has_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    """Parts of a context are of one length, so neither other rows nor how many programs share them change a sum."""
    from kernels.triton.cache import TritonKVCache

    before = world([(600, 1), (11, 1), (0, 1)], (1, 2, 16), dtype)
    query, key, value = (torch.randn(3, heads, 16).to(dtype).to(device) for heads in (4, 2, 2))
    together = TritonKVCache(before.cache.to(device), (None,)).attention(before.segments)(0, query, key, value)
    for i, segment in enumerate(before.segments):
        alone = TritonKVCache(before.cache.to(device), (None,)).attention(
            [Segment(0, 1, segment.num_computed, segment.block_ids)]
        )(0, query[i : i + 1], key[i : i + 1], value[i : i + 1])
        assert torch.equal(alone[0], together[i])


def test_padding_rows_write_nothing_and_give_zeros(device: torch.device, dtype: torch.dtype) -> None:
    from kernels.triton.cache import TritonKVCache, max_parts
    from kernels.triton.decode import DecodeRows

    before = world([(9, 1)], (1, 1, 8), dtype)
    query, key, value = (torch.randn(2, heads, 8).to(dtype) for heads in (3, 1, 1))
    (segment,) = before.segments
    cache = TritonKVCache(before.cache.to(device), (None,))
    slots = torch.tensor([segment.block_ids[9 // 4] * 4 + 9 % 4, -1], dtype=torch.int32, device=device)
    rows = DecodeRows(
        rows=torch.arange(2, dtype=torch.int32, device=device),
        tables=torch.tensor([segment.block_ids, [0] * len(segment.block_ids)], dtype=torch.int32, device=device),
        contexts=torch.tensor([10, 0], dtype=torch.int32, device=device),
        max_parts=max_parts(1000),
    )
    found = cache.fixed(slots, rows)(0, query.to(device), key.to(device), value.to(device))
    assert_near(found[:1], before.exact(0, None, query[:1], key[:1], value[:1]))
    assert (found[1] == 0).all()
    before.cache.copy_(cache.tensor)
    assert before.untouched().isnan().all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    from kernels.triton.cache import TritonKVCache

    memory = torch.zeros(4, 2, 2, 4, 1, 8, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        TritonKVCache(memory[:, :1], (None,))
    with pytest.raises(ValueError, match="1 windows for 2 layers"):
        TritonKVCache(memory, (None,))
    with pytest.raises(ValueError, match="starts at row 2, expected 1"):
        TritonKVCache(memory, (None, None)).attention([Segment(0, 1, 0, [0]), Segment(2, 1, 0, [1])])
