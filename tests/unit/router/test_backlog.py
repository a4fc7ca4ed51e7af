"""What the router has given a worker, and what others have."""

import pytest

from router.backlog import LATE_S, Backlog, Peak


def test_work_counts_until_it_is_computed_and_the_first_s_runs_down() -> None:
    backlog = Backlog()
    assert (backlog.waiting_s(0.0), backlog.empty) == (0.0, True)
    backlog.prompt(1, 100, 1.0, 0.0)
    backlog.prompt(2, 50, 0.5, 0.2)
    assert backlog.waiting_s(0.4) == 0.6 + 0.5
    assert backlog.waiting_s(9.0) == 0.5  # the first takes longer than it should; the second has not begun
    backlog.computed(1, 9.0)
    assert backlog.waiting_s(9.1) == pytest.approx(0.4)
    backlog.end(2, 9.2)
    assert (backlog.waiting_s(9.2), backlog.empty) == (0.0, True)


def test_a_prompt_is_alone_only_if_it_was_all_the_time() -> None:
    backlog = Backlog()
    backlog.prompt(1, 100, 1.0, 0.0)
    assert backlog.computed(1, 1.0)
    backlog.prompt(2, 100, 1.0, 1.0)
    backlog.prompt(3, 100, 1.0, 1.5)
    assert not backlog.computed(2, 2.0)
    assert not backlog.computed(3, 3.0)
    assert not backlog.computed(3, 3.0)


def test_streams_are_counted_until_they_end() -> None:
    backlog = Backlog()
    backlog.stream(1, 0.0)
    backlog.stream(2, 0.0)
    backlog.end(1, 1.0)
    backlog.end(1, 1.0)
    assert backlog.num_streams == 1


def test_what_we_had_a_moment_ago_is_not_others() -> None:
    backlog = Backlog()
    backlog.prompt(1, 100, 1.0, 0.0)
    backlog.computed(1, 1.0)
    backlog.end(1, 1.0)
    assert backlog.others((100, 1), 1.0 + LATE_S / 2) == (0, 0)
    assert backlog.others((130, 3), 1.0 + LATE_S / 2) == (30, 2)
    assert backlog.others((100, 1), 1.1 + LATE_S) == (100, 1)


def test_a_peak_is_that_of_the_window() -> None:
    peak = Peak()
    for now, value in enumerate((3, 9, 4, 6, 0)):
        peak.change(value, float(now))
    assert [peak.at(4.0), peak.at(4.4), peak.at(4.6), peak.at(6.4), peak.at(6.6)] == [9, 9, 6, 6, 0]
