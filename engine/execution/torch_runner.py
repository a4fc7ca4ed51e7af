"""Runs scheduled batches on a torch decoder: flatten, forward, logits for the rows that want them, sample.

    ScheduledBatch → InputBatch → Decoder.step (writes KV; gives logits) → Sampler → SampledToken per request

Does not know leases, scheduling or where the KV memory comes from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contracts.kv_layout import KVLayout
from contracts.request import TokenLogprob
from engine.execution.device import finish
from engine.execution.input_batch import InputBatch, PromptRows, build_input_batch
from engine.execution.interface import SampledToken, ScheduledBatch
from engine.execution.kv_storage import kv_tensor
from engine.models.decoder import Decoder
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import Sampler

if TYPE_CHECKING:
    from engine.execution.cuda_graphs import DecodeGraphs

_PROMPT_ROWS_AT_ONCE = 64  # a row of float32 logits can be more than half a megabyte


class TorchRunner:
    """A ModelRunner. Owns the model and `sampler`; borrows `kv_buffer`, which must hold exactly `num_blocks` blocks of `layout`."""

    def __init__(
        self, model: Decoder, layout: KVLayout, kv_buffer: memoryview | Tensor, num_blocks: int, max_model_len: int
    ) -> None:
        self._model = model
        self._layout = layout
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(model.config.eos_token_ids)
        make = model.kernels.sampling
        self.sampler = Sampler(model.config.vocab_size, self._eos_token_ids, None if make is None else make())
        memory = kv_tensor(kv_buffer, layout, num_blocks)
        self._device = memory.device
        self._cache = model.kernels.kv_cache(memory, model.config.windows)
        self._graphs: DecodeGraphs | None = None

    @property
    def layout(self) -> KVLayout:
        """What its KV memory looks like."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Size of its KV memory in blocks."""
        return self._num_blocks

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model.config.vocab_size

    @property
    def max_model_len(self) -> int:
        """The context in tokens."""
        return self._max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer unless it ignores them."""
        return self._eos_token_ids

    @torch.inference_mode()
    def record(self, max_rows: int) -> None:
        """On a GPU: record decode steps of up to `max_rows` rows, which are replayed from then on."""
        if self._device.type == "cuda":
            # Not at the top of the file: it needs triton, which a CPU does not.
            from engine.execution.cuda_graphs import CudaRecorder, graphs_for

            self._graphs = graphs_for(self._model, self._cache, max_rows, self._max_model_len, CudaRecorder())

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        """Forward and sample; one result per request of the batch, in its order."""
        inputs = build_input_batch(batch)
        results = [SampledToken(None)] * len(batch.requests)
        # Logprobs of a prompt want hidden states by the row; without them, logits come in the same go as everything else.
        hidden = self._forward(inputs) if inputs.prompts or not inputs.samples else None
        if inputs.samples:
            logits = self._step(inputs) if hidden is None else self._sampled_logits(hidden, inputs)
            sampled = self.sampler.sample(logits, [batch.requests[i] for i in inputs.samples])
            for index, token in zip(inputs.samples, sampled, strict=True):
                results[index] = token
        if hidden is not None:
            for prompt in inputs.prompts:
                made = results[prompt.index]
                results[prompt.index] = replace(made, prompt_logprobs=self._prompt_logprobs(batch, prompt, hidden))
        if not inputs.samples:
            # Tokens come to the host when all before them is done; without one, KV may still be on its way to memory.
            finish(self._device.type)
        return tuple(results)

    def logits(self, batch: ScheduledBatch) -> Tensor:
        """Forward without sampling: [requests that would sample, vocab] in the model's dtype, in batch order."""
        with torch.inference_mode():
            inputs = build_input_batch(batch)
            return self._sampled_logits(self._forward(inputs), inputs) if inputs.prompts else self._step(inputs)

    def _sampled_logits(self, hidden: Tensor, inputs: InputBatch) -> Tensor:
        return self._model.logits(hidden[inputs.num_rows - len(inputs.samples) :])

    def _forward(self, inputs: InputBatch) -> Tensor:
        attention = self._cache.attention(inputs.segments)
        inputs = inputs.on(self._device)
        return self._model.forward(inputs.token_ids, inputs.positions, attention, inputs.rows)

    def _step(self, inputs: InputBatch) -> Tensor:
        if self._graphs is not None and self._graphs.take(inputs):
            return self._graphs.step(inputs)
        attention = self._cache.attention(inputs.segments)
        inputs = inputs.on(self._device)
        return self._model.step(inputs.token_ids, inputs.positions, attention, inputs.rows)

    def _prompt_logprobs(self, batch: ScheduledBatch, prompt: PromptRows, hidden: Tensor) -> tuple[TokenLogprob, ...]:
        asked = batch.requests[prompt.index].sampling.prompt_logprobs
        ids = prompt.next_token_ids
        found: list[TokenLogprob] = []
        for at in range(0, len(ids), _PROMPT_ROWS_AT_ONCE):
            some = ids[at : at + _PROMPT_ROWS_AT_ONCE]
            rows = hidden[prompt.start + at : prompt.start + at + len(some)]
            found.extend(prompt_logprobs(self._model.logits(rows), some, asked or 0))
        return tuple(found)
