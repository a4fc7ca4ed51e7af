"""Loads that are made up: prompts of given lengths, with shared prefixes, or conversations of several turns.

Does not know files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.serving.requests import MOST_TOKENS, BenchRequest
from bench.serving.writer import Writer
from contracts.errors import ConfigError

MOST_PROMPTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """How many, and how long in tokens; lengths are even in [x*(1-range_ratio), x*(1+range_ratio)], at least 1."""

    num_prompts: int
    input_len: int = 256
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1
    think_s: float = 0.0

    def __post_init__(self) -> None:
        limits = (
            ("--num-prompts", self.num_prompts, 1, MOST_PROMPTS),
            ("--input-len", self.input_len, 1, MOST_TOKENS),
            ("--output-len", self.output_len, 1, MOST_TOKENS),
            ("--prefix-len", self.prefix_len, 0, MOST_TOKENS),
            ("--num-prefixes", self.num_prefixes, 1, MOST_PROMPTS),
            ("--turns", self.turns, 1, MOST_PROMPTS),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise ConfigError(f"{name}: {value} must be from {low} to {high}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio: {self.range_ratio} must be from 0 to below 1")


def random_prompts(shape: Shape, writer: Writer) -> tuple[BenchRequest, ...]:
    """Prompts of which no two share a beginning, but for `prefix_len` tokens that `num_prefixes` groups have in turns."""
    inputs, outputs = _lengths(shape, writer.seed)
    requests = []
    for index in range(shape.num_prompts):
        own = writer.write((1, index), inputs[index])
        if shape.prefix_len:
            own = writer.joined([writer.write((0, index % shape.num_prefixes), shape.prefix_len), own])
        requests.append(BenchRequest(own, outputs[index], shape.prefix_len + inputs[index]))
    return tuple(requests)


def conversations(shape: Shape, writer: Writer) -> tuple[BenchRequest, ...]:
    """Conversations of `turns` turns, `num_prompts` requests together; every first turn before any second.

    A turn's prompt is all that was said before, real answers included, and `input_len` new tokens. A conversation begins with
    its group's prefix where there is one.
    """
    inputs, outputs = _lengths(shape, writer.seed)
    count = -(-shape.num_prompts // shape.turns)
    requests: list[BenchRequest] = []
    for index in range(shape.num_prompts):
        turn, said = divmod(index, count)
        new = writer.write((2, said, turn), inputs[index])
        length = inputs[index]
        if turn == 0 and shape.prefix_len:
            new = writer.joined([writer.write((0, said % shape.num_prefixes), shape.prefix_len), new])
            length += shape.prefix_len
        after = index - count if turn else None
        if after is not None:
            length += requests[after].prompt_len + requests[after].output_len
        requests.append(BenchRequest(new, outputs[index], length, after=after, think_s=shape.think_s if turn else 0.0))
    return tuple(requests)


def _lengths(shape: Shape, seed: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng([seed, 3])

    def draw(middle: int) -> list[int]:
        low = max(1, int(middle * (1 - shape.range_ratio)))
        high = max(low, int(middle * (1 + shape.range_ratio)))
        return [int(length) for length in rng.integers(low, high + 1, shape.num_prompts)]

    return draw(shape.input_len), draw(shape.output_len)
