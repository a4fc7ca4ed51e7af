"""What all requests together may retry: a share of the requests, a floor, and nothing older than the window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.clock import VirtualClock
from contracts.errors import Draining, InternalError, RetriesSpent, WorkerLost
from contracts.sampling import SamplingParams
from router.config import RetryBudgetConfig, RetryConfig
from router.serving.progress import Job, Progress
from router.serving.retry_budget import RetryBudget

CONFIG = RetryBudgetConfig(ratio=0.2, min_per_s=1.0, window_s=10.0)
JOB = Job(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), deadline=60.0)


def spent(budget):
    taken = 0
    while budget.spend():
        taken += 1
    return taken


def test_a_floor_and_a_share_of_the_requests():
    budget = RetryBudget(CONFIG, VirtualClock())
    for _ in range(50):
        budget.asked()
    assert spent(budget) == 10 + 10
    assert budget.num_refused == 1


async def test_it_comes_back_with_time():
    clock = VirtualClock()
    budget = RetryBudget(CONFIG, clock)
    assert spent(budget) == 10
    assert 9.0 <= budget.retry_after_s() <= 10.0
    await clock.advance(budget.retry_after_s() + 0.001)
    assert spent(budget) == 10
    assert RetryBudget(CONFIG, clock).retry_after_s() == 1.0


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 20), st.integers(0, 20)), max_size=40))
async def test_in_no_window_there_are_more_than_are_allowed(steps):
    clock = VirtualClock()
    budget, asked, retried = RetryBudget(CONFIG, clock), [], []
    for delay_s, requests, retries in steps:
        await clock.advance(delay_s)
        for _ in range(requests):
            budget.asked()
            asked.append(clock.now())
        retried += [clock.now() for _ in range(retries) if budget.spend()]
        window = clock.now() - CONFIG.window_s * 0.9  # the oldest slice may have gone
        recent = [t for t in retried if t > window]
        old_enough = [t for t in asked if t >= clock.now() - 2 * CONFIG.window_s]
        assert len(recent) <= CONFIG.min_per_s * CONFIG.window_s + CONFIG.ratio * len(old_enough)


def test_a_request_that_finds_it_spent_ends_and_says_when_to_come_back():
    clock = VirtualClock()
    budget = RetryBudget(RetryBudgetConfig(ratio=0.0, min_per_s=0.1, window_s=10.0), clock)
    first, second = (Progress(JOB, clock, RetryConfig(), budget=budget) for _ in range(2))
    assert first.fail(InternalError("broken"))
    with pytest.raises(RetriesSpent, match="the last: broken") as caught:
        second.fail(InternalError("broken"))
    assert caught.value.retry_after_s >= 1.0
    with pytest.raises(RetriesSpent):
        second.fail(caught.value)


def test_what_goes_on_because_its_worker_is_gone_or_drains_costs_nothing_of_it():
    clock = VirtualClock()
    budget = RetryBudget(RetryBudgetConfig(ratio=0.0, min_per_s=0.0, window_s=10.0), clock)
    for _ in range(50):
        progress = Progress(JOB, clock, RetryConfig(), budget=budget)
        assert progress.fail(WorkerLost("gone"))
        assert progress.fail(InternalError("its hand-off"), with_worker=True)
        assert not progress.fail(Draining("stops"))
