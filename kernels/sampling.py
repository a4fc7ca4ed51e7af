"""The op from rows of logits to one token each, as a type; what it means is said, slowly and in torch, by `engine.sampling`.

Does not know requests, seeds or penalties: a row's noise comes as two keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Wish:
    """How one row's token is chosen. `temperature` 0 takes the likeliest, whatever else is said; `top_k` 0 takes all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    keys: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row's token and its largest logit; where that is NaN or infinite there is no token (-1)."""

    token_id: int
    largest: float


class Sampling(Protocol):
    """Chooses a token for each of some rows. A row's token does not depend on the rows beside it."""

    def __call__(self, logits: Tensor, rows: Sequence[int], wishes: Sequence[Wish]) -> list[Drawn]:
        """One for each of `rows` of `logits` [n, vocab], which is not changed, by the wish at its place."""
        ...
