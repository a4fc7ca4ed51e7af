"""Percentiles: numpy's, over exactly the last seconds, at a bounded price."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.percentiles import MOST, Sliding, percentile, thinned

VALUES = st.floats(0, 1e4, allow_nan=False)
SHARES = (0.5, 0.9, 0.99)


@given(st.lists(VALUES, min_size=1, max_size=200), st.floats(0, 1))
def test_a_percentile_is_numpys(values, share):
    assert percentile(sorted(values), share) == pytest.approx(np.quantile(values, share), abs=1e-9)


def test_no_values_have_no_percentile():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
    assert Sliding(3).at(SHARES) is None


@given(st.lists(st.lists(VALUES, max_size=20), max_size=12), st.integers(1, 5))
def test_it_is_of_the_last_seconds_and_no_others(seconds, span):
    sliding = Sliding(span)
    for values in seconds:
        sliding.close(values)
    expected = [v for values in seconds[-span:] for v in values]
    found = sliding.at(SHARES)
    if expected:
        assert found == pytest.approx(tuple(np.quantile(expected, SHARES)), abs=1e-9)
    else:
        assert found is None


@given(st.integers(0, 5000), st.integers(1, 300))
def test_thinned_values_are_evenly_spaced(size, most):
    kept = thinned(range(size), most)
    assert len(kept) == min(size, most)
    assert kept == sorted(set(kept))
    if size > most:
        steps = np.diff([*kept, size])
        assert max(steps) - min(steps) <= 1


def test_a_busy_second_is_thinned_and_stays_true():
    sliding = Sliding(1)
    sliding.close([i / 100_000 for i in range(100_000)])
    assert sliding.at(SHARES) == pytest.approx(SHARES, abs=2 / MOST)
