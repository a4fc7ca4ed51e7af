"""Nothing is said more often than once in its time, and nothing that happened is forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from observability.seldom import Seldom


@given(st.lists(st.floats(0, 3)))
def test_each_event_is_said_or_counted_and_never_two_within_a_second(pauses):
    now = 0.0
    seldom, said_at, told = Seldom(now=lambda: now), [], 0
    for pause in [*pauses, 1.0]:  # by the last one all before it are told
        now += pause
        more = seldom.due()
        if more is not None:
            assert not said_at or now - said_at[-1] > 1.0 - 1e-9
            said_at.append(now)
            told += 1 + more
    assert told == len(pauses) + 1
