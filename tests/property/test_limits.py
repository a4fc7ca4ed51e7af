"""Token buckets: never more than rate and burst in any window, all or nothing, and what is not used is there again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.clock import VirtualClock
from router.admission.limits import Kind, LocalBuckets, Rate, Wanted

RATES = st.builds(Rate, st.integers(1, 10_000), st.floats(0.1, 120.0))
STEPS = st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 3000.0), st.floats(0.0, 1.0)), max_size=60)


def tokens(rate, amount):
    return Wanted(Kind.TOKENS, rate, amount)


@settings(max_examples=200, deadline=None)
@given(RATES, STEPS)
async def test_no_window_lets_more_through_than_rate_and_burst(rate, steps):
    """What is given back at once was never let through."""
    clock = VirtualClock()
    buckets, granted = LocalBuckets(clock), []
    for pause_s, amount, used in steps:
        clock._now += pause_s
        verdict = await buckets.take("a", [tokens(rate, amount)])
        if verdict.granted:
            taken = min(amount, rate.capacity)
            await buckets.give("a", [tokens(rate, taken * (1 - used))])
            granted.append((clock.now(), taken * used))
        assert 0 <= verdict.standings[0].remaining <= rate.capacity + 1e-6
    for i, (begin, _) in enumerate(granted):
        total = 0.0
        for instant, amount in granted[i:]:
            total += amount
            allowed = rate.capacity + (instant - begin) * rate.per_minute / 60
            assert total <= allowed * (1 + 1e-6) + 1e-3, (begin, instant)


@settings(max_examples=200, deadline=None)
@given(RATES, STEPS)
async def test_who_comes_back_when_told_is_let_through_and_not_before(rate, steps):
    clock = VirtualClock()
    buckets = LocalBuckets(clock)
    for pause_s, amount, _ in steps:
        clock._now += pause_s
        verdict = await buckets.take("a", [tokens(rate, amount)])
        if not verdict.granted:
            assert verdict.retry_after_s > 0
            early = verdict.retry_after_s * 0.99
            clock._now += early
            if verdict.retry_after_s - early > rate.interval_s * 1e-3:
                assert not (await buckets.take("a", [tokens(rate, amount)])).granted
            clock._now += verdict.retry_after_s - early + 1e-9
            assert (await buckets.take("a", [tokens(rate, amount)])).granted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(1.0, 200.0)), max_size=40))
async def test_two_limits_are_taken_together_or_not_at_all(steps):
    clock = VirtualClock()
    buckets = LocalBuckets(clock)
    requests, rate = Rate(30), Rate(1000)
    for pause_s, amount in steps:
        clock._now += pause_s
        nothing = [Wanted(Kind.REQUESTS, requests, 0.0), tokens(rate, 0.0)]
        before = [s.reset_s for s in (await buckets.take("a", nothing)).standings]
        verdict = await buckets.take("a", [Wanted(Kind.REQUESTS, requests, 1.0), tokens(rate, amount)])
        after = [s.reset_s for s in (await buckets.take("a", nothing)).standings]
        assert (after == before) is not verdict.granted
        assert [s.reset_s for s in verdict.standings] == after


async def test_what_was_not_used_is_there_again_and_what_was_used_beyond_is_owed():
    buckets, rate = LocalBuckets(VirtualClock()), Rate(600)
    verdict = await buckets.take("a", [tokens(rate, 400.0)])
    assert verdict.standings[0].remaining == 200
    assert verdict.standings[0].reset_s == pytest.approx(40.0)
    await buckets.give("a", [tokens(rate, 390.0)])
    assert (await buckets.take("a", [tokens(rate, 0.0)])).standings[0].remaining == 590
    await buckets.give("a", [tokens(rate, 1e9)])
    assert (await buckets.take("a", [tokens(rate, 0.0)])).standings[0].remaining == 600, "no more than it holds"
    await buckets.give("a", [tokens(rate, -660.0)])
    verdict = await buckets.take("a", [tokens(rate, 1.0)])
    assert not verdict.granted
    assert verdict.retry_after_s == pytest.approx(6.1)


async def test_more_than_a_bucket_holds_takes_all_of_it():
    clock = VirtualClock()
    buckets, rate = LocalBuckets(clock), Rate(60)
    assert (await buckets.take("a", [tokens(rate, 1e6)])).granted
    assert (await buckets.take("b", [tokens(rate, 60.0)])).granted, "another caller has its own"
    refused = await buckets.take("a", [tokens(rate, 1e6)])
    assert refused.retry_after_s == pytest.approx(60.0)


async def test_callers_that_were_here_are_forgotten():
    clock = VirtualClock()
    buckets, rate = LocalBuckets(clock), Rate(6000)
    for number in range(30_000):
        await buckets.take(str(number), [tokens(rate, 1.0)])
        clock._now += 0.01
    assert len(buckets._full_at) <= 10_001


@pytest.mark.parametrize("bad", [(0, 1.0), (-1, 1.0), (1, 0.0)])
def test_a_rate_that_lets_nothing_through_is_refused(bad):
    with pytest.raises(ValueError, match="lets nothing through"):
        Rate(*bad)
