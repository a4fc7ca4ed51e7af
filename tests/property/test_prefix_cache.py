"""Leases and the prefix cache under random use: a hit is always the KV of exactly these tokens, and books always balance."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.cache_manager import KVCacheManager
from engine.kv.lease import KVLease, LeaseError

NUM_BLOCKS = 6
BLOCK_SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)  # an alphabet of two: prefixes collide all the time


class CacheMachine(RuleBasedStateMachine):
    """`memory` is what a runner would have written: per block, the whole prefix that its last token saw."""

    def __init__(self):
        super().__init__()
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, hash_seed=7)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.live: list[tuple[KVLease, list[int]]] = []
        self.dead: list[KVLease] = []

    @rule(tokens=TOKENS, max_cached=st.integers(0, 10))
    def lease(self, tokens, max_cached):
        num_free = self.kv.num_free_blocks
        lease = self.kv.lease("r", len(tokens), self.kv.hasher.chain(tokens), max_cached)
        if lease is None:
            assert num_free == self.kv.num_free_blocks
            assert self.kv.num_blocks_for(len(tokens)) > num_free
            return
        assert lease.num_cached_tokens % BLOCK_SIZE == 0
        assert lease.num_cached_tokens <= min(max_cached, len(tokens))
        assert len(lease.block_ids) == self.kv.num_blocks_for(len(tokens))
        for index in range(lease.num_cached_tokens // BLOCK_SIZE):
            assert self.memory[lease.block_ids[index]] == tuple(tokens[: (index + 1) * BLOCK_SIZE])
        for block_id in lease.block_ids[lease.num_cached_tokens // BLOCK_SIZE :]:
            assert not any(block_id in other.block_ids for other, _ in self.live), (
                "nobody else may read what is written"
            )
            self.memory[block_id] = ()
        self.live.append((lease, list(tokens)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data):
        lease, tokens = data.draw(st.sampled_from(self.live))
        num_computed = data.draw(st.integers(lease.num_cached_tokens, len(tokens)))
        for index in range(lease.num_cached_tokens // BLOCK_SIZE, num_computed // BLOCK_SIZE):
            self.memory[lease.block_ids[index]] = tuple(tokens[: (index + 1) * BLOCK_SIZE])
        self.kv.publish(lease, self.kv.hasher.chain(tokens), num_computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        lease, tokens = data.draw(st.sampled_from(self.live))
        num_blocks, num_free = len(lease.block_ids), self.kv.num_free_blocks
        if self.kv.grow(lease, len(tokens) + 1):
            tokens.append(token)
            for block_id in lease.block_ids[num_blocks:]:
                self.memory[block_id] = ()
        else:
            assert num_free == 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        lease, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        lease.release()
        self.dead.append(lease)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def release_again(self, data):
        lease = data.draw(st.sampled_from(self.dead))
        assert lease.released
        with pytest.raises(LeaseError, match="twice"):
            lease.release()
        with pytest.raises(LeaseError, match="after its release"):
            _ = lease.block_ids

    @invariant()
    def books_balance(self):
        self.kv.check_integrity()
        assert self.kv.living_leases() == {lease for lease, _ in self.live}
        held = {block_id for lease, _ in self.live for block_id in lease.block_ids}
        assert self.kv.num_free_blocks == NUM_BLOCKS - len(held)
        assert self.kv.usage == pytest.approx(len(held) / NUM_BLOCKS)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
