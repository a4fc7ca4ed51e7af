"""What every policy keeps, whatever it prefers; then what each of them prefers."""

import re
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.block_hash import BlockHasher
from contracts.clock import VirtualClock
from contracts.errors import ConfigError
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from router.choosing.prefix_index import PrefixIndex
from router.policies import (
    POLICIES,
    Candidate,
    GuardedPolicy,
    PolicyContext,
    Query,
    burden,
    catalogue,
    make_policy,
    policy_names,
)
from router.policies.burden import SEQUENCE_TOKENS

BLOCK = 8
LAYOUT = KVLayout("m", "float32", 1, 1, 8, BLOCK)
HASHER = BlockHasher(BLOCK, 0)
QUERY = Query((1, 2, 3))
PREFILL, DECODE = WorkerKind


def candidate(name, kind=PREFILL, load=None, inflight=0, tokens=0, *, kv_tokens=0, others=1.0):
    info = WorkerInfo(WorkerRef(name, 1), kind, f"{name}:1", "m", LAYOUT, ("local",), 100, 1000)
    return Candidate(info, load or WorkerLoad(), inflight, tokens, num_inflight_kv_tokens=kv_tokens, others=others)


def query(num_tokens, session="", first=0):
    return Query(tuple(range(first, first + num_tokens)), session, HASHER)


def names(policy, pool, queries):
    return [policy.choose(pool, asked).info.ref.worker_id for asked in queries]


loads = st.builds(
    WorkerLoad,
    num_waiting=st.integers(0, 5),
    num_running=st.integers(0, 5),
    num_queued_tokens=st.integers(0, 50),
    kv_usage=st.floats(0, 1),
)
pools = st.sampled_from(WorkerKind).flatmap(
    lambda kind: st.lists(
        st.builds(candidate, st.sampled_from("abcdef"), st.just(kind), loads, st.integers(0, 9), st.integers(0, 50)),
        min_size=1,
        unique_by=lambda c: c.info.ref.worker_id,
    )
)
queries = st.builds(query, st.integers(1, 40), st.sampled_from(["", "s", "\N{SNOWMAN}", "x" * 999]), st.integers(0, 3))
rounds = st.lists(st.tuples(pools, queries), min_size=1, max_size=6)


def an_index(pool, had):
    """An index over a pool in which each worker has the prompt of one of `had`, in turn."""
    index = PrefixIndex(VirtualClock())
    for number, one in enumerate(pool):
        index.join(one.info)
        if had:
            index.expect(one.info.ref, had[number % len(had)].block_hashes)
    return index


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=40)
@given(rounds, st.integers(0, 9))
def test_it_chooses_one_of_the_candidates_and_the_same_under_one_seed(name, asked, seed):
    chosen = []
    for _ in range(2):
        index = an_index(asked[0][0], [q for _, q in asked])
        policy = make_policy(name, PolicyContext(asked[0][0][0].info.kind, index, seed))
        chosen.append([policy.choose(pool, q) for pool, q in asked])
        assert all(any(one is c for c in pool) for one, (pool, _) in zip(chosen[-1], asked, strict=True))
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("name", ["least_loaded", "prefix_aware", "round_robin"])
@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 4))
def test_equal_workers_get_equal_shares(name, num_workers, rounds):
    pool = [candidate(f"w{i}") for i in range(num_workers)]
    chosen = Counter(names(make_policy(name), pool, [QUERY] * (rounds * num_workers)))
    assert set(chosen.values()) == {rounds}


@pytest.mark.parametrize("name", ["power_of_two", "session_affinity"])
@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_by_chance_equal_workers_get_nearly_equal_shares(name, num_workers):
    """2,000 drawings: a share is off by less than 5 standard deviations."""
    pool, total = [candidate(f"w{i}") for i in range(num_workers)], 2000
    policy = make_policy(name, PolicyContext(seed=1))
    chosen = Counter(names(policy, pool, [query(3, session=f"s{i}") for i in range(total)]))
    expected = total / num_workers
    assert all(abs(chosen[c.info.ref.worker_id] - expected) < 5 * expected**0.5 for c in pool), chosen


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"round_robin"}))
@pytest.mark.parametrize("kind", WorkerKind)
def test_a_worker_far_over_the_other_gets_nothing(name, kind):
    """Not even what it has the blocks of, or whose session it is."""
    pool = [candidate("a", kind, tokens=100_000, inflight=50), candidate("b", kind)]
    asked = [query(40, session=f"s{i}") for i in range(20)]
    index = an_index(pool[:1], asked)
    policy = make_policy(name, PolicyContext(kind, index, 0))
    assert set(names(policy, pool, asked)) == {"b"}


def test_round_robin_goes_on_when_workers_come_and_go():
    policy = make_policy("round_robin")
    pool = [candidate(n) for n in "abc"]
    assert names(policy, pool, [QUERY] * 2) == ["a", "b"]
    assert names(policy, [pool[0], pool[2]], [QUERY]) == ["c"]
    assert names(policy, pool, [QUERY]) == ["a"]


