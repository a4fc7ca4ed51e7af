"""The statistics say what their definitions say: percentiles, TTFT, ITL, TPOT, the steady part of streams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stats import Spread, TokenTimes, percentile, ratio, spread, steady_itl_s

TIMES = st.lists(st.floats(0.0, 1e3), min_size=1, max_size=30)


@given(TIMES, st.floats(0.0, 100.0))
def test_a_percentile_lies_between_the_extremes_and_grows(values, q):
    value = percentile(values, q)
    assert min(values) <= value <= max(values)
    assert percentile(values, q / 2) <= value + 1e-9


@given(TIMES)
def test_the_ends_of_the_percentiles_are_the_extremes(values):
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


def test_percentiles_are_linear_between_neighbours():
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 50) == 2.5
    assert percentile(values, 90) == pytest.approx(3.7)
    assert percentile([7.0], 99) == 7.0


def test_percentiles_of_nothing_or_beyond_the_scale_are_refused():
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)
    with pytest.raises(ValueError, match="from 0 to 100"):
        percentile([1.0], 101)


def test_a_spread_keeps_its_runs_and_scales_them():
    runs = spread([0.003, 0.001, 0.008], 1e3)
    assert runs.runs == (3.0, 1.0, 8.0)
    assert (runs.median, runs.low, runs.high, runs.mean) == (3.0, 1.0, 8.0, 4.0)
    with pytest.raises(ValueError, match="at least one"):
        Spread(())


def test_a_ratio_is_of_medians():
    assert ratio(Spread((1.0, 4.0, 100.0)), Spread((2.0, 2.0, 50.0))) == 2.0


def test_one_request_in_numbers():
    times = TokenTimes(sent_s=10.0, arrivals_s=(10.5, 10.6, 10.9), num_tokens=(1, 1, 1))
    assert times.ttft_s == pytest.approx(0.5)
    assert times.e2e_s == pytest.approx(0.9)
    assert times.itl_s == pytest.approx((0.1, 0.3))
    assert times.tpot_s == pytest.approx(0.2)


def test_tokens_of_one_event_came_together_and_empty_events_bring_none():
    times = TokenTimes(sent_s=0.0, arrivals_s=(0.5, 1.0, 2.0, 3.0), num_tokens=(0, 2, 1, 0))
    assert times.token_times_s == (1.0, 1.0, 2.0)
    assert times.ttft_s == 1.0
    assert times.itl_s == (0.0, 1.0)
    assert times.e2e_s == 2.0


def test_tpot_of_one_token_is_undefined_and_times_of_none_are_refused():
    assert TokenTimes(0.0, (1.0,), (1,)).tpot_s is None
    with pytest.raises(ValueError, match="no token"):
        _ = TokenTimes(0.0, (1.0,), (0,)).ttft_s
    with pytest.raises(ValueError, match="arrivals"):
        TokenTimes(0.0, (1.0,), ())


@given(
    sent=st.floats(0.0, 10.0),
    events=st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 4)), min_size=2, max_size=20),
)
def test_ttft_and_the_gaps_add_up_to_e2e(sent, events):
    now, arrivals = sent, []
    for gap, _ in events:
        now += gap
        arrivals.append(now)
    times = TokenTimes(sent, tuple(arrivals), tuple(count for _, count in events))
    assert times.ttft_s + sum(times.itl_s) == pytest.approx(times.e2e_s)
    assert times.tpot_s == pytest.approx(sum(times.itl_s) / len(times.itl_s))


def stream(first: float, gap: float, count: int) -> TokenTimes:
    return TokenTimes(0.0, tuple(first + gap * i for i in range(count)), (1,) * count)


def test_the_steady_part_leaves_out_start_and_end():
    lone_start = TokenTimes(0.0, (0.0, 5.0, 10.0, 11.0, 12.0, 13.0), (1,) * 6)
    late = stream(10.0, 1.0, 4)
    assert steady_itl_s([lone_start, late]) == pytest.approx(1.0)


def test_streams_that_never_ran_side_by_side_have_no_steady_part():
    with pytest.raises(ValueError, match="side by side"):
        steady_itl_s([stream(0.0, 1.0, 3), stream(10.0, 1.0, 3)])
    with pytest.raises(ValueError, match="without tokens"):
        steady_itl_s([])


@given(count=st.integers(3, 30), gap=st.floats(0.01, 1.0), num_streams=st.integers(1, 5))
def test_streams_in_step_have_the_steps_gap(count, gap, num_streams):
    assert steady_itl_s([stream(1.0, gap, count)] * num_streams) == pytest.approx(gap)
