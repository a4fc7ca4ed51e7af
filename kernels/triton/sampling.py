"""Tokens from logits on a GPU: the likeliest, or one drawn by the race of `engine.sampling` with the very same noise.

    logits [rows, vocab] ─▶ largest of each tile ─▶ largest of the row (lowest id where equal; NaN counts as largest)
                         └▶ weights exp((x − largest) / T) ─▶ runs of 128 race by their sums ─▶ the winner's 128 race

Noise is SplitMix64 from a key per row and race, as `engine.sampling.race` has it: the same 52 bits for the same place, then
−log in float64. Only arrivals that are equal but for the last bits of exp and sums could draw otherwise than a CPU.
Does not know seeds, positions or filters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_RUN = 128
_TILE = 4096
_RUNS = 16


@triton.jit
def _largest(value, index):
    """The largest of a vector and its lowest index: of the NaNs if there are any."""
    broken = value != value
    best = tl.max(tl.where(broken, float("-inf"), value), 0)
    any_broken = tl.max(broken.to(tl.int32), 0) > 0
    wanted = tl.where(any_broken, broken.to(tl.int32), (value == best).to(tl.int32))
    first = tl.min(tl.where(wanted > 0, index, 2147483647), 0)
    return tl.where(any_broken, float("nan"), best), first


@triton.jit
def _first(noise, weight, index):
    """When the first arrives, and its index, the lowest of equals; what weighs nothing, or is NaN, never does."""
    runs = weight > 0.0
    arrival = tl.where(runs, noise / tl.where(runs, weight, 1.0), float("inf"))
    when = tl.min(arrival, 0)
    return when, tl.min(tl.where(arrival == when, index, 2147483647), 0)


@triton.jit
def _exponential(key, number):
    """The `number`-th (from 1) exponential of SplitMix64's state `key`; both uint64."""
    bits = number * 0x9E3779B97F4A7C15 + key
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(uniform)


@triton.jit
def tile_largest_kernel(logits, values, ids, vocab, row_stride, tiles, TILE: tl.constexpr):
    """The largest of TILE logits of one row and its token id."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    value = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best, token = _largest(value, at)
    tl.store(values + row * tiles + tile, best)
    tl.store(ids + row * tiles + tile, token)


@triton.jit
def row_largest_kernel(values, ids, best, token, tiles, PADDED: tl.constexpr):
    """The largest of a row's tiles."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    value = tl.load(values + row * tiles + at, mask=at < tiles, other=float("-inf"))
    # What pads has an index behind all others, so that it loses even where all are −inf.
    index = tl.load(ids + row * tiles + at, mask=at < tiles, other=2147483647)
    found, which = _largest(value, index)
    tl.store(best + row, found)
    tl.store(token + row, which)


@triton.jit
def run_race_kernel(
    logits, best, temperatures, keys, arrivals, winners, vocab, row_stride, tiles, RUN: tl.constexpr, RUNS: tl.constexpr
):  # fmt: skip
    """RUNS runs of one row that is not greedy: which arrives first, and when."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        run = tile * RUNS + tl.arange(0, RUNS)
        at = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
        value = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(value, temperature) - tl.div_rn(tl.load(best + row), temperature)
        total = tl.sum(tl.exp(scaled).to(tl.float64), 1)
        key = tl.load(keys + 2 * row).to(tl.uint64, bitcast=True)
        when, which = _first(_exponential(key, (run + 1).to(tl.uint64)), total, run)
        tl.store(arrivals + row * tiles + tile, when)
        tl.store(winners + row * tiles + tile, which)


@triton.jit
def token_race_kernel(
    logits, best, temperatures, keys, arrivals, winners, token, vocab, row_stride, tiles,
    RUN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The first run of a row, and the first token in it; a row of temperature 0 keeps its likeliest token."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        at = tl.arange(0, PADDED)
        arrival = tl.load(arrivals + row * tiles + at, mask=at < tiles, other=float("inf"))
        index = tl.load(winners + row * tiles + at, mask=at < tiles, other=2147483647)
        when = tl.min(arrival, 0)
        run = tl.minimum(tl.min(tl.where(arrival == when, index, 2147483647), 0), (vocab - 1) // RUN)
        within = tl.arange(0, RUN)
        place = run * RUN + within
        value = tl.load(logits + row * row_stride + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(value, temperature) - tl.div_rn(tl.load(best + row), temperature)
        weight = tl.exp(scaled).to(tl.float64)
        key = tl.load(keys + 2 * row + 1).to(tl.uint64, bitcast=True)
        _, drawn = _first(_exponential(key, (within + 1).to(tl.uint64)), weight, place)
        # Rows that are not finite have no token; theirs only has to be one.
        tl.store(token + row, tl.minimum(drawn, vocab - 1))


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, vocab] → the largest of each row, float32 [n], and the lowest id that has it, int32 [n]."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, _TILE)
    values = torch.empty((rows, tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        tile_largest_kernel[(rows, tiles)](logits, values, ids, vocab, logits.stride(0), tiles, TILE=_TILE, num_warps=8)
        padded = triton.next_power_of_2(tiles)
        row_largest_kernel[(rows,)](values, ids, best, token, tiles, PADDED=padded, num_warps=1)
    return best, token


def sample(logits: Tensor, temperatures: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, vocab], temperatures float32 [n] (0: greedy), keys int64 [n, 2] (64 bits of each race) → as `likeliest`.

    The ids are the drawn ones; the values are still the rows' largest, so that the caller sees rows that are not finite.
    """
    best, token = likeliest(logits)
    rows, vocab = logits.shape
    if rows:
        tiles = triton.cdiv(triton.cdiv(vocab, _RUN), _RUNS)
        arrivals = torch.empty((rows, tiles), dtype=torch.float64, device=logits.device)
        winners = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
        run_race_kernel[(rows, tiles)](
            logits, best, temperatures, keys, arrivals, winners, vocab, logits.stride(0), tiles,
            RUN=_RUN, RUNS=_RUNS, num_warps=4,
        )  # fmt: skip
        token_race_kernel[(rows,)](
            logits, best, temperatures, keys, arrivals, winners, token, vocab, logits.stride(0), tiles,
            RUN=_RUN, PADDED=triton.next_power_of_2(tiles), num_warps=4,
        )  # fmt: skip
    return best, token