@pytest.mark.parametrize(
    ("kind", "busy", "free"),
    [
        (PREFILL, {"load": WorkerLoad(num_queued_tokens=10)}, {"load": WorkerLoad(num_running=9)}),
        (PREFILL, {"tokens": 10}, {"load": WorkerLoad(num_queued_tokens=9)}),
        (PREFILL, {"tokens": 10}, {"tokens": 9, "kv_tokens": 99, "inflight": 9}),
        (PREFILL, {"tokens": 10, "inflight": 2}, {"tokens": 10, "inflight": 1}),
        (DECODE, {"load": WorkerLoad(num_running=2)}, {"load": WorkerLoad(num_queued_tokens=99)}),
        (DECODE, {"load": WorkerLoad(num_waiting=2)}, {"inflight": 1}),
        (DECODE, {"inflight": 3}, {"load": WorkerLoad(num_running=2)}),
        # two short contexts are less to read than one that is long, whoever has said so
        (DECODE, {"inflight": 1, "kv_tokens": 6000}, {"inflight": 2, "kv_tokens": 100}),
        (DECODE, {"load": WorkerLoad(num_running=1, kv_usage=0.7)}, {"load": WorkerLoad(num_running=2, kv_usage=0.1)}),
    ],
)
@pytest.mark.parametrize("name", ["least_loaded", "power_of_two", "prefix_aware"])
def test_load_is_work_in_tokens_for_prefill_and_sequences_and_contexts_for_decode(name, kind, busy, free):
    policy = make_policy(name, PolicyContext(kind, seed=0))
    pool = [candidate("busy", kind, **busy), candidate("free", kind, **free)]
    assert set(names(policy, pool, [QUERY] * 4)) == {"free"}


def test_what_a_decode_worker_bears():
    """Ours as we know it, of what it announced what is others'; of its memory at least what it says is in use."""
    load = WorkerLoad(num_running=2, num_waiting=1, num_queued_tokens=30, kv_usage=0.5)
    used = 500 * BLOCK
    ours = {"inflight": 4, "tokens": 7, "kv_tokens": 100}
    assert burden(candidate("d", DECODE, load)) == 3 * SEQUENCE_TOKENS + used + 30
    assert burden(candidate("d", DECODE, load, **ours)) == 7 * SEQUENCE_TOKENS + used + 100 + 37
    assert burden(candidate("d", DECODE, load, **ours, others=0.0)) == 4 * SEQUENCE_TOKENS + used + 7


def test_what_a_prefill_worker_bears():
    """Its announcement counts tokens that may turn out to be cached: of ours we know better."""
    load = WorkerLoad(num_running=2, num_waiting=2, num_queued_tokens=800)
    assert burden(candidate("p", PREFILL, load, inflight=2, tokens=50, others=0.5)) == 450
    assert burden(candidate("p", PREFILL, load, inflight=4, tokens=50, others=0.0)) == 50


class TestPrefixAware:
    """Where the blocks are, unless the way through the queue is longer than the prefix."""

    prompt = query(80)

    def policy(self, pool, had_by, kind=PREFILL):
        index = PrefixIndex(VirtualClock())
        for one in pool:
            index.join(one.info)
        for ref, num_tokens in had_by.items():
            index.expect(WorkerRef(ref, 1), query(num_tokens).block_hashes)
        return make_policy("prefix_aware", PolicyContext(kind, index))

    @pytest.mark.parametrize("kind", WorkerKind)
    def test_the_longest_prefix_wins_among_equals(self, kind):
        pool = [candidate(n, kind) for n in "abc"]
        policy = self.policy(pool, {"b": 40, "c": 72}, kind)
        assert names(policy, pool, [self.prompt] * 3) == ["c"] * 3

    def test_a_queue_longer_than_the_prefix_is_worth_does_not(self):
        longer = [candidate("a"), candidate("b", tokens=61)]
        shorter = [candidate("a"), candidate("b", tokens=59)]
        policy = self.policy(longer, {"b": 40})
        assert names(policy, longer, [self.prompt]) == ["a"]
        assert names(policy, shorter, [self.prompt]) == ["b"]

    def test_blocks_at_a_crowded_worker_do_not_count(self):
        pool = [candidate("a", load=WorkerLoad(kv_usage=0.97)), candidate("b")]
        assert set(names(self.policy(pool, {"a": 40}), pool, [self.prompt] * 2)) == {"a", "b"}


