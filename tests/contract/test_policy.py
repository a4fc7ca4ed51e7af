"""What every policy keeps, whatever it prefers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from router.policies import POLICIES, Candidate, Query, make_policy

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 16)
QUERY = Query((1, 2, 3))


def candidate(name, kind=WorkerKind.PREFILL, load=None, inflight=0, tokens=0):
    info = WorkerInfo(WorkerRef(name, 1), kind, f"{name}:1", "m", LAYOUT, ("local",), 100, 10)
    return Candidate(info, load or WorkerLoad(), inflight, tokens)


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


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(st.lists(pools, min_size=1, max_size=6))
def test_it_chooses_one_of_the_candidates(name, rounds):
    policy = make_policy(name)
    for pool in rounds:
        assert policy.choose(pool, QUERY) in pool


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(st.integers(1, 5), st.integers(1, 4))
def test_equal_workers_get_equal_shares(name, num_workers, rounds):
    policy = make_policy(name)
    pool = [candidate(f"w{i}") for i in range(num_workers)]
    chosen = Counter(policy.choose(pool, QUERY).info.ref for _ in range(rounds * num_workers))
    assert set(chosen.values()) == {rounds}


def test_round_robin_goes_on_when_workers_come_and_go():
    policy = make_policy("round_robin")
    pool = [candidate(n) for n in "abc"]
    assert [policy.choose(pool, QUERY).info.ref.worker_id for _ in range(2)] == ["a", "b"]
    assert policy.choose([pool[0], pool[2]], QUERY).info.ref.worker_id == "c"
    assert policy.choose(pool, QUERY).info.ref.worker_id == "a"


@pytest.mark.parametrize(
    ("kind", "busy", "free"),
    [
        (WorkerKind.PREFILL, {"load": WorkerLoad(num_queued_tokens=10)}, {"load": WorkerLoad(num_running=9)}),
        (WorkerKind.PREFILL, {"tokens": 10}, {"load": WorkerLoad(num_queued_tokens=9)}),
        (WorkerKind.DECODE, {"load": WorkerLoad(num_running=2)}, {"load": WorkerLoad(num_queued_tokens=99)}),
        (WorkerKind.DECODE, {"load": WorkerLoad(num_waiting=2)}, {"inflight": 1}),
        (WorkerKind.DECODE, {"inflight": 3}, {"load": WorkerLoad(num_running=2)}),
    ],
)
def test_least_loaded_counts_tokens_for_prefill_and_requests_for_decode(kind, busy, free):
    policy = make_policy("least_loaded")
    pool = [candidate("busy", kind, **busy), candidate("free", kind, **free)]
    assert {policy.choose(pool, QUERY).info.ref.worker_id for _ in range(4)} == {"free"}


def test_an_unknown_policy_names_the_known():
    with pytest.raises(ConfigError, match="least_loaded, round_robin"):
        make_policy("best")
