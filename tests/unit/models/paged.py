"""Drives a decoder over paged KV memory that is full of NaN, in blocks dealt out at random."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from kernels.batch import Segment

BLOCK_SIZE = 4

Step = list[tuple[int, int]]  # (request, tokens to compute)


class PagedRun:
    """Requests with all their tokens known; `logits[i]` collects the rows of request i."""

    def __init__(self, model: Decoder, prompts: list[list[int]], *, seed: int = 0) -> None:
        self.model = model
        self.prompts = prompts
        config = model.config
        needed = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
        num_blocks = sum(needed) + 7
        ids = list(range(num_blocks))
        random.Random(seed).shuffle(ids)
        self.block_ids = [[ids.pop() for _ in range(count)] for count in needed]
        self.unused = ids
        shape = (num_blocks, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_size)
        self.kv = torch.full(shape, float("nan"), dtype=model.dtype)
        self.cache = model.kernels.kv_cache(self.kv, config.windows)
        self.computed = [0] * len(prompts)
        self.logits: list[list[Tensor]] = [[] for _ in prompts]

    def step(self, work: Step) -> None:
        segments: list[Segment] = []
        token_ids: list[int] = []
        positions: list[int] = []
        for request, count in work:
            start = self.computed[request]
            # As the engine does it: no more blocks than the tokens so far need.
            held = -(-(start + count) // BLOCK_SIZE)
            segments.append(Segment(len(token_ids), count, start, self.block_ids[request][:held]))
            token_ids += self.prompts[request][start : start + count]
            positions += range(start, start + count)
            self.computed[request] += count
        with torch.inference_mode():
            attention = self.cache.attention(segments)
            hidden = self.model.forward(torch.tensor(token_ids), torch.tensor(positions), attention, None)
            rows = self.model.logits(hidden)
        for segment, (request, count) in zip(segments, work, strict=True):
            self.logits[request].append(rows[segment.first_row : segment.first_row + count])

    def finish(self) -> list[Tensor]:
        """Logits of every position of every request, [tokens, vocab] each."""
        assert self.computed == [len(prompt) for prompt in self.prompts]
        assert self.kv[self.unused].isnan().all(), "a block that nobody holds was written"
        return [torch.cat(rows) for rows in self.logits]


def random_schedule(prompts: list[list[int]], rng: random.Random) -> list[Step]:
    """Steps that mix decode rows and chunks of several requests, in random order, until all is computed."""
    left = {i: len(prompt) for i, prompt in enumerate(prompts)}
    steps: list[Step] = []
    while left:
        chosen = rng.sample(sorted(left), rng.randint(1, len(left)))
        step = []
        for request in chosen:
            count = 1 if rng.random() < 0.6 else rng.randint(1, min(left[request], 23))
            step.append((request, count))
            left[request] -= count
            if not left[request]:
                del left[request]
        steps.append(step)
    return steps
