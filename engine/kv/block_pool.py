"""Which blocks are free, how often each is held, and which content an unheld block still has.

            allocate                     unpin the last holder, no name
    FREE ──────────────▶ HELD (count ≥ 1) ─────────────────────────────▶ FREE
      ▲                   ▲      │ unpin the last holder, named
      │ evicted: oldest   │ pin  ▼
      └───────────────── KEPT (count 0, content and name intact)

A kept block counts as free: allocate takes plain free blocks first, then evicts the kept block that was let go longest
ago. A named block may carry a seal: whatever its holder wants to know of its content later. What becomes of names is told to
`news`, for whoever listens. Does not know leases, tokens or what a name or a seal means.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.block_lives import BlockLives
from engine.kv.block_news import BlockNews


class PoolCorrupted(RuntimeError):
    """The pool's books contradict each other or its holders: a programming error, never a load condition."""


class BlockPool:
    """The books of `num_blocks` blocks with ids from 0. Owns ids; who holds them is the business of leases."""

    def __init__(self, num_blocks: int) -> None:
        self._num_holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: dict[int, None] = {}  # oldest first
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._seal_of: dict[int, bytes] = {}
        self.news = BlockNews(self._block_of)
        self.lives: BlockLives | None = None  # told, if there is one

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        """Blocks that allocate could hand out now, kept ones included."""
        return len(self._free) + len(self._kept)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` blocks held once each, their old content forgotten; None, and nothing taken, if there are not so many."""
        if num_blocks > self.num_free:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in blocks:
            self._num_holders[block_id] = 1
        if self.lives is not None:
            self.lives.taken(blocks)
        return blocks

    def pin(self, block_ids: Sequence[int]) -> None:
        """Hold blocks that are held or kept once more."""
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                del self._kept[block_id]
            self._num_holders[block_id] += 1
        if self.lives is not None:
            self.lives.used(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Let go of a chain of blocks in its order. Later blocks become the older ones: a chain is evicted from its end."""
        for block_id in reversed(block_ids):
            if not self._num_holders[block_id]:
                raise PoolCorrupted(f"block {block_id} is let go but nobody holds it")
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id]:
                continue
            if block_id in self._name_of:
                self._kept[block_id] = None
            else:
                self._free.append(block_id)

    def name(self, block_id: int, name: bytes) -> None:
        """Remember a held block's content under `name`. The first block of a name keeps it; a second stays nameless."""
        if name not in self._block_of:
            self._name_of[block_id] = name
            self._block_of[name] = block_id
            self.news.on_stored(name)

    def seal(self, block_id: int, seal: bytes) -> None:
        """Keep `seal` as long as the block keeps its name. A nameless block takes none, a sealed one keeps its first."""
        if block_id in self._name_of:
            self._seal_of.setdefault(block_id, seal)

    def seal_of(self, block_id: int) -> bytes | None:
        """The seal of a block, if it has one."""
        return self._seal_of.get(block_id)

    def forget(self, block_id: int) -> None:
        """A held block's content is not what its name says: nobody finds it any more, and it is free once it is let go."""
        if block_id in self._name_of:
            self._unname(block_id)

    def find(self, name: bytes) -> int | None:
        """The block whose content has this name."""
        return self._block_of.get(name)

    def num_unheld(self, block_ids: Sequence[int]) -> int:
        """How many of these are only kept, so that pinning them takes from `num_free`."""
        return sum(1 for block_id in block_ids if not self._num_holders[block_id])

    def check_integrity(self, num_holders: Sequence[int]) -> None:
        """Raise PoolCorrupted unless every count is as the holders say and free + kept + held is all there is."""
        if list(num_holders) != self._num_holders:
            wrong = [i for i, (a, b) in enumerate(zip(num_holders, self._num_holders, strict=True)) if a != b]
            raise PoolCorrupted(f"holders of blocks {wrong[:8]} are not those that leases account for")
        unheld = [*self._free, *self._kept]
        if len(set(unheld)) != len(unheld) or len(unheld) != num_holders.count(0):
            raise PoolCorrupted(f"{len(unheld)} free blocks, {num_holders.count(0)} blocks that nobody holds")
        if any(self._num_holders[block_id] for block_id in unheld):
            raise PoolCorrupted("a held block is in the free list")
        if {name: block_id for block_id, name in self._name_of.items()} != self._block_of:
            raise PoolCorrupted("names and blocks do not match")
        if not self._seal_of.keys() <= self._name_of.keys():
            raise PoolCorrupted("a nameless block has a seal")
        if any(block_id not in self._name_of for block_id in self._kept):
            raise PoolCorrupted("a kept block has no name")

    def _evict(self) -> int:
        block_id = next(iter(self._kept))
        del self._kept[block_id]
        self._unname(block_id)
        if self.lives is not None:
            self.lives.evicted(block_id)
        return block_id

    def _unname(self, block_id: int) -> None:
        name = self._name_of.pop(block_id)
        del self._block_of[name]
        self._seal_of.pop(block_id, None)
        self.news.on_removed(name)
