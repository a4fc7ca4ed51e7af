"""From one row of logits and one uniform number to one token: temperature, min-p, top-k, top-p, inverse CDF.

    scaled = logits / T → drop below min_p · max → keep k likeliest → keep the fewest whose mass reaches p → draw

The order among tokens is (logit descending, id ascending) everywhere, so ties never depend on a library's sort. The draw
walks the kept tokens in vocabulary order with float64 sums. Does not know requests, batches or where the number is from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contracts.sampling import SamplingParams

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


def choose(logits: Tensor, params: SamplingParams, noise: float) -> int:
    """Sample a token id from `logits`, float32 [vocab] with a finite maximum; `noise` is uniform in [0, 1)."""
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
        return _draw(scaled.exp(), noise)
    kept = kept.sort().values
    return int(kept[_draw(scaled[kept].exp(), noise)])


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


def _draw(weights: Tensor, noise: float) -> int:
    """The index whose interval of the cumulated weights [n] holds noise · total; never one with weight 0."""
    cumulated = weights.cumsum(0, dtype=torch.float64)
    total = float(cumulated[-1])
    point = min(noise * total, math.nextafter(total, 0.0))
    return int(
        torch.searchsorted(cumulated, torch.tensor(point, dtype=torch.float64, device=weights.device), right=True)
    )
