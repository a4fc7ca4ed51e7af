"""Blocks and leases: what they refuse, and that broken books are found."""

import pytest

from engine.kv.block_pool import BlockPool, PoolCorrupted
from engine.kv.cache_manager import KVCacheManager
from engine.kv.lease import LeaseError


def lease_all(kv: KVCacheManager, tokens: list[int], max_cached: int = 1000):
    return kv.lease("r", len(tokens), kv.hasher.chain(tokens), max_cached)


def computed(kv: KVCacheManager, tokens: list[int]):
    lease = lease_all(kv, tokens)
    kv.publish(lease, kv.hasher.chain(tokens), len(tokens))
    return lease


def test_a_released_chain_is_evicted_from_its_end():
    kv = KVCacheManager(3, 2, 0)
    tokens = [1, 2, 3, 4, 5, 6]
    computed(kv, tokens).release()
    kv.lease("other", 2, (), 0)
    assert lease_all(kv, tokens[:4]).num_cached_tokens == 4


def test_a_hit_makes_blocks_young_again():
    kv = KVCacheManager(2, 2, 0)
    computed(kv, [1, 1]).release()
    computed(kv, [2, 2]).release()
    lease_all(kv, [1, 1]).release()
    kv.lease("other", 2, (), 0)
    assert lease_all(kv, [1, 1]).num_cached_tokens == 2


def test_two_leases_share_cached_blocks_and_both_must_let_go():
    kv = KVCacheManager(4, 2, 0)
    first = computed(kv, [1, 2, 3, 4])
    second = lease_all(kv, [1, 2, 3, 4, 5])
    assert second.block_ids[:2] == first.block_ids
    first.release()
    assert kv.num_free_blocks == 1
    second.release()
    assert kv.num_free_blocks == 4
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (9, 4)


def test_the_second_block_of_a_name_is_not_cached():
    kv = KVCacheManager(4, 2, 0)
    first, second = lease_all(kv, [1, 2]), lease_all(kv, [1, 2])
    for lease in (first, second):
        kv.publish(lease, kv.hasher.chain([1, 2]), 2)
    kept = first.block_ids[0]
    second.release()
    first.release()
    assert lease_all(kv, [1, 2]).block_ids == [kept]
    kv.check_integrity()


def test_without_prefix_caching_nothing_is_found():
    kv = KVCacheManager(4, 2, 0, enable_prefix_caching=False)
    computed(kv, [1, 2]).release()
    assert lease_all(kv, [1, 2]).num_cached_tokens == 0


def test_a_lease_is_released_once():
    lease = KVCacheManager(2, 2, 0).lease("mine", 3, (), 0)
    lease.release()
    with pytest.raises(LeaseError, match="mine is released twice"):
        lease.release()
    with pytest.raises(LeaseError, match="mine is used after its release"):
        _ = lease.block_ids


def test_letting_go_of_what_nobody_holds_is_an_error():
    pool = BlockPool(2)
    with pytest.raises(PoolCorrupted, match="block 1 is let go"):
        pool.unpin([1])


def breakages():
    def lost(pool):
        pool._free.pop()

    def double(pool):
        pool._free.append(pool._free[0])

    def free_though_held(pool):
        pool._free[0] = 0

    def name_without_block(pool):
        pool._block_of[b"x"] = 3

    def kept_without_name(pool):
        pool._kept[pool._free.pop()] = None

    return [lost, double, free_though_held, name_without_block, kept_without_name]


@pytest.mark.parametrize("breakage", breakages(), ids=lambda f: f.__name__)
def test_broken_books_are_found(breakage):
    pool = BlockPool(4)
    assert pool.allocate(1) == [0]
    pool.check_integrity([1, 0, 0, 0])
    breakage(pool)
    with pytest.raises(PoolCorrupted):
        pool.check_integrity([1, 0, 0, 0])


def test_holders_that_leases_do_not_account_for_are_found():
    kv = KVCacheManager(2, 2, 0)
    kv.lease("r", 2, (), 0).block_ids.append(1)
    with pytest.raises(PoolCorrupted, match=r"holders of blocks \[1\]"):
        kv.check_integrity()


def test_a_pool_that_lies_about_free_blocks_is_found():
    kv = KVCacheManager(2, 2, 0)
    kv._pool.allocate = lambda num_blocks: None  # a bug, put there by hand
    with pytest.raises(PoolCorrupted, match="were free and are not"):
        kv.lease("r", 2, (), 0)


