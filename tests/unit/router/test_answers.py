"""Seeds of several answers: the first is the request's own, no two are equal, and near requests share none."""

from hypothesis import given
from hypothesis import strategies as st

from contracts.sampling import MAX_SEED
from router.exchange import MAX_ANSWERS
from router.serving.answers import derived_seed

seeds = st.integers(0, MAX_SEED)


@given(seeds)
def test_the_first_has_the_requests_own_and_all_are_distinct_and_valid(seed):
    derived = [derived_seed(seed, index) for index in range(MAX_ANSWERS)]
    assert derived[0] == seed
    assert len(set(derived)) == MAX_ANSWERS
    assert all(0 <= value <= MAX_SEED for value in derived)


@given(seeds, st.integers(1, 2**40))
def test_requests_with_seeds_near_each_other_share_none(seed, distance):
    near = (seed + distance) & MAX_SEED
    ours = {derived_seed(seed, index) for index in range(MAX_ANSWERS)}
    assert ours.isdisjoint(derived_seed(near, index) for index in range(MAX_ANSWERS))


def test_the_function_is_what_the_protocol_says():
    assert [derived_seed(7, index) for index in range(3)] == [7, 0x4F1B_BCDC_BFA5_3E12, 0x1E37_79B9_7F4A_7C1D]
