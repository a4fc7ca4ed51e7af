"""The noise for a token: counter-based random bits, a pure function of (seed, position, purpose).

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), in plain integers: key = seed,
counter = (position, purpose). There is no state to save, move or lose, so the same request draws the same numbers on any
worker, in any batch, after any preemption. Does not know distributions.
"""

from __future__ import annotations

from enum import IntEnum

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


class Purpose(IntEnum):
    """What a number is for; each purpose has a stream of its own at every position."""

    TOKEN = 0


def keys(seed: int, position: int, purpose: Purpose = Purpose.TOKEN) -> tuple[int, int]:
    """Two numbers of 64 random bits, independent of each other. `seed` and `position` are non-negative and below 2**64."""
    if not (0 <= seed < 1 << 64 and 0 <= position < 1 << 64):
        raise ValueError(f"seed and position must be from 0 to 2**64 - 1, got {seed} and {position}")
    counter = (position & _MASK32, position >> 32, int(purpose), 0)
    w0, w1, w2, w3 = philox4x32(counter, (seed & _MASK32, seed >> 32))
    return w0 << 32 | w1, w2 << 32 | w3


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox on four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            product_1 >> 32 ^ c1 ^ k0,
            product_1 & _MASK32,
            product_0 >> 32 ^ c3 ^ k1,
            product_0 & _MASK32,
        )
        k0 = k0 + _WEYL_0 & _MASK32
        k1 = k1 + _WEYL_1 & _MASK32
    return c0, c1, c2, c3
