"""From a scheduled batch to what the forward pass takes: flat token ids, positions, segments, and the rows wanted.

    requests        [decode][decode][prefill chunk of 3]      (any order works)
    rows of pass      0       1       2  3  4
    wanted rows       0       1             4                 those that sample, and prompt rows whose logprobs are asked for

Does not know the model, sampling rules or KV memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.execution.interface import ScheduledBatch, ScheduledRequest
from kernels.batch import Segment


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one request whose next token is a known prompt token: `start` is the first's index among the wanted rows."""

    index: int  # of the request in the batch
    start: int
    next_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One forward pass. `rows` are the pass's rows to compute to the end, None for all; `samples[i]` is the request whose
    token the i-th of the last len(samples) wanted rows gives. Prompt rows come before those."""

    token_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    segments: tuple[Segment, ...]
    rows: Tensor | None
    num_rows: int  # wanted
    samples: list[int]
    prompts: list[PromptRows]

    def on(self, device: torch.device) -> InputBatch:
        """The same with its tensors on `device`."""
        rows = None if self.rows is None else self.rows.to(device)
        return replace(self, token_ids=self.token_ids.to(device), positions=self.positions.to(device), rows=rows)


def build_input_batch(batch: ScheduledBatch) -> InputBatch:
    """Flatten `batch`, in its order."""
    token_ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    prompt_rows: list[int] = []
    sample_rows: list[int] = []
    samples: list[int] = []
    prompts: list[PromptRows] = []
    for index, request in enumerate(batch.requests):
        start, count = request.num_computed_tokens, request.num_scheduled_tokens
        first_row = len(token_ids)
        segments.append(Segment(first_row, count, start, request.block_ids))
        token_ids.extend(request.token_ids[start : start + count])
        positions.extend(range(start, start + count))
        known = _known_next_tokens(request)
        if known:
            prompts.append(PromptRows(index, len(prompt_rows), known))
            prompt_rows.extend(range(first_row, first_row + len(known)))
        if request.samples:
            samples.append(index)
            sample_rows.append(first_row + count - 1)
    wanted = prompt_rows + sample_rows
    everything = len(wanted) == len(token_ids) and wanted == list(range(len(token_ids)))
    return InputBatch(
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        tuple(segments),
        None if everything else torch.tensor(wanted, dtype=torch.int64),
        len(wanted),
        samples,
        prompts,
    )


def _known_next_tokens(request: ScheduledRequest) -> list[int]:
    if request.sampling.prompt_logprobs is None:
        return []
    first = request.num_computed_tokens + 1
    return request.token_ids[first : min(first + request.num_scheduled_tokens, request.num_prompt_tokens)]
