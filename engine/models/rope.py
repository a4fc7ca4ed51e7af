"""Rotary position embedding: from a config's parameters to the angle of every position.

    default   θ^(−2i/d)                  linear    the same ÷ factor
    dynamic   θ grows with the length    yarn, llama3   slow dimensions ÷ factor, fast ones kept, a ramp between

`dynamic` is stateful in other systems: the base depends on the longest sequence seen so far, so a key's rotation depends
on how its prompt was cut into chunks. Here position p is always rotated as in a sequence of p + 1 tokens, which is what a
token-by-token run gives, so that chunks, prefix hits and hand-offs agree. Does not know heads or layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SLAB = 512
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotation; fields that a type does not use keep their defaults.

    `original_max_positions` is the context of the pretraining, in tokens. `attention_factor` None: derived (yarn).
    """

    rope_type: str
    theta: float
    original_max_positions: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


class Rope:
    """The rotation of one model; owns its inverse frequencies [head_size / 2], float32, and a table of what it has met.

    Angles are computed once for each position, in slabs that begin at fixed positions: a library may round the cosine of
    a number by where it lies in a tensor, and a token's rotation must not depend on the chunk that it comes in.
    """

    def __init__(self, config: RopeConfig, head_size: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self._config = config
        self._head_size = head_size
        self._inv_freq, self._scale = _inverse_frequencies(config, head_size)
        self._cos = torch.empty(0, 1, head_size, dtype=dtype, device=device)
        self._sin = self._cos
        self._reserved = False

    def reserve(self, length: int) -> None:
        """Compute all positions below `length`; no other is asked for from now on."""
        self._grow(length)
        self._reserved = True

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] int64, n > 0 → cos, sin [n, 1, head_size]; sin's first half is negated (see kernels.Rotary)."""
        if not self._reserved and (highest := int(positions.max())) >= len(self._cos):
            self._grow(highest + 1)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _grow(self, length: int) -> None:
        cos, sin = [self._cos], [self._sin]
        for start in range(len(self._cos), length, _SLAB):
            for table, slab in zip((cos, sin), self._computed(torch.arange(start, start + _SLAB)), strict=True):
                table.append(slab.to(self._cos.device))
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        wide = positions.to(torch.float32)[:, None]
        angles = wide * self._frequencies_at(wide)
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        cos = torch.cat((cos, cos), dim=-1).to(self._cos.dtype)
        sin = torch.cat((-sin, sin), dim=-1).to(self._cos.dtype)
        return cos[:, None], sin[:, None]

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        """[n, 1] → [1 or n, head_size / 2]."""
        config = self._config
        if config.rope_type != "dynamic":
            return self._inv_freq
        length = (positions + 1).clamp(min=config.original_max_positions)
        growth = config.factor * length / config.original_max_positions - (config.factor - 1)
        base = config.theta * growth ** (self._head_size / (self._head_size - 2))
        return 1.0 / (base ** _exponents(self._head_size))


def _exponents(head_size: int) -> Tensor:
    return torch.arange(0, head_size, 2, dtype=torch.int64).to(torch.float32) / head_size


def _inverse_frequencies(config: RopeConfig, head_size: int) -> tuple[Tensor, float]:
    plain: Tensor = 1.0 / (config.theta ** _exponents(head_size))
    if config.rope_type == "linear":
        return plain / config.factor, 1.0
    if config.rope_type == "llama3":
        return _llama3(config, plain), 1.0
    if config.rope_type == "yarn":
        return _yarn(config, head_size)
    return plain, 1.0


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    original = config.original_max_positions
    low_wavelength = original / config.low_freq_factor
    high_wavelength = original / config.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > low_wavelength, plain / config.factor, plain)
    smooth = (original / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smoothed = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(between, smoothed, scaled)


def _yarn(config: RopeConfig, head_size: int) -> tuple[Tensor, float]:
    def dimension(rotations: float) -> float:
        turns = config.original_max_positions / (rotations * 2 * math.pi)
        return head_size * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers: Tensor = config.theta ** _exponents(head_size)
    kept = 1 - ramp
    frequencies = 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_scale(config)


def _yarn_scale(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
