"""Decode steps recorded once per number of rows, then replayed: on a GPU, starting a step's kernels takes longer than they do.

    a step of n single rows ─▶ the smallest recorded size ≥ n ─▶ its rows into fixed buffers, the rest padding ─▶ replay

A recorded step reads only buffers that stay where they are: [rows, 4 + blocks] int32 (token, position, slot, context; block
table). A padding row has slot −1, so it writes no KV, and context 0, so it reads none. Does not know requests or sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.execution.input_batch import InputBatch
from engine.models.decoder import Decoder
from kernels.interface import KVCache
from kernels.triton.cache import TritonKVCache, max_parts
from kernels.triton.decode import DecodeRows

_TOKEN, _POSITION, _SLOT, _CONTEXT, _TABLE = range(5)
_PADDING = (0, 0, -1, 0)
# Scratch of a recorded step is for its longest context: steps beyond this one are not recorded, and hardly need it.
_LONGEST = 32_768


class Recorder(Protocol):
    """Makes of a call one that can be repeated."""

    def record(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A call that does again what `call` does, on the same memory, and returns the same tensor with new numbers."""
        ...


class Repeating:
    """Records nothing: calls again. Where there is no GPU."""

    def record(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Recorder."""
        return call


class CudaRecorder:
    """CUDA graphs in one memory pool: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Recorder. Runs `call` twice first: what happens only once (compiling, workspaces) must not be recorded."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = call()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraphs:
    """Recorded decode steps of up to `max_rows` rows. Owns their buffers; borrows the model and its KV memory."""

    def __init__(
        self, model: Decoder, cache: TritonKVCache, max_rows: int, max_model_len: int, recorder: Recorder
    ) -> None:
        self._model = model
        self._cache = cache
        self._block_size = cache.tensor.shape[3]
        self._longest = min(max_model_len, _LONGEST)
        device = cache.tensor.device
        width = _TABLE + -(-self._longest // self._block_size)
        self._host = torch.zeros(max_rows, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._rows = self._host.numpy()
        self._held: list[list[int]] = [[] for _ in range(max_rows)]
        self._device = torch.zeros(max_rows, width, dtype=torch.int32, device=device)
        self._numbers = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._host[:, :_TABLE] = torch.tensor(_PADDING, dtype=torch.int32)
        self._device.copy_(self._host)
        # A recorded step must not wait to look at a position.
        model.reserve(max_model_len)
        self._steps: dict[int, Callable[[], Tensor]] = {}
        # The largest first: the smaller ones fit into the memory that it took.
        for size in reversed(sizes(max_rows)):
            self._steps[size] = recorder.record(self._step_of(size))

    def take(self, inputs: InputBatch) -> bool:
        """Whether this step is one of those recorded: single rows all of whose tokens are sampled, few and short enough."""
        return (
            len(inputs.segments) <= len(self._rows)
            and inputs.rows is None
            and not inputs.prompts
            and len(inputs.samples) == len(inputs.segments)
            and all(s.num_rows == 1 and s.context_len <= self._longest for s in inputs.segments)
        )

    def step(self, inputs: InputBatch) -> Tensor:
        """Logits [n, vocab], good until the next step. The step before must have ended: its buffers are written here."""
        count = len(inputs.segments)
        size = min(s for s in self._steps if s >= count)
        tokens = inputs.token_ids.tolist()
        for i, segment in enumerate(inputs.segments):
            position, ids = segment.num_computed, segment.block_ids
            slot = ids[position // self._block_size] * self._block_size + position % self._block_size
            self._rows[i, :_TABLE] = (tokens[i], position, slot, position + 1)
            known = list(ids[: self._rows.shape[1] - _TABLE])
            if known != self._held[i]:
                self._rows[i, _TABLE : _TABLE + len(known)] = known
                self._held[i] = known
        self._rows[count:size, :_TABLE] = _PADDING
        self._device[:size].copy_(self._host[:size], non_blocking=True)
        return self._steps[size]()[:count]

    def _step_of(self, size: int) -> Callable[[], Tensor]:
        buffer = self._device[:size]
        rows = DecodeRows(
            rows=self._numbers[:size],
            tables=buffer[:, _TABLE:],
            contexts=buffer[:, _CONTEXT],
            max_parts=max_parts(self._longest),
        )

        def call() -> Tensor:
            # Slots and contexts are read one after the other, so they are copied out of the buffer's rows first.
            here = DecodeRows(rows.rows, rows.tables, rows.contexts.contiguous(), rows.max_parts)
            attention = self._cache.fixed(buffer[:, _SLOT].contiguous(), here)
            return self._model.step(buffer[:, _TOKEN].long(), buffer[:, _POSITION].long(), attention, None)

        return call


def graphs_for(
    model: Decoder, cache: KVCache, max_rows: int, max_model_len: int, recorder: Recorder
) -> DecodeGraphs | None:
    """Recorded steps on this memory; None where its attention is not the GPU's."""
    if not isinstance(cache, TritonKVCache):
        return None
    return DecodeGraphs(model, cache, max_rows, max_model_len, recorder)


def sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 32, every 16 up to 128, every 64 above; `max_rows` last: little is computed in vain."""
    found = [1, 2, 4, 8]
    while found[-1] < max_rows:
        last = found[-1]
        found.append(last + (8 if last < 32 else 16 if last < 128 else 64))
    return [size for size in found if size < max_rows] + [max_rows]
