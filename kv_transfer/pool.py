"""What the decode side of hand-offs asks of the engine behind it, and whom it tells. The door implements both.

    reserve ──▶ lease ──┬── adopt   (the engine's from the call on, whatever comes of it)
                        └── release (the pool's again)

A lease ends in exactly one of the two, exactly once. Does not know connectors, windows or peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from contracts.errors import DiptychError
from contracts.request import GenerationRequest
from contracts.ticket import Ticket


class ReservedLease(Protocol):
    """Blocks held for one hand-off."""

    @property
    def block_ids(self) -> Sequence[int]:
        """All blocks of the request in order; those found in the prefix cache come first."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV is there already: whole blocks."""
        ...

    @property
    def cached_seals(self) -> Sequence[bytes | None]:
        """Of each cached block, the seal with which it was adopted, if it was with one."""
        ...


LeaseT = TypeVar("LeaseT", bound=ReservedLease)


class KVPool(Protocol[LeaseT]):
    """The engine's blocks, as the hand-off sees them."""

    async def reserve(self, handoff_id: str, num_tokens: int, block_hashes: tuple[bytes, ...]) -> LeaseT | None:
        """Room for `num_tokens` tokens, or None when there is none now. InvalidRequest when there can never be."""
        ...

    async def adopt(
        self, request: GenerationRequest, lease: LeaseT, num_computed_tokens: int, seals: Sequence[bytes]
    ) -> None:
        """The engine goes on with `request`. The lease is its own from now on: where this raises, it has been released.

        `seals` (none, or one for each block in order) are kept for full blocks that are found again, as `cached_seals`.
        """
        ...

    async def release(self, lease: LeaseT, spoiled: Sequence[int] = ()) -> None:
        """Nothing can write to these blocks any more: free them. Cached blocks at positions `spoiled` must not be found again."""
        ...


class HandoffEvents(Protocol):
    """Whom the receiver tells how a hand-off ended: exactly one of the two, once."""

    def on_adopted(self, ticket: Ticket) -> None:
        """The engine has it; its tokens will come under `ticket.handoff_id`."""
        ...

    def on_lost(self, handoff_id: str, cause: DiptychError) -> None:
        """It ended without being adopted; its blocks are free."""
        ...
