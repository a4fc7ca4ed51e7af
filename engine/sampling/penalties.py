"""What a request's parameters and its tokens so far do to its logits, before temperature.

    min_tokens mask → logit bias → repetition → frequency → presence penalty          (vLLM's order)

Repetition looks at prompt and output, frequency and presence at the output only. Each function takes and returns one row,
float32 [vocab]; nothing here knows of other rows or of randomness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from contracts.sampling import SamplingParams
from engine.sampling.row import SamplingRow


def changes_logits(row: SamplingRow) -> bool:
    """Whether `adjust` would do anything to this row at this position."""
    params = row.sampling
    return bool(
        _below_min_tokens(row)
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def adjust(logits: Tensor, row: SamplingRow, eos_token_ids: Iterable[int]) -> Tensor:
    """A new float32 [vocab] with mask, bias and penalties applied; `logits` [vocab] of any float type is not changed."""
    params = row.sampling
    adjusted = logits.to(torch.float32, copy=True)
    if _below_min_tokens(row):
        # Also with ignore_eos, as vLLM does: an end token that will not end the answer is still not an answer.
        adjusted[_index({*eos_token_ids, *params.stop_token_ids}, logits)] = float("-inf")
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        adjusted[_index(ids, logits)] += torch.tensor(biases, dtype=torch.float32, device=logits.device)
    if params.repetition_penalty != 1.0:
        _penalise_repetition(adjusted, row.token_ids, params.repetition_penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        _penalise_output(adjusted, row.token_ids[row.num_prompt_tokens :], params)
    return adjusted


def _below_min_tokens(row: SamplingRow) -> bool:
    return len(row.token_ids) - row.num_prompt_tokens < row.sampling.min_tokens


def _index(token_ids: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=like.device)


def _penalise_repetition(adjusted: Tensor, token_ids: Sequence[int], penalty: float) -> None:
    seen = torch.unique(_index(token_ids, adjusted))
    values = adjusted[seen]
    adjusted[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_output(adjusted: Tensor, output_token_ids: Sequence[int], params: SamplingParams) -> None:
    if not output_token_ids:
        return
    seen, counts = torch.unique(_index(output_token_ids, adjusted), return_counts=True)
    adjusted[seen] -= params.frequency_penalty * counts.to(torch.float32)
    adjusted[seen] -= params.presence_penalty
