"""The prefix index against a model that is a few sets: who has how much of a prompt, whatever was told in which order."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.block_hash import BlockHasher, short_names
from contracts.clock import VirtualClock
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.choosing.prefix_index import PrefixIndex

BLOCK = 2
CAPACITY = 6
EXPECT_S = 5.0
LAYOUT = KVLayout("m", "float32", 1, 1, 8, BLOCK)
HASHER = BlockHasher(BLOCK, 0)
REFS = [WorkerRef("a", 1), WorkerRef("a", 2), WorkerRef("b", 1), WorkerRef("c", 7)]
PROMPTS = [HASHER.chain([n >> i & 1 for i in range(8)]) for n in range(16)]  # four blocks each, many shared prefixes
NAMES = sorted({name for prompt in PROMPTS for name in short_names(prompt)})

refs, prompts = st.sampled_from(REFS), st.sampled_from(PROMPTS)
names = st.lists(st.sampled_from(NAMES), max_size=5, unique=True)


def info(ref):
    return WorkerInfo(ref, WorkerKind.PREFILL, "h:1", "m", LAYOUT, (), 64, CAPACITY)


class Ticking:
    """A clock that is told what time it is."""

    def __init__(self, now):
        self.now = now


class IndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.index = PrefixIndex(Ticking(lambda: self.now), EXPECT_S)
        self.known: dict[WorkerRef, set[int]] = {}
        self.expected: dict[WorkerRef, dict[int, float]] = {}

    @initialize()
    def begin(self):
        for ref in REFS[1:3]:
            self.join(ref)

    @rule(ref=refs)
    def join(self, ref):
        self.index.join(info(ref))
        self.known.setdefault(ref, set())
        self.expected.setdefault(ref, {})

    @rule(ref=refs)
    def forget(self, ref):
        self.index.forget(ref)
        self.known.pop(ref, None)
        self.expected.pop(ref, None)

    @rule(ref=refs, names=names)
    def replace(self, ref, names):
        self.index.replace(ref, names)
        if ref in self.known:
            self.known[ref] = set(names)

    @rule(ref=refs, names=names)
    def stored(self, ref, names):
        self.index.stored(ref, names)
        if ref in self.known:
            for name in names:
                if len(self.known[ref]) < CAPACITY:
                    self.known[ref].add(name)

    @rule(ref=refs, names=names)
    def removed(self, ref, names):
        self.index.removed(ref, names)
        if ref in self.known:
            gone = self.known[ref] & set(names)
            self.known[ref] -= gone
            self.expected[ref] = {name: until for name, until in self.expected[ref].items() if name not in gone}

    @rule(ref=refs, prompt=prompts, asked=st.booleans())
    def expect(self, ref, prompt, asked):
        before = (
            self.index.match(prompt) if asked else None
        )  # as a chooser does: what it holds must not change in its hands
        copied = dict(before or {})
        self.index.expect(ref, prompt)
        assert before is None or before == copied
        if ref in self.expected:
            self.expected[ref] = {name: until for name, until in self.expected[ref].items() if until > self.now}
            if len(self.expected[ref]) <= CAPACITY:
                self.expected[ref] |= dict.fromkeys(short_names(prompt), self.now + EXPECT_S)
        self.it_says_of(prompt)

    @rule(delay_s=st.sampled_from([0.5, 2.0, 5.0]))
    def wait(self, delay_s):
        self.now += delay_s

    def have(self, ref):
        return self.known[ref] | {name for name, until in self.expected[ref].items() if until > self.now}

    def it_says_of(self, prompt):
        expected = {}
        for ref in self.known:
            have, count = self.have(ref), 0
            for name in short_names(prompt):
                if name not in have:
                    break
                count += BLOCK
            if count:
                expected[ref] = count
        assert self.index.match(prompt) == expected
        assert {ref: self.index.cached_tokens(ref, prompt) for ref in REFS} == {r: expected.get(r, 0) for r in REFS}

    @invariant()
    def it_says_what_the_sets_say(self):
        for prompt in PROMPTS:
            self.it_says_of(prompt)
        assert {ref: self.index.names(ref) for ref in REFS} == {ref: self.known.get(ref, set()) for ref in REFS}
        assert set(self.index.workers) == set(self.known)
        assert self.index.num_names == len({name for ref in self.known for name in self.have(ref)}), (
            "nothing stays behind"
        )


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(st.integers(0, 70))
def test_any_number_of_workers_is_told_apart(num_workers):
    """Their bits are reused when they go, and no worker ever sees another's blocks."""
    index = PrefixIndex(VirtualClock())
    lives = [WorkerRef(f"w{i}", 1) for i in range(num_workers)]
    for number, ref in enumerate(lives):
        index.join(info(ref))
        index.stored(ref, short_names(PROMPTS[number % 16][: 1 + number % 4]))
    for ref in lives[::3]:
        index.forget(ref)
    newcomer = WorkerRef("new", 1)
    index.join(info(newcomer))
    for number, ref in enumerate(lives):
        expected = 0 if number % 3 == 0 else BLOCK * (1 + number % 4)
        assert index.cached_tokens(ref, PROMPTS[number % 16]) == expected
    assert all(newcomer not in index.match(prompt) for prompt in PROMPTS)


def test_an_expectation_lasts_as_long_as_the_last_that_named_the_block():
    now = [0.0]
    index = PrefixIndex(Ticking(lambda: now[0]), EXPECT_S)
    index.join(info(REFS[0]))
    index.expect(REFS[0], PROMPTS[0])
    now[0] = 3.0
    index.expect(REFS[0], PROMPTS[0][:2])
    now[0] = 6.0
    assert index.cached_tokens(REFS[0], PROMPTS[0]) == 2 * BLOCK
    now[0] = 8.0
    assert index.cached_tokens(REFS[0], PROMPTS[0]) == index.num_names == 0


def test_what_a_worker_says_comes_before_what_was_expected_of_it():
    now = [0.0]
    index = PrefixIndex(Ticking(lambda: now[0]), EXPECT_S)
    index.join(info(REFS[0]))
    index.expect(REFS[0], PROMPTS[0])
    index.stored(REFS[0], short_names(PROMPTS[0][:3]))
    index.removed(REFS[0], short_names(PROMPTS[0][2:3]))
    assert index.cached_tokens(REFS[0], PROMPTS[0]) == 2 * BLOCK
    index.replace(REFS[0], ())
    assert index.cached_tokens(REFS[0], PROMPTS[0]) == 2 * BLOCK, "a snapshot does not know what is on its way"
    now[0] = EXPECT_S
    assert index.match(PROMPTS[0]) == {}
    assert index.num_names == 0


def test_a_prompt_without_a_full_block_is_nowhere():
    index = PrefixIndex(VirtualClock())
    index.join(info(REFS[0]))
    index.expect(REFS[0], ())
    assert index.match(()) == {}


def test_with_nothing_to_expect_nothing_is():
    index = PrefixIndex(VirtualClock(), expect_s=0.0)
    index.join(info(REFS[0]))
    index.expect(REFS[0], PROMPTS[0])
    assert index.match(PROMPTS[0]) == {}
