"""From one row of logits and random bits to one token: temperature, min-p, top-k, top-p, and a race between what is left.

    scaled = logits / T → drop below min_p · max → keep k likeliest → keep the fewest whose mass reaches p → draw

The order among tokens is (logit descending, id ascending) everywhere, so ties never depend on a library's sort. A token's
noise belongs to its id, whatever else is kept. Does not know requests, batches or where the bits are from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contracts.sampling import SamplingParams
from engine.sampling.race import draw

# A first guess at how many tokens hold the nucleus; most rows need no more, and a partial sort of these few is an order of
# magnitude cheaper than a sort of the vocabulary. The result does not depend on it.
_NUCLEUS_GUESS = 128
_NUCLEUS_GROWTH = 16


def largest(values: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of `values` [vocab], ordered by (value descending, id ascending), int64 [count].

    torch.topk says nothing about which of equal values it takes; here the lowest ids win.
    """
    count = min(count, values.shape[0])
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    top, ids = values.topk(count)
    threshold = top[-1]
    above = ids[top > threshold]
    equal = (values == threshold).nonzero().flatten()[: count - above.shape[0]]
    ids = torch.cat((above, equal)).sort().values
    order = values[ids].sort(descending=True, stable=True).indices
    return ids[order]


def choose(logits: Tensor, params: SamplingParams, keys: tuple[int, int]) -> int:
    """Sample a token id from `logits`, float32 [vocab] with a finite maximum; `keys` are two times 64 random bits."""
    scaled = logits / params.temperature
    scaled = scaled - scaled.max()
    if params.min_p > 0.0:
        scaled = scaled.masked_fill(scaled < math.log(params.min_p), float("-inf"))
    if 0 < params.top_k < scaled.shape[0]:
        kept = largest(scaled, params.top_k)
        if params.top_p < 1.0:
            weights = scaled[kept].to(torch.float64).exp()
            kept = kept[: _nucleus_size(weights, params.top_p, _total(weights))]
    elif params.top_p < 1.0:
        kept = _nucleus(scaled, params.top_p)
    else:
        return draw(scaled.exp(), keys)
    weights = torch.zeros_like(scaled)
    weights[kept] = scaled[kept].exp()
    return draw(weights, keys)


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    total = _total(scaled.exp())
    count = _NUCLEUS_GUESS
    while True:
        kept = largest(scaled, count)
        weights = scaled[kept].to(torch.float64).exp()
        size = _nucleus_size(weights, top_p, total)
        if size < count or count >= scaled.shape[0]:
            return kept[:size]
        count *= _NUCLEUS_GROWTH


def _nucleus_size(weights: Tensor, top_p: float, total: float) -> int:
    """How many of `weights` (descending) it takes until their sum reaches top_p · total; at least one."""
    before = weights.cumsum(0)[:-1]
    return 1 + int((before < top_p * total).sum())


def _total(weights: Tensor) -> float:
    # cumsum adds from left to right whatever the number of threads; sum does not.
    return float(weights.cumsum(0, dtype=torch.float64)[-1])
