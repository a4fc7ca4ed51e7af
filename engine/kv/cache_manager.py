"""Leases blocks for tokens and finds those whose KV is there already: block pool, prefix cache and leases as one.

    lease(num_tokens, hashes) ─▶ KVLease ─ grow(tokens) ─ publish(hashes, computed) ─▶ release ─▶ blocks kept for later hits

A block is published once all its tokens are computed; a hit is the longest chain of whole published blocks, pinned by the
lease that found it. Published blocks are never written again, since computing goes on behind them. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contracts.block_hash import BlockHasher
from engine.kv.block_lives import BlockLives, LifeListener
from engine.kv.block_pool import BlockPool, PoolCorrupted
from engine.kv.lease import KVLease


class KVCacheManager:
    """The KV memory's books. Owns the pool; gives blocks out only as leases and knows every lease that lives."""

    def __init__(self, num_blocks: int, block_size: int, hash_seed: int, *, enable_prefix_caching: bool = True) -> None:
        self.hasher = BlockHasher(block_size, hash_seed)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._pool = BlockPool(num_blocks)
        self.news = self._pool.news
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._leases: set[KVLease] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the pool that is leased, 0 to 1."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def watch_lives(self, now: Callable[[], float], listener: LifeListener) -> None:
        """Tell how long blocks live and lie idle, by this clock."""
        self._pool.lives = BlockLives(self._pool.num_blocks, now, listener)

    def lease(self, holder: str, num_tokens: int, hashes: Sequence[bytes], max_cached_tokens: int) -> KVLease | None:
        """Room for `num_tokens` tokens, starting with cached blocks (at most `max_cached_tokens` tokens), or None and no change.

        `hashes` are those of the tokens' full blocks; `holder` is for messages.
        """
        hits = self._match(hashes[: max_cached_tokens // self.block_size])
        num_new = self.num_blocks_for(num_tokens) - len(hits)
        if num_new > self._pool.num_free - self._pool.num_unheld(hits):
            return None
        self._pool.pin(hits)
        blocks = self._pool.allocate(num_new)
        if blocks is None:
            raise PoolCorrupted(f"{num_new} blocks were free and are not")
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += len(hits) * self.block_size
        lease = KVLease(holder, hits + blocks, (len(hits), len(hits) * self.block_size), self._give_back)
        lease.cached_seals = tuple(self._pool.seal_of(block_id) for block_id in hits)
        self._leases.add(lease)
        return lease

    def grow(self, lease: KVLease, num_tokens: int) -> bool:
        """Let the lease hold `num_tokens` tokens; False, and nothing taken, when there is no room."""
        blocks = self._pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(lease.block_ids)))
        if blocks is None:
            return False
        lease.block_ids.extend(blocks)
        return True

    def publish(self, lease: KVLease, hashes: Sequence[bytes], num_computed_tokens: int) -> None:
        """Make the lease's full blocks among its first `num_computed_tokens` tokens findable by their hashes."""
        if not self._enable_prefix_caching:
            return
        for index in range(lease.num_published_blocks, num_computed_tokens // self.block_size):
            self._pool.name(lease.block_ids[index], hashes[index])
            lease.num_published_blocks = index + 1

    def seal(self, lease: KVLease, seals: Sequence[bytes], num_computed_tokens: int) -> None:
        """Keep seals of the lease's leading blocks, of those that are published and full; see BlockPool.seal."""
        full = seals[: num_computed_tokens // self.block_size]
        for block_id, seal in zip(lease.block_ids, full, strict=False):
            self._pool.seal(block_id, seal)

    def forget(self, lease: KVLease, positions: Sequence[int]) -> None:
        """The content of the lease's blocks at these positions is spoiled: no other request may find it."""
        for position in positions:
            self._pool.forget(lease.block_ids[position])

    def check_integrity(self) -> None:
        """Raise PoolCorrupted unless free + cached + leased is all blocks and every count matches the living leases."""
        num_holders = [0] * self._pool.num_blocks
        for lease in self._leases:
            for block_id in lease.block_ids:
                num_holders[block_id] += 1
        self._pool.check_integrity(num_holders)

    def living_leases(self) -> frozenset[KVLease]:
        """Every lease that has not been released."""
        return frozenset(self._leases)

    def _match(self, hashes: Sequence[bytes]) -> list[int]:
        hits: list[int] = []
        for name in hashes:
            block_id = self._pool.find(name)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _give_back(self, lease: KVLease) -> None:
        self._leases.remove(lease)
        self._pool.unpin(lease.block_ids)
