"""Logits of a batch in, one token per row out.

    with a kernel   rows → penalties.adjust where there are any → all in one call, keys = f(seed, position)     ┐
    by torch   row ─┬─ greedy, untouched, no logprobs ──▶ one max over all such rows                             ├▶ logprobs
                    └─ else, alone: penalties.adjust → greedy max | choice.choose(keys = f(seed, position))     ┘

A row's token is a pure function of its logits, parameters, seed, position and tokens: a kernel promises it, and by torch
whatever is not an exact reduction (max) runs on that row by itself, so the batch around it cannot change a bit. Does not know
models, blocks or stop rules.
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
from kernels.sampling import Drawn, Sampling, Wish

# Below this, dividing by the temperature only loses digits: the likeliest token is the answer (vLLM's bound).
GREEDY_TEMPERATURE = 1e-5
_RUN = 128


class Sampler:
    """Chooses tokens for a model with `vocab_size` tokens, of which `eos_token_ids` end an answer. Holds no state.

    `kernel` None: by torch, which says what a kernel must do.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], kernel: Sampling | None = None) -> None:
        self._vocab_size = vocab_size
        self._kernel = kernel
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
        if self._kernel is not None:
            return self._sample_at_once(logits, rows, self._kernel)
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

    def _sample_at_once(
        self, logits: Tensor, rows: Sequence[SamplingRow], kernel: Sampling
    ) -> tuple[SampledToken, ...]:
        changed = [index for index, row in enumerate(rows) if changes_logits(row)]
        as_they_are = [index for index in range(len(rows)) if index not in changed]
        drawn = dict(zip(as_they_are, kernel(logits, as_they_are, [_wish(rows[i]) for i in as_they_are]), strict=True))
        if changed:
            adjusted = torch.stack([adjust(logits[index], rows[index], self._eos_token_ids) for index in changed])
            own = kernel(adjusted, range(len(changed)), [_wish(rows[index]) for index in changed])
            drawn.update(zip(changed, own, strict=True))
        return tuple(_sampled(drawn[index], logits[index], row) for index, row in enumerate(rows))

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


def _wish(row: SamplingRow) -> Wish:
    params = row.sampling
    if _is_greedy(row):
        return Wish()
    return Wish(params.temperature, params.top_k, params.top_p, params.min_p, keys(params.seed, len(row.token_ids)))


def _sampled(drawn: Drawn, raw: Tensor, row: SamplingRow) -> SampledToken:
    if drawn.token_id < 0:
        return _fault(drawn.largest, row)
    if row.sampling.logprobs is None:
        return SampledToken(drawn.token_id)
    return SampledToken(drawn.token_id, token_logprob(raw, drawn.token_id, row.sampling.logprobs))


def _fault(largest: float, row: SamplingRow) -> SampledToken:
    return SampledToken(None, fault=f"the largest logit at position {len(row.token_ids)} is {largest}, not finite")


def _is_greedy(row: SamplingRow) -> bool:
    return row.sampling.temperature < GREEDY_TEMPERATURE


def _is_plain(row: SamplingRow) -> bool:
    return _is_greedy(row) and row.sampling.logprobs is None and not changes_logits(row)


def _likeliest(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    values, ids = _first_max(logits)
    return [
        SampledToken(token_id) if math.isfinite(value) else _fault(value, row)
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
