"""Native attention: right on every instruction set, and the same bits for a row whatever it is computed with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.batch import Segment
from kernels.cpu.attention import NativeKVCache, kv_cache_of
from kernels.cpu.library import Library

NAN = float("nan")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_size: int
    block_size: int


@dataclass
class Request:
    """Tokens with their projections [n, heads, d], and the blocks that hold their KV."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_ids: list[int]


class World:
    """KV memory of one layer among three, NaN until it is written, and requests whose blocks lie anywhere in it."""

    LAYER, LAYERS = 1, 3

    def __init__(
        self, library: Library, shape: Shape, lengths: list[int], dtype: torch.dtype, window: int | None
    ) -> None:
        torch.manual_seed(len(lengths) + sum(lengths))
        held = [-(-length // shape.block_size) for length in lengths]
        ids = torch.randperm(sum(held) + 2).tolist()
        size = (len(ids), self.LAYERS, 2, shape.block_size, shape.kv_heads, shape.head_size)
        self.shape, self.window = shape, window
        self.memory = torch.full(size, NAN, dtype=dtype)
        self.cache: NativeKVCache = kv_cache_of(library)(self.memory, (None, window, 7))
        self.requests = [
            self._request(length, [ids.pop() for _ in range(count)])
            for length, count in zip(lengths, held, strict=True)
        ]

    def _request(self, length: int, block_ids: list[int]) -> Request:
        shape = self.shape
        heads = shape.heads + 2 * shape.kv_heads
        qkv = torch.randn(length, heads, shape.head_size).to(self.memory.dtype)
        query, key, value = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        return Request(query, key, value, block_ids)

    def run(self, work: list[tuple[int, int, int]], threads: int = 1) -> list[Tensor]:
        """One step; `work`: (request, first token, end) → what attention gives for those, [n, heads · d] each."""
        torch.set_num_threads(threads)
        segments, row = [], 0
        for at, begin, end in work:
            segments.append(Segment(row, end - begin, begin, self.requests[at].block_ids))
            row += end - begin
        rows = (
            torch.cat([of[begin:end] for of, (_, begin, end) in zip(parts, work, strict=True)])
            for parts in self._parts(work)
        )
        out = self.cache.attention(segments)(self.LAYER, *rows)
        return list(torch.split(out, [end - begin for _, begin, end in work]))

    def _parts(self, work: list[tuple[int, int, int]]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        chosen = [self.requests[at] for at, _, _ in work]
        return [r.query for r in chosen], [r.key for r in chosen], [r.value for r in chosen]

    def exact(self, at: int) -> Tensor:
        """What attention means for all tokens of a request, in float64."""
        request, shape = self.requests[at], self.shape
        group = shape.heads // shape.kv_heads
        keys, values = (x.double().repeat_interleave(group, 1) for x in (request.key, request.value))
        scores = torch.einsum("qhd,khd->hqk", request.query.double(), keys) * shape.head_size**-0.5
        to, of = torch.arange(len(keys))[:, None], torch.arange(len(keys))
        hidden = of > to if self.window is None else (of > to) | (of <= to - self.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


@pytest.fixture(autouse=True)
def _threads_as_before() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "lengths", "window"),
    [
        (Shape(14, 2, 64, 16), [331, 16, 1], None),
        (Shape(4, 4, 16, 16), [290], None),
        (Shape(3, 1, 80, 5), [270, 35], 33),
        (Shape(5, 1, 6, 1), [67], 1),
        (Shape(2, 2, 128, 32), [65, 300], 256),
        (Shape(20, 1, 34, 3), [41], None),
    ],
    ids=str,
)
def test_prompts_and_then_tokens(
    library: Library, dtype: torch.dtype, shape: Shape, lengths: list[int], window: int | None
) -> None:
    """All but the last token as a prompt, then the last one; everything that is nobody's is NaN, before and after."""
    world = World(library, shape, lengths, dtype, window)
    prompts = world.run([(i, 0, length - 1) for i, length in enumerate(lengths) if length > 1], threads=2)
    tokens = world.run([(i, length - 1, length) for i, length in enumerate(lengths)], threads=2)
    exact = [world.exact(i) for i in range(len(lengths))]
    limit = TOLERANCE[dtype]
    for found, of in zip(prompts, [e for e in exact if len(e) > 1], strict=True):
        torch.testing.assert_close(found.double(), of[:-1], atol=limit, rtol=limit)
    for found, of in zip(tokens, exact, strict=True):
        torch.testing.assert_close(found.double(), of[-1:], atol=limit, rtol=limit)
    written = torch.zeros(world.memory.shape, dtype=torch.bool)
    for request in world.requests:
        for position in range(len(request.key)):
            cell = (
                request.block_ids[position // shape.block_size],
                World.LAYER,
                slice(None),
                position % shape.block_size,
            )
            assert torch.equal(world.memory[cell], torch.stack((request.key[position], request.value[position])))
            written[cell] = True
    assert world.memory[~written].isnan().all()


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[Shape, int, list[int], int | None, torch.dtype, int]:
    """A shape, a prompt's length, where it is cut, a window, a dtype, a number of threads."""
    kv_heads = draw(st.sampled_from([1, 2]))
    shape = Shape(
        kv_heads * draw(st.sampled_from([1, 3, 7])),
        kv_heads,
        2 * draw(st.sampled_from([4, 9, 16])),
        draw(st.sampled_from([4, 16])),
    )
    length = draw(st.sampled_from([3, 17, 255, 256, 257, 530]))
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=4))
    some_single = draw(st.sets(st.integers(1, length - 1), max_size=3))
    bounds = sorted({0, length} | cuts | some_single | {at + 1 for at in some_single})
    window = draw(st.sampled_from([None, 1, 20, 256, 300]))
    return shape, length, bounds, window, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, 2, 3]))


