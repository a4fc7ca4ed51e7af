"""Logits of a batch in, one token per row out.

    row ──┬─ greedy, untouched, no logprobs ──▶ one max over all such rows
          └─ else, alone: penalties.adjust → greedy max | choice.choose(keys = f(seed, position)) → logprobs.token_logprob

A row's token is a pure function of its logits, parameters, seed, position and tokens: whatever is not an exact reduction
(max) runs on that row by itself, so the batch around it cannot change a bit. Does not know models, blocks or stop rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.choice import choose
from engine.sampling.logprobs import token_logprob
from engine.sampling.penalties import adjust, changes_logits
from engine.sampling.random import keys
from engine.sampling.row import SampledToken, SamplingRow

# Below this, dividing by the temperature only loses digits: the likeliest token is the answer (vLLM's bound).
GREEDY_TEMPERATURE = 1e-5
_RUN = 128


class Sampler:
    """Chooses tokens for a model with `vocab_size` tokens, of which `eos_token_ids` end an answer. Holds no state."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        # A tokenizer may know end tokens that a cut-down output layer cannot make; they need no mask.
        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[SampledToken, ...]:
        """The next token of each row, in their order; `logits` is [len(rows), vocab_size], any float type, not changed.

        A row whose largest logit is NaN or infinite gets a fault instead of a token, which would be a lie; the other rows
        get theirs all the same.
        """
        if logits.shape != (len(rows), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, expected ({len(rows)}, {self._vocab_size})")
        results: list[SampledToken | None] = [None] * len(rows)
        plain = [index for index, row in enumerate(rows) if _is_plain(row)]
        if plain:
            picked = logits if len(plain) == len(rows) else logits[plain]
            for index, likeliest in zip(plain, _likeliest(picked, [rows[i] for i in plain]), strict=True):
                results[index] = likeliest
        return tuple(
            result if result is not None else self._sample_alone(logits[index], rows[index])
            for index, result in enumerate(results)
        )

    def _sample_alone(self, raw: Tensor, row: SamplingRow) -> SampledToken:
        params = row.sampling
        logits = adjust(raw, row, self._eos_token_ids) if changes_logits(row) else raw.to(torch.float32)
        likeliest = _likeliest(logits.unsqueeze(0), [row])[0]
        token_id = likeliest.token_id
        if token_id is None:
            return likeliest
        if not _is_greedy(row):
            token_id = choose(logits, params, keys(params.seed, len(row.token_ids)))
        if params.logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, token_logprob(raw, token_id, params.logprobs))


def _is_greedy(row: SamplingRow) -> bool:
    return row.sampling.temperature < GREEDY_TEMPERATURE


def _is_plain(row: SamplingRow) -> bool:
    return _is_greedy(row) and row.sampling.logprobs is None and not changes_logits(row)


def _likeliest(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    values, ids = _first_max(logits)
    return [
        SampledToken(token_id)
        if math.isfinite(value)
        else SampledToken(None, fault=f"the largest logit at position {len(row.token_ids)} is {value}, not finite")
        for value, token_id, row in zip(values.tolist(), ids.tolist(), rows, strict=True)
    ]


def _first_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and the first place it stands at; NaN counts as largest.

    max, not argmax: on bfloat16 argmax takes four times as long. And where the vocabulary divides, first the best run of
    128 logits (amax is vectorised, max with its index is not), then the best in it: half of the time again.
    """
    if logits.shape[-1] % _RUN:
        values, ids = logits.max(dim=-1)
        return values, ids
    runs = logits.reshape(len(logits), -1, _RUN)
    best = runs.amax(dim=-1).max(dim=-1).indices
    values, within = runs[torch.arange(len(runs), device=runs.device), best].max(dim=-1)
    return values, best * _RUN + within
