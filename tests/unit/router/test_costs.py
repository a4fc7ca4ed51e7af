"""Estimators: they find what things cost, forget, are not moved by outliers, and are never absurd."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.worker import WorkerKind, WorkerRef
from router.choosing.costs import Costs, PrefillCost, PromptWork, Smoothed

HERE = WorkerRef("p", 1)
SIZES = (16, 64, 256, 1024, 4096)


def truth(work: PromptWork, speed: float = 1.0) -> float:
    """A worker that reads 900 tokens a second once it has read the weights."""
    attended = work.num_tokens**2 - (work.num_tokens - work.num_computed) ** 2
    return speed * (0.015 + work.num_computed / 900 + attended * 5e-8 + work.num_beside * 8e-4)


def taught(num_samples: int, *, speed: float = 1.0, outliers: float = 0.0, seed: int = 1) -> PrefillCost:
    rng, cost = random.Random(seed), PrefillCost()
    for _ in range(num_samples):
        cached = rng.choice([0, 0, 32])
        work = PromptWork(cached + rng.choice([32, 100, 300, 900, 2000]), cached, rng.choice([0, 0, 4]))
        spoilt = 15 if rng.random() < outliers else 1
        cost.observe(HERE, work.sizes, spoilt * truth(work, speed) * rng.lognormvariate(0, 0.1))
        cost.refit()
    return cost


def errors(cost: PrefillCost, speed: float = 1.0) -> list[float]:
    return [abs(cost.predict(HERE, PromptWork(size)) / truth(PromptWork(size), speed) - 1) for size in SIZES]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("speed", [0.05, 1, 5])
def test_it_finds_what_prompts_cost_at_every_size(seed: int, speed: float) -> None:
    assert max(errors(taught(60, speed=speed, seed=seed), speed)) < 0.2
    assert sum(errors(taught(200, speed=speed, seed=seed), speed)) / len(SIZES) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_one_in_ten_that_took_fifteen_times_as_long_changes_little(seed: int) -> None:
    assert max(errors(taught(150, outliers=0.1, seed=seed))) < 0.25


def test_once_enough_is_known_it_follows_only_when_it_is_told_to() -> None:
    costs = Costs()
    prefill, work = costs.prefill[WorkerKind.PREFILL], PromptWork(500)
    for _ in range(50):
        prefill.observe(HERE, work.sizes, truth(work))
    while costs.refit():
        pass
    before = prefill.predict(HERE, PromptWork(2000))
    for _ in range(7):
        prefill.observe(HERE, PromptWork(2000).sizes, 1.2 * truth(PromptWork(2000)))
    assert not costs.refit(), "seven more tell little"
    prefill.observe(HERE, PromptWork(2000).sizes, 1.2 * truth(PromptWork(2000)))
    assert costs.refit()
    assert not costs.refit()
    assert prefill.predict(HERE, PromptWork(2000)) > 1.05 * before


def test_one_sample_sets_the_scale_at_every_size() -> None:
    cost = PrefillCost()
    cost.observe(HERE, PromptWork(512).sizes, truth(PromptWork(512), 0.02))
    assert max(errors(cost, 0.02)) < 0.6  # the shape is the prior's


def test_tiny_prompts_on_a_cold_machine_do_not_make_long_ones_dear() -> None:
    cost = PrefillCost()
    for _ in range(3):
        cost.observe(HERE, PromptWork(3).sizes, 0.4)
    assert cost.predict(HERE, PromptWork(3)) == pytest.approx(0.4, rel=0.3)
    assert cost.predict(HERE, PromptWork(1000)) < 2


def test_a_worker_that_becomes_three_times_as_slow_is_so_after_a_while() -> None:
    cost = taught(100)
    rng = random.Random(2)
    for _ in range(80):
        work = PromptWork(rng.choice([32, 100, 300, 900, 2000]))
        cost.observe(HERE, work.sizes, truth(work, 3))
    assert max(errors(cost, 3)[1:4]) < 0.15


def test_each_worker_of_a_pool_is_known_by_itself() -> None:
    cost, slow = PrefillCost(), WorkerRef("slow", 1)
    for size in (50, 200, 800) * 30:
        cost.observe(HERE, PromptWork(size).sizes, truth(PromptWork(size)))
        cost.observe(slow, PromptWork(size).sizes, truth(PromptWork(size), 2))
    for ref, speed in ((HERE, 1), (slow, 2)):
        assert cost.predict(ref, PromptWork(400)) == pytest.approx(truth(PromptWork(400), speed), rel=0.15)
    unknown = cost.predict(WorkerRef("new", 1), PromptWork(400))
    assert truth(PromptWork(400)) < unknown < truth(PromptWork(400), 2)  # as the pool


def test_a_worker_s_own_word_counts_until_something_is_known() -> None:
    cost = PrefillCost()
    cost.believe(math.nan)
    cost.believe(0.0)
    assert cost.predict(HERE, PromptWork(1000)) == pytest.approx(1.04, rel=0.05)  # the prior's
    cost.believe(20_000.0)
    assert cost.predict(HERE, PromptWork(1000)) == pytest.approx(0.05, rel=0.05)
    cost.observe(HERE, PromptWork(1000).sizes, 0.1)
    cost.believe(1.0)
    assert cost.predict(HERE, PromptWork(1000)) == pytest.approx(0.1, rel=0.1)


def test_transfers_are_learnt_by_their_bytes() -> None:
    costs, rng = Costs(), random.Random(3)
    for _ in range(60):
        mib = rng.choice([1, 8, 40])
        costs.transferred(mib * 2**20, (0.002 + mib * 1e-4) * rng.lognormvariate(0, 0.1))
    assert costs.transfer_s(20 * 2**20) == pytest.approx(0.004, rel=0.2)


def test_a_mean_is_not_moved_far_by_one_sample() -> None:
    mean = Smoothed(0.005)
    for _ in range(30):
        mean.observe(0.010)
    mean.observe(60.0)
    mean.observe(math.inf)
    assert mean.mean_s == pytest.approx(0.010, rel=0.2)


DURATIONS = st.one_of(st.floats(0, 1e4), st.sampled_from([math.nan, math.inf, -1.0, 0.0]))
WORK = st.builds(PromptWork, st.integers(1, 200_000), st.integers(0, 200_000), st.integers(0, 256))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(WORK, DURATIONS), max_size=40), WORK, st.integers(1, 5000))
def test_whatever_was_seen_estimates_are_finite_and_grow_with_the_work(seen, work: PromptWork, more: int) -> None:
    cost, costs = PrefillCost(), Costs()
    for sample, seconds in seen:
        cost.observe(HERE, sample.sizes, seconds)
        costs.transferred(sample.num_tokens * 1e4, seconds)
        costs.settle.observe(seconds)
        costs.overhead[WorkerKind.PREFILL].observe(seconds)
    estimate = cost.predict(HERE, work)
    assert math.isfinite(estimate)
    assert estimate >= 0
    slack = 1e-9 * (1 + estimate)
    assert cost.predict(HERE, PromptWork(work.num_tokens + more, work.num_cached, work.num_beside)) >= estimate - slack
    assert cost.predict(HERE, PromptWork(work.num_tokens, work.num_cached + more, work.num_beside)) <= estimate + slack
    assert cost.predict(HERE, PromptWork(work.num_tokens, work.num_cached, work.num_beside + more)) >= estimate - slack
    assert 0 <= costs.transfer_s(work.num_tokens) <= costs.transfer_s(work.num_tokens + more) < math.inf
    assert 0 <= costs.settle.mean_s < math.inf
