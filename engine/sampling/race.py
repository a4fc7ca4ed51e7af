"""From weights and keys to one index, drawn with probability proportional to its weight, as a race.

Index i arrives at E_i / w_i, where E_i is exponentially distributed noise of its own; the first to arrive is drawn (the
exponential race, which is the Gumbel-max trick without its logarithm). Whether a number is before another depends on those
two weights alone, so a change of the weights in their last bits changes the draw only when two arrivals are that close. An
inverse CDF would change it wherever the point falls near any of a hundred thousand borders, all moved by all weights.

Noise for a whole vocabulary is dear, so there are two races: between runs of 128 neighbours by their sums, then within the
run that won. That is the same distribution, and as firm. Does not know tokens, seeds or filters.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_RUN = 128
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def draw(weights: Tensor, keys: tuple[int, int]) -> int:
    """An index into `weights` [n], which are finite, not negative and not all 0; never one with weight 0.

    `keys` are 64 random bits for each of the two races.
    """
    short = -len(weights) % _RUN
    if short:
        weights = torch.cat((weights, weights.new_zeros(short)))
    runs = weights.reshape(-1, _RUN)
    run = _first(runs.sum(dim=1, dtype=torch.float64), keys[0])
    return run * _RUN + _first(runs[run].to(torch.float64), keys[1])


def exponentials(key: int, count: int) -> NDArray[np.float64]:
    """`count` independent numbers, exponentially distributed with mean 1, above 0, as a function of 64 random bits.

    Their bits are the outputs of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014) from the state `key`.
    """
    bits = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN + np.uint64(key)
    bits = (bits ^ bits >> np.uint64(30)) * _MIX_1
    bits = (bits ^ bits >> np.uint64(27)) * _MIX_2
    bits ^= bits >> np.uint64(31)
    uniform = ((bits >> np.uint64(12)) + 0.5) * 2.0**-52  # above 0 and below 1, exactly
    noise: NDArray[np.float64] = -np.log(uniform)
    return noise


def _first(weights: Tensor, key: int) -> int:
    noise = torch.from_numpy(exponentials(key, len(weights))).to(weights.device)
    return int((noise / weights).argmin())
