"""A whole model on the device, its weights random, through the engine's runner: prompts and decode steps against the limits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu.measure import Limits, Line, Stopwatch
from bench.gpu.sizes import Sizes
from contracts.kv_layout import KVLayout
from contracts.sampling import SamplingParams
from engine.execution.interface import ScheduledBatch, ScheduledRequest
from engine.execution.torch_runner import TorchRunner
from engine.models.decoder import Decoder
from kernels.implementation import Kernels
from kernels.stack import Layer, Shape, Stack

_GREEDY = SamplingParams(temperature=0.0)


def random_model(sizes: Sizes, kernels: Kernels) -> Decoder:
    """bfloat16 weights of about the size that real ones have."""
    device = torch.device(kernels.device)

    def weight(outs: int, ins: int) -> Tensor:
        return torch.empty(outs, ins, dtype=torch.bfloat16, device=device).normal_(0, ins**-0.5)

    def norm() -> Tensor:
        return torch.ones(sizes.hidden, dtype=torch.bfloat16, device=device)

    heads = sizes.heads * sizes.head_size
    layers = tuple(
        Layer(
            input_norm=norm(),
            qkv=kernels.linear(weight(heads + 2 * sizes.kv_heads * sizes.head_size, sizes.hidden), None),
            q_norm=None,
            k_norm=None,
            o=kernels.linear(weight(sizes.hidden, heads), None),
            post_norm=norm(),
            gate_up=kernels.linear(weight(2 * sizes.intermediate, sizes.hidden), None),
            down=kernels.linear(weight(sizes.hidden, sizes.intermediate), None),
        )
        for _ in range(sizes.layers)
    )
    shape = Shape(
        sizes.hidden, sizes.intermediate, sizes.vocab, sizes.heads, sizes.kv_heads, sizes.head_size, rms_norm_eps=1e-5
    )
    embedding = kernels.embedding(weight(sizes.vocab, sizes.hidden))
    stack = Stack(shape, embedding, layers, norm(), kernels.linear(weight(sizes.vocab, sizes.hidden), None))
    return Decoder(sizes.config(), stack, kernels, "random")


class ModelBench:
    """A runner on KV memory for the largest batch and the longest prompt."""

    def __init__(self, sizes: Sizes, kernels: Kernels, limits: Limits, watch: Stopwatch) -> None:
        self._sizes = sizes
        self._limits = limits
        self._watch = watch
        self._longest = max(*sizes.prompts, sizes.context) + 1
        layout = KVLayout("random", "bfloat16", sizes.layers, sizes.kv_heads, sizes.head_size, sizes.block_size)
        self._per_row = layout.num_blocks_for(self._longest)
        num_blocks = self._per_row * sizes.batches[-1]
        memory = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=kernels.device)
        model = random_model(sizes, kernels)
        model.reserve(self._longest)
        self._runner = TorchRunner(model, layout, memory, num_blocks, self._longest)

    def lines(self) -> Iterator[Line]:
        """Prefill by the prompt's length; decode by the batch, first as it is started op by op, then recorded."""
        sizes = self._sizes
        for tokens in sizes.prompts:
            ms = self._watch.wall_ms(partial(self._runner.execute, self._batch(1, tokens, 0)))
            line = self._limits.of_flop(f"engine: prefill {tokens}", ms, sizes.prefill_flop(tokens))
            yield Line(line.what, ms=ms, rate=f"{tokens / ms * 1e3:.0f} tok/s", share=line.share)
        yield from self._decode("op by op")
        self._runner.record(sizes.batches[-1])
        yield from self._decode("recorded")

    def _decode(self, how: str) -> Iterator[Line]:
        sizes = self._sizes
        for rows in sizes.batches:
            batch = self._batch(rows, 1, sizes.context - 1)
            ms = self._watch.wall_ms(partial(self._runner.execute, batch))
            moved = 2.0 * sizes.step_parameters + rows * sizes.context * sizes.layers * sizes.token_bytes
            line = self._limits.of_bytes(f"engine: decode, batch {rows}, {how}", ms, moved)
            yield Line(line.what, ms=ms, rate=f"{rows / ms * 1e3:.0f} tok/s", share=line.share)

    def _batch(self, rows: int, tokens: int, before: int) -> ScheduledBatch:
        def one(row: int) -> ScheduledRequest:
            blocks = list(range(row * self._per_row, (row + 1) * self._per_row))
            known = [(row + 7 * p) % self._sizes.vocab for p in range(before + tokens)]
            return ScheduledRequest(str(row), known, before + tokens, before, tokens, blocks, _GREEDY)

        return ScheduledBatch(tuple(one(row) for row in range(rows)))
