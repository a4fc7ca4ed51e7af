"""The block pool against a model that is a few lists: who holds what, in which order kept blocks are evicted, what is told."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.block_pool import BlockPool

NUM_BLOCKS = 5


class PoolMachine(RuleBasedStateMachine):
    """A holder is a list of blocks. Names are few, so that two blocks often want the same one."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.names: dict[bytes, int] = {}
        self.kept: list[int] = []  # oldest first
        self.told: set[bytes] | None = None  # what a listener who took all news knows of

    def num_holders(self) -> list[int]:
        return [sum(blocks.count(i) for blocks in self.held) for i in range(NUM_BLOCKS)]

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks):
        num_free = self.num_holders().count(0)
        blocks = self.pool.allocate(num_blocks)
        if num_blocks > num_free:
            assert blocks is None
            return
        num_evicted = max(0, num_blocks - (num_free - len(self.kept)))
        evicted, self.kept = self.kept[:num_evicted], self.kept[num_evicted:]
        self.names = {name: block for name, block in self.names.items() if block not in evicted}
        assert len(set(blocks)) == num_blocks
        assert set(evicted) <= set(blocks), "the longest unused go first, and only when no plain block is free"
        assert not set(blocks) & (set(self.kept) | {b for held in self.held for b in held})
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data):
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.unpin(blocks)
        holders = self.num_holders()
        self.kept += [b for b in reversed(blocks) if not holders[b] and b in self.names.values()]

    @rule(data=st.data())
    def name(self, data):
        candidates = [b for b, n in enumerate(self.num_holders()) if n and b not in self.names.values()]
        if candidates:
            block, name = data.draw(st.sampled_from(candidates)), data.draw(st.sampled_from([b"a", b"b", b"c", b"d"]))
            self.pool.name(block, name)
            self.names.setdefault(name, block)

    @rule(data=st.data())
    def pin(self, data):
        candidates = sorted(set(self.names.values()))
        if candidates:
            blocks = data.draw(st.lists(st.sampled_from(candidates), unique=True))
            assert self.pool.num_unheld(blocks) == sum(b in self.kept for b in blocks)
            self.pool.pin(blocks)
            self.kept = [b for b in self.kept if b not in blocks]
            self.held.append(blocks)

    @rule()
    def listen(self):
        self.told = set(self.pool.news.listen())
        assert self.told == set(self.names)

    @rule()
    def ignore(self):
        self.pool.news.ignore()
        self.told = None

    @rule()
    def take(self):
        changes = self.pool.news.take()
        if self.told is None:
            assert changes is None
            return
        stored, removed = (set(changes.stored), set(changes.removed)) if changes is not None else (set(), set())
        assert not stored & self.told, "what was known is not told again"
        assert removed <= self.told, "what came and went in between is not told at all"
        self.told = (self.told - removed) | stored
        assert self.told == set(self.names)

    @rule(data=st.data())
    def forget(self, data):
        candidates = [b for b, n in enumerate(self.num_holders()) if n]
        if candidates:
            block = data.draw(st.sampled_from(candidates))
            self.pool.forget(block)
            self.names = {name: b for name, b in self.names.items() if b != block}

    @invariant()
    def books_balance(self):
        holders = self.num_holders()
        self.pool.check_integrity(holders)
        assert self.pool.num_free == holders.count(0)
        for name in (b"a", b"b", b"c", b"d"):
            assert self.pool.find(name) == self.names.get(name)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
