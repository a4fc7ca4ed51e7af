"""The next token of each row on a GPU: filters that a row asks for by one sort of all such rows, then the race, in one go.

    rows ─┬─ no filter ───────────────────────────────────────────────────────────────┐
          └─ top-k, top-p, min-p ─▶ sort (logit descending, id ascending) ─▶ −∞ ─▶ the race of `kernels.triton.sampling`

What is filtered out has weight 0 in the race and changes nobody's noise, so a row's token is the CPU's.
Does not know seeds or penalties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sampling import Drawn, Wish
from kernels.triton.sampling import likeliest, sample


def choose_tokens(logits: Tensor, rows: Sequence[int], wishes: Sequence[Wish]) -> list[Drawn]:
    """See `kernels.sampling.Sampling`."""
    if not rows:
        return []
    device = logits.device
    everything = len(rows) == len(logits) and list(rows) == list(range(len(rows)))
    picked = logits if everything else logits[torch.tensor(list(rows), device=device)]
    if all(wish.temperature == 0.0 for wish in wishes):
        values, ids = likeliest(picked)
    else:
        filtered = [i for i, wish in enumerate(wishes) if _filters(wish)]
        if filtered:
            picked = _without(picked.to(torch.float32, copy=True), filtered, wishes)
        warmth = torch.tensor([wish.temperature for wish in wishes], dtype=torch.float32).to(device)
        bits = torch.tensor([[_signed(key) for key in wish.keys] for wish in wishes], dtype=torch.int64).to(device)
        values, ids = sample(picked, warmth, bits)
    return [
        Drawn(token_id if math.isfinite(value) else -1, value)
        for value, token_id in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def _filters(wish: Wish) -> bool:
    return wish.temperature > 0.0 and (wish.top_k > 0 or wish.top_p < 1.0 or wish.min_p > 0.0)


def _without(logits: Tensor, rows: list[int], wishes: Sequence[Wish]) -> Tensor:
    """float32 `logits` [n, vocab] with −∞ where one of `rows` has filtered a token out; they are changed."""
    device, vocab = logits.device, logits.shape[1]
    some = torch.tensor(rows, device=device)
    chosen = [wishes[i] for i in rows]

    def column(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)[:, None].to(device)

    warmth = torch.tensor([wish.temperature for wish in chosen], dtype=torch.float32)[:, None].to(device)
    # Stable: of equal logits the lower id comes first.
    ordered, order = logits[some].sort(dim=1, descending=True, stable=True)
    scaled = ordered / warmth
    wide = (scaled - scaled[:, :1]).to(torch.float64)
    weights = wide.exp()
    least = column([math.log(wish.min_p) if wish.min_p > 0.0 else -math.inf for wish in chosen])
    count = column([wish.top_k if wish.top_k > 0 else vocab for wish in chosen])
    kept = (wide >= least) & (torch.arange(vocab, device=device) < count)
    weights = torch.where(kept, weights, 0.0)
    before = weights.cumsum(1) - weights
    mass = column([wish.top_p if wish.top_p < 1.0 else math.inf for wish in chosen]) * weights.sum(1, keepdim=True)
    kept &= before < mass
    kept[:, 0] = True
    ordered = torch.where(kept, ordered, -math.inf)
    logits[some] = torch.empty_like(ordered).scatter_(1, order, ordered)
    return logits


def _signed(key: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return key - (1 << 64) if key >> 63 else key