# The fixture is a loaded library: nothing in it changes.
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cutting=cuttings())
def test_the_same_bits_however_a_prompt_is_cut_and_whoever_is_near(
    library: Library, cutting: tuple[Shape, int, list[int], int | None, torch.dtype, int]
) -> None:
    shape, length, bounds, window, dtype, threads = cutting
    world = World(library, shape, [length, 40], dtype, window)
    (whole,) = world.run([(0, 0, length)])
    assert not whole.isnan().any()
    world.memory.fill_(NAN)
    world.run([(1, 0, 30)])
    parts = [world.run([(1, 30, 31), (0, begin, end), (1, 31, 40)], threads)[1] for begin, end in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_contexts_side_by_side_give_the_bits_of_each_alone(library: Library, dtype: torch.dtype) -> None:
    shape, lengths = Shape(4, 2, 32, 16), [1, 900, 2, 513, 256, 257, 40]
    world = World(library, shape, lengths, dtype, None)
    for i, length in enumerate(lengths):
        world.run([(i, 0, length)])
    last = [(i, length - 1, length) for i, length in enumerate(lengths)]
    together = world.run(last, threads=3)
    for one, found in zip(last, together, strict=True):
        assert torch.equal(world.run([one])[0], found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_token_gone_wrong_is_seen_by_later_ones_only(library: Library, dtype: torch.dtype, bad: float) -> None:
    shape, length, wrong = Shape(3, 1, 20, 16), 41, 22
    world = World(library, shape, [length], dtype, None)
    (sound,) = world.run([(0, 0, length)])
    for projected in (world.requests[0].key, world.requests[0].value):
        projected[wrong] = bad
    (found,) = world.run([(0, 0, length)], threads=2)
    assert torch.equal(found[:wrong], sound[:wrong])
    assert found[wrong:].isnan().any(1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_any_size_are_weighed(library: Library, dtype: torch.dtype) -> None:
    """Large scores: all weight lies on one position, which may be in any split."""
    shape, length = Shape(2, 1, 16, 16), 300
    for best in (0, 100, 299):
        world = World(library, shape, [length], dtype, None)
        request = world.requests[0]
        request.query[:] = 30
        request.key[:] = -30
        request.key[best] = 30
        found = world.run([(0, 0, length)])[0][-1].view(2, 16)
        assert torch.equal(found, request.value[best].expand(2, -1))


def test_what_does_not_fit_is_refused(library: Library) -> None:
    make = kv_cache_of(library)
    memory = torch.zeros(4, 2, 2, 4, 1, 8)
    with pytest.raises(ValueError, match="contiguous"):
        make(memory[:, :1], (None,))
    with pytest.raises(ValueError, match="1 windows for 2 layers"):
        make(memory, (None,))
    with pytest.raises(ValueError, match="sees at least itself"):
        make(memory, (None, 0))
    with pytest.raises(ValueError, match="starts at row 2, expected 1"):
        make(memory, (None, None)).attention([Segment(0, 1, 0, [0]), Segment(2, 1, 0, [1])])
