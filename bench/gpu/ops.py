"""Every kernel at a model's real sizes: how far from float64, how near to the limit."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu.measure import Limits, Line, Stopwatch
from bench.gpu.sizes import Sizes
from kernels import reference
from kernels.batch import Segment
from kernels.triton import pack, sampling, small
from kernels.triton.cache import TritonKVCache, on_device
from kernels.triton.kv_write import kv_write

# Of bfloat16 numbers of about one; an op rounds once or twice, attention's weights once more.
ROUNDED = 4e-2


class Ops:
    """Makes inputs on `device`, compares and times. Inputs of one op are gone before the next one's are made."""

    def __init__(self, device: torch.device, sizes: Sizes, limits: Limits, watch: Stopwatch) -> None:
        self._device = device
        self._sizes = sizes
        self._limits = limits
        self._watch = watch

    def lines(self) -> Iterator[Line]:
        """One line per kernel and size."""
        for rows in (self._sizes.batches[-1], self._sizes.prompts[-1]):
            yield from self._small(rows)
        yield from self._decode()
        yield from self._prefill()
        yield from self._packing()
        yield from self._sampling()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(torch.bfloat16)

    def _line(self, timed: Line, found: Tensor, exact: Tensor) -> Line:
        error = float((found.double() - exact).abs().max())
        return Line(timed.what, error, ROUNDED, timed.ms, timed.rate, timed.share)

    def _small(self, rows: int) -> Iterator[Line]:
        sizes, watch, limits = self._sizes, self._watch, self._limits
        x, residual, weight = (
            self._random(rows, sizes.hidden),
            self._random(rows, sizes.hidden),
            self._random(sizes.hidden),
        )
        size = x.nbytes
        timed = limits.of_bytes(f"rms_norm, {rows} rows", watch.ms(lambda: small.rms_norm(x, weight, 1e-5)), 2 * size)
        exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
        yield self._line(timed, small.rms_norm(x, weight, 1e-5) / 4, exact / 4)
        ms = watch.ms(lambda: small.add_rms_norm(x, residual, weight, 1e-5))
        normed, summed = small.add_rms_norm(x, residual, weight, 1e-5)
        exact = reference.rms_norm(summed.double(), weight.double(), 1e-5)
        yield self._line(limits.of_bytes(f"rms_norm of a sum, {rows} rows", ms, 4 * size), normed / 4, exact / 4)
        gate_up = self._random(rows, 2 * sizes.intermediate)
        ms = watch.ms(lambda: small.silu_mul(gate_up))
        gate, up = gate_up.double().chunk(2, -1)
        timed = limits.of_bytes(f"silu_mul, {rows} rows", ms, 1.5 * gate_up.nbytes)
        yield self._line(timed, small.silu_mul(gate_up) / 8, gate * gate.sigmoid() * up / 8)
        yield from self._rotation(rows)

    def _rotation(self, rows: int) -> Iterator[Line]:
        sizes, watch, limits = self._sizes, self._watch, self._limits
        heads, kv_heads, size = sizes.heads, sizes.kv_heads, sizes.head_size
        qkv = self._random(rows, heads + 2 * kv_heads, size)
        angles = torch.rand(rows, 1, size // 2, device=self._device) * 6
        cos = torch.cat((angles.cos(), angles.cos()), -1).to(torch.bfloat16)
        sin = torch.cat((-angles.sin(), angles.sin()), -1).to(torch.bfloat16)
        exact = reference.rotary(qkv[:, :heads].double(), cos.double(), sin.double())
        ms = watch.ms(lambda: small.rotary(qkv[:, :heads], cos, sin))
        moved = 2.0 * rows * heads * size * 2
        timed = limits.of_bytes(f"rotary, {rows} rows", ms, moved)
        yield self._line(timed, small.rotary(qkv[:, :heads], cos, sin) / 4, exact / 4)
        cache, (segment,) = self._memory([(0, rows)])
        attention = cache.attention([segment])
        ms = watch.ms(lambda: attention.rotate_and_write(0, qkv, cos, sin))
        query = attention.rotate_and_write(0, qkv, cos, sin)
        yield self._line(limits.of_bytes(f"rotate and write, {rows} rows", ms, 2.0 * qkv.nbytes), query / 4, exact / 4)

    def _memory(self, work: list[tuple[int, int]]) -> tuple[TritonKVCache, list[Segment]]:
        """One layer's KV, NaN but for the (before, now) positions of each request, whose blocks lie in no order."""
        sizes = self._sizes
        held = [-(-(before + now) // sizes.block_size) for before, now in work]
        shape = (sum(held) + 1, 1, 2, sizes.block_size, sizes.kv_heads, sizes.head_size)
        cache = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self._device)
        ids = torch.randperm(shape[0]).tolist()
        segments, row = [], 0
        for (before, now), count in zip(work, held, strict=True):
            blocks = [ids.pop() for _ in range(count)]
            segments.append(Segment(row, now, before, blocks))
            row += now
            slots = [blocks[p // sizes.block_size] * sizes.block_size + p % sizes.block_size for p in range(before)]
            if before:
                key, value = (self._random(before, sizes.kv_heads, sizes.head_size) for _ in range(2))
                kv_write(cache, 0, on_device(array("i", slots), self._device), key, value)
        return TritonKVCache(cache, (None,)), segments

    def _attend(self, work: list[tuple[int, int]]) -> tuple[float, Tensor, Tensor]:
        """Milliseconds of one layer's attention for such a step, its result, and the exact one."""
        sizes = self._sizes
        cache, segments = self._memory(work)
        rows = sum(now for _, now in work)
        query, key, value = (
            self._random(rows, n, sizes.head_size) for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        )
        attention = cache.attention(segments)
        found = attention(0, query, key, value)
        exact = torch.cat(
            [self._exact(cache.tensor, s, query[s.first_row : s.first_row + s.num_rows]) for s in segments]
        )
        return self._watch.ms(lambda: attention.attend(0, query)), found, exact

    def _exact(self, cache: Tensor, segment: Segment, query: Tensor) -> Tensor:
        sizes, context = self._sizes, segment.context_len
        ids = torch.tensor(segment.block_ids, device=self._device)
        cells = cache[ids, 0].transpose(0, 1).reshape(2, -1, sizes.kv_heads, sizes.head_size)[:, :context].double()
        keys, values = (side.repeat_interleave(sizes.group, 1).transpose(0, 1) for side in cells)
        query_at = segment.num_computed + torch.arange(len(query), device=self._device)
        hidden = torch.arange(context, device=self._device) > query_at[:, None]
        out = []
        for head in range(sizes.heads):  # one by one: float64 scores of all heads would fill the device
            scores = query[:, head].double() @ keys[head].T * sizes.head_size**-0.5
            out.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values[head])
        return torch.stack(out, 1).flatten(1)

    def _decode(self) -> Iterator[Line]:
        sizes = self._sizes
        for rows in sizes.batches:
            contexts = [sizes.context - 7 * i % (sizes.context // 2) for i in range(rows)]
            ms, found, exact = self._attend([(context - 1, 1) for context in contexts])
            timed = self._limits.of_bytes(
                f"decode attention, {rows} × {sizes.context}", ms, sum(contexts) * sizes.token_bytes
            )
            yield self._line(timed, found, exact)
        ms, found, exact = self._attend([(8 * sizes.context - 1, 1)])
        what = f"decode attention, 1 × {8 * sizes.context}"
        yield self._line(self._limits.of_bytes(what, ms, 8 * sizes.context * sizes.token_bytes), found, exact)

    def _prefill(self) -> Iterator[Line]:
        sizes = self._sizes
        for before, now in [(0, n) for n in sizes.prompts] + [(sizes.context, sizes.prompts[0])]:
            ms, found, exact = self._attend([(before, now)])
            flop = 4.0 * sizes.heads * sizes.head_size * now * (before + now / 2)
            yield self._line(self._limits.of_flop(f"prefill attention, {now} after {before}", ms, flop), found, exact)

    def _packing(self) -> Iterator[Line]:
        sizes = self._sizes
        blocks = max(4, sizes.context // sizes.block_size)
        cache = self._random(blocks, sizes.layers, 2, sizes.block_size, sizes.kv_heads, sizes.head_size)
        ids = torch.arange(blocks, dtype=torch.int32, device=self._device)
        for kind, step in (("fp8", 1 / 16), ("int8", 1 / 127)):
            packed = pack.pack(cache, ids, kind)
            moved = cache.nbytes + packed.nbytes
            yield self._limits.of_bytes(
                f"pack {kind}, {blocks} blocks", self._watch.ms(partial(pack.pack, cache, ids, kind)), moved
            )
            back = torch.full_like(cache, float("nan"))
            ms = self._watch.ms(partial(pack.unpack, packed, back, ids, kind))
            timed = self._limits.of_bytes(f"unpack {kind}, {blocks} blocks", ms, moved)
            error = float(((back.double() - cache.double()).abs() / cache.double().abs().amax()).max())
            yield Line(timed.what, error, step, timed.ms, timed.rate, timed.share)

    def _sampling(self) -> Iterator[Line]:
        rows = self._sizes.batches[-1]
        logits = self._random(rows, self._sizes.vocab)
        _, ids = sampling.likeliest(logits)
        wrong = float((ids.cpu() != logits.float().cpu().max(-1).indices).sum())
        timed = self._limits.of_bytes(
            f"greedy, {rows} rows", self._watch.ms(lambda: sampling.likeliest(logits)), logits.nbytes
        )
        yield Line(timed.what, wrong, 0.0, timed.ms, timed.rate, timed.share)
        ones = torch.ones(rows, device=self._device)
        keys = torch.arange(2 * rows, device=self._device).view(rows, 2)
        ms = self._watch.ms(lambda: sampling.sample(logits, ones, keys))
        yield self._limits.of_bytes(f"sampling, {rows} rows", ms, 2.0 * logits.nbytes)
