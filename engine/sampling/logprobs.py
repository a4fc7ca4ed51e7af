"""Log-probabilities as OpenAI and vLLM report them: from the raw logits, before temperature, penalties and filters.

Each row is reduced alone, as a vector, so its numbers do not depend on the rows beside it. Does not know how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contracts.request import TokenLogprob
from engine.sampling.choice import largest


def token_logprob(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """The log-probability and rank of `token_id` in raw `logits` [vocab], and the `num_top` likeliest tokens.

    Ranks count from 1 in the order (logit descending, id ascending), so they are unique and agree with `top`.
    """
    logits = logits.to(torch.float32)
    logprobs = torch.log_softmax(logits, dim=-1)
    value = logits[token_id]
    rank = 1 + int((logits > value).sum()) + int((logits[:token_id] == value).sum())
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        ids = largest(logits, num_top)
        top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return TokenLogprob(token_id=token_id, logprob=float(logprobs[token_id]), rank=rank, top=top)


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """One entry per row of raw `logits` [n, vocab] for `token_ids` [n]: row i is the position before token_ids[i]."""
    if logits.shape[0] != len(token_ids):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(token_ids)} tokens")
    return tuple(token_logprob(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True))