class TestSessionAffinity:
    """One session, one worker; few move when workers come and go."""

    pool = tuple(candidate(f"w{i}") for i in range(8))

    def test_a_session_stays_whatever_the_prompt_and_a_conversation_as_it_grows(self):
        policy = make_policy("session_affinity")
        assert len(set(names(policy, self.pool, [query(n, session="me") for n in range(1, 90)]))) == 1
        assert len(set(names(policy, self.pool, [query(n) for n in range(64, 300)]))) == 1
        assert len(set(names(policy, self.pool, [query(64, first=n) for n in range(50)]))) == 8, "others are elsewhere"

    @pytest.mark.parametrize("gone", range(8))
    def test_only_the_sessions_of_a_worker_that_leaves_move(self, gone):
        policy, asked = make_policy("session_affinity"), [query(9, session=f"s{i}") for i in range(400)]
        before = names(policy, self.pool, asked)
        after = names(policy, self.pool[:gone] + self.pool[gone + 1 :], asked)
        assert all(old in (new, f"w{gone}") for old, new in zip(before, after, strict=True))
        assert len({new for old, new in zip(before, after, strict=True) if old == f"w{gone}"}) == 7, "over all others"

    def test_it_gives_way_when_its_worker_is_overloaded_and_always_to_the_same(self):
        policy, mine = make_policy("session_affinity"), query(9, session="me")
        (home,) = names(policy, self.pool, [mine])
        overloaded = [
            candidate(c.info.ref.worker_id, tokens=50_000 * (c.info.ref.worker_id == home)) for c in self.pool
        ]
        away = names(policy, overloaded, [mine] * 4)
        assert len(set(away)) == 1
        assert home not in away
        assert names(policy, self.pool, [mine]) == [home], "and comes home"


class FirstOfAll:
    """A plug-in, as docs/policies.md shows one."""

    def __init__(self, context):
        self.kind = context.kind

    def choose(self, candidates, query):
        return candidates[0]


def test_the_example_of_the_docs_is_a_policy():
    """docs/policies.md"""
    page = (Path(__file__).parents[2] / "docs/policies.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names_in_it: dict = {}
    exec(example, names_in_it)
    policy = names_in_it["NearestRack"](PolicyContext())
    pool = [candidate("rack-1-a"), candidate("rack-7-a", tokens=9), candidate("rack-7-b")]
    assert names(policy, pool, [QUERY] * 2) == ["rack-7-b"] * 2
    assert names(policy, pool[:1], [QUERY]) == ["rack-1-a"]


def broken(context):
    raise RuntimeError("no such thing")


OFFERED = [
    EntryPoint("first", f"{__name__}:FirstOfAll", catalogue.GROUP),
    EntryPoint("broken", f"{__name__}:broken", catalogue.GROUP),
    EntryPoint("gone", "no.such.module:x", catalogue.GROUP),
    EntryPoint("round_robin", f"{__name__}:FirstOfAll", catalogue.GROUP),
]


def test_a_plug_in_is_made_by_its_name_and_does_not_replace_ours():
    pool = [candidate("a"), candidate("b")]
    assert names(make_policy("first", offered=OFFERED), pool, [QUERY] * 3) == ["a"] * 3
    assert names(make_policy("round_robin", offered=OFFERED), pool, [QUERY] * 2) == ["a", "b"]
    assert policy_names(OFFERED) == tuple(sorted({*POLICIES, "first", "broken", "gone"}))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "best",
            "got 'best', must be one of broken, first, gone, least_loaded, power_of_two, prefix_aware, round_robin",
        ),
        ("broken", "'broken' .* cannot be made: RuntimeError: no such thing"),
        ("gone", "'gone' .*no.such.module:x.* cannot be made: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_made_says_why_and_what_is_known(name, said):
    with pytest.raises(ConfigError, match=said):
        make_policy(name, offered=OFFERED)


class Raising:
    def choose(self, candidates, query):
        raise ZeroDivisionError("mine")


class Inventing:
    def choose(self, candidates, query):
        return candidate("elsewhere")


class Nothing:
    def choose(self, candidates, query):
        return None


@pytest.mark.parametrize("faulty", [Raising, Inventing, Nothing, object])
def test_a_policy_that_fails_costs_a_request_the_least_loaded_worker_instead(faulty):
    faults = []
    policy = GuardedPolicy("mine", faulty(), lambda: faults.append(1))
    pool = [candidate("a", tokens=9), candidate("b")]
    assert names(policy, pool, [QUERY] * 2) == ["b", "b"]
    assert len(faults) == 2


def test_a_policy_of_an_installed_package_is_found_by_its_name(tmp_path, monkeypatch):
    """As `pip install` leaves it: a module, and a dist-info that names its entry point."""
    (tmp_path / "their_policies.py").write_text(
        "class Last:\n"
        "    def __init__(self, context):\n"
        "        self.kind = context.kind\n\n"
        "    def choose(self, candidates, query):\n"
        "        return candidates[-1]\n"
    )
    about = tmp_path / "their_policies-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{catalogue.GROUP}]\nlast = their_policies:Last\n")
    with pytest.raises(ConfigError, match="got 'last', must be one of"):
        make_policy("last")
    monkeypatch.syspath_prepend(tmp_path)
    assert {*POLICIES, "last"} <= {*policy_names()}
    policy = make_policy("last", PolicyContext(DECODE))
    assert policy.kind is DECODE
    assert names(policy, [candidate("a"), candidate("b")], [QUERY]) == ["b"]