def test_a_seal_lasts_as_long_as_its_block_s_name():
    kv = KVCacheManager(3, 2, 0)
    tokens = [1, 2, 3, 4, 5]
    lease = computed(kv, tokens)
    kv.seal(lease, (b"one", b"two", b"a block in part is not sealed"), 5)
    kv.seal(lease, (b"later",), 5)
    assert lease.cached_seals == ()
    lease.release()
    again = lease_all(kv, tokens)
    assert again.cached_seals == (b"one", b"two")
    again.release()
    kv.lease("other", 6, (), 0).release()  # evicts all
    computed(kv, tokens).release()
    assert lease_all(kv, tokens).cached_seals == (None, None)
    kv.check_integrity()


def test_a_nameless_block_takes_no_seal():
    kv = KVCacheManager(4, 2, 0)
    first, second = kv.lease("a", 2, (), 0), kv.lease("b", 2, (), 0)
    names = kv.hasher.chain([1, 2])
    for lease, seal in ((first, b"first"), (second, b"second")):
        kv.publish(lease, names, 2)
        kv.seal(lease, (seal,), 2)
    assert lease_all(kv, [1, 2]).cached_seals == (b"first",)
    kv.check_integrity()


def test_a_spoiled_block_is_found_no_more_and_is_free_once_all_have_let_go():
    kv = KVCacheManager(4, 2, 0)
    tokens = [1, 2, 3, 4]
    first = computed(kv, tokens)
    kv.seal(first, (b"one", b"two"), 4)
    sharing = lease_all(kv, tokens)
    kv.forget(sharing, (0,))
    kv.forget(sharing, (0,))
    kv.check_integrity()
    assert lease_all(kv, tokens).num_cached_tokens == 0  # the rest of the chain hangs on it
    sharing.release()
    first.release()
    computed(kv, tokens[:2]).release()
    assert lease_all(kv, tokens).cached_seals == (None, b"two")
    kv.check_integrity()


def test_a_seal_without_a_name_is_found():
    pool = BlockPool(1)
    pool.allocate(1)
    pool.name(0, b"n")
    pool.seal(0, b"s")
    del pool._block_of[pool._name_of.pop(0)]
    with pytest.raises(PoolCorrupted, match="nameless block has a seal"):
        pool.check_integrity([1])


def test_only_the_net_change_is_news():
    kv = KVCacheManager(2, 2, 0)
    names = kv.hasher.chain([1, 1])
    computed(kv, [1, 1]).release()
    assert kv.news.take() is None, "nobody listens"
    assert kv.news.listen() == names
    kv.lease("other", 4, (), 0).release()  # evicts it
    computed(kv, [1, 1]).release()
    assert kv.news.take() is None, "it went and came"
    computed(kv, [2, 2]).release()
    kv.lease("other", 4, (), 0).release()
    changes = kv.news.take()
    assert (changes.stored, changes.removed) == ((), names), "what came and went is no news, what went for good is"
    assert kv.news.take() is None
    kv.news.ignore()
    computed(kv, [3, 3])
    assert kv.news.take() is None


def test_how_long_blocks_live_and_lie_idle_is_told():
    class Heard:
        def __init__(self):
            self.gaps, self.ended = [], []

        def reused(self, gap_s):
            self.gaps.append(gap_s)

        def evicted(self, life_s, idle_s):
            self.ended.append((life_s, idle_s))

    now_s, heard = 100.0, Heard()
    kv = KVCacheManager(3, 2, 0)
    kv.watch_lives(lambda: now_s, heard)
    first = computed(kv, [1, 1, 2, 2])
    now_s = 101.0
    first.release()
    now_s = 104.0
    lease_all(kv, [1, 1]).release()  # the first of the two
    assert (heard.gaps, heard.ended) == ([4.0], [])
    now_s = 110.0
    kv.lease("the block that is free, and the older of the others", 4, (), 0).release()
    assert heard.ended == [(10.0, 10.0)]
    kv.lease("all", 6, (), 0).release()
    assert heard.ended == [(10.0, 10.0), (10.0, 6.0)]
    assert heard.gaps == [4.0]
    now_s = 111.0
    kv.lease("what had no name is not evicted", 6, (), 0)
    assert len(heard.ended) == 2
