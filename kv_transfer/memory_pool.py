"""A KVPool without an engine: block numbers, strict about who holds them. For simulations and tests of the hand-off.

    free ──reserve──▶ leased ──adopt──▶ adopted ──finish──▶ free
                        └──release──▶ free

Giving a lease back twice, or after its adoption, is an InternalError. Blocks in `known` are a prefix cache that is always
there. Does not know bytes, windows or time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contracts.errors import InternalError
from contracts.request import GenerationRequest


@dataclass(frozen=True, slots=True, eq=False)
class BlockLease:
    """Blocks held for one hand-off; the first ones may be shared ones from the cache."""

    handoff_id: str
    block_ids: tuple[int, ...]
    num_cached_tokens: int
    cached_seals: tuple[bytes | None, ...] = ()


class MemoryPool:
    """`num_blocks` blocks of `block_size` tokens; `known` maps block hashes to blocks beyond those."""

    def __init__(self, num_blocks: int, block_size: int, known: Mapping[bytes, int] | None = None) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._known = dict(known or {})
        self._seals: dict[int, bytes] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._leased: dict[BlockLease, None] = {}
        self.adopted: dict[str, BlockLease] = {}

    @property
    def free(self) -> frozenset[int]:
        """Blocks that nobody holds."""
        return frozenset(self._free)

    @property
    def num_leased(self) -> int:
        """Leases that are neither adopted nor released."""
        return len(self._leased)

    async def reserve(self, handoff_id: str, num_tokens: int, block_hashes: tuple[bytes, ...]) -> BlockLease | None:
        """See KVPool."""
        cached: list[int] = []
        for name in block_hashes:
            if name not in self._known:
                break
            cached.append(self._known[name])
        num_new = -(-num_tokens // self._block_size) - len(cached)
        if num_new > len(self._free):
            return None
        blocks = tuple(cached) + tuple(self._free.pop() for _ in range(num_new))
        seals = tuple(self._seals.get(block) for block in cached)
        lease = BlockLease(handoff_id, blocks, len(cached) * self._block_size, seals)
        self._leased[lease] = None
        return lease

    async def adopt(
        self, request: GenerationRequest, lease: BlockLease, num_computed_tokens: int, seals: Sequence[bytes] = ()
    ) -> None:
        """See KVPool. Only blocks of the cache are ever found again, so only their seals are kept."""
        self._take_back(lease)
        if num_computed_tokens != request.num_tokens - 1:
            raise InternalError(f"{lease.handoff_id}: {num_computed_tokens} computed of {request.num_tokens} tokens")
        if request.request_id in self.adopted:
            raise InternalError(f"{request.request_id} adopted twice")
        self.adopted[request.request_id] = lease
        cached = lease.block_ids[: lease.num_cached_tokens // self._block_size]
        self._seals = dict(zip(cached, seals, strict=False)) | self._seals

    async def release(self, lease: BlockLease, spoiled: Sequence[int] = ()) -> None:
        """See KVPool."""
        self._take_back(lease)
        gone = {lease.block_ids[position] for position in spoiled}
        self._known = {name: block for name, block in self._known.items() if block not in gone}
        self._put(lease)

    def finish(self, request_id: str) -> None:
        """The adopted request is done: its blocks are free."""
        self._put(self.adopted.pop(request_id))

    def _take_back(self, lease: BlockLease) -> None:
        if lease not in self._leased:
            raise InternalError(f"{lease.handoff_id}: a lease that is not out was given back")
        del self._leased[lease]

    def _put(self, lease: BlockLease) -> None:
        self._free.extend(lease.block_ids[lease.num_cached_tokens // self._block_size :])
