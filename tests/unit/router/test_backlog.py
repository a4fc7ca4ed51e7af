"""What the router has given a worker, and what others have."""

import random

import pytest

from router.choosing.backlog import LATE_S, Backlog, Peak, Run
from router.choosing.costs import PromptWork, Together

A, B = PromptWork(100), PromptWork(80, 30)


def test_work_counts_until_it_is_computed_and_the_first_s_runs_down() -> None:
    backlog = Backlog()
    assert (backlog.waiting_s(0.0), backlog.empty) == (0.0, True)
    backlog.prompt(1, A, 1.0, 0.0)
    backlog.prompt(2, B, 0.5, 0.2)
    assert backlog.waiting_s(0.4) == 0.6 + 0.5
    assert backlog.waiting_s(9.0) == 0.5  # the first takes longer than it should; the second has not begun
    backlog.computed(1, 9.0)
    assert backlog.waiting_s(9.1) == pytest.approx(0.4)
    backlog.end(2, 9.2)
    assert (backlog.waiting_s(9.2), backlog.empty) == (0.0, True)


def test_a_prompt_tells_how_long_it_and_those_before_it_took_unless_another_followed() -> None:
    backlog = Backlog()
    backlog.prompt(1, A, 1.0, 0.0)
    assert backlog.computed(1, 1.0) == Run(0.0, Together())
    backlog.prompt(2, A, 1.0, 2.0)
    backlog.prompt(3, B, 1.0, 2.5)
    assert backlog.computed(2, 3.0) is None
    backlog.prompt(4, A, 1.0, 3.2)
    assert backlog.computed(3, 3.5) is None
    assert backlog.computed(4, 4.0) == Run(3.0, Together().plus(B))
    assert backlog.computed(4, 4.0) is None


def test_its_sums_are_those_of_what_is_there_whatever_comes_and_goes() -> None:
    backlog, rng, there = Backlog(), random.Random(1), {}
    for key in range(2000):
        if there and rng.random() < 0.5:
            gone = rng.choice(list(there))
            there.pop(gone)
            backlog.end(gone, 0.0)
        else:
            work = PromptWork(rng.randint(1, 3000), rng.randint(0, 500), rng.randint(0, 9))
            there[key] = work, rng.random()
            backlog.prompt(key, *there[key], 0.0)
        assert backlog.waiting_s(0.0) == pytest.approx(sum(work_s for _, work_s in there.values()), abs=1e-9)
    before = [work.sizes for work, _ in there.values()]
    backlog.prompt(-1, A, 1.0, 0.0)
    run = backlog.computed(-1, 1.0)
    assert run is not None
    assert run.before.sizes == pytest.approx([sum(column) for column in zip(*before, strict=True)])
    for key in there:
        backlog.end(key, 1.0)
    backlog.prompt(-2, A, 1.0, 2.0)
    assert backlog.waiting_s(2.0) == 1.0, "nothing is left of the sums"
    assert backlog.computed(-2, 3.0) == Run(2.0, Together())


def test_streams_are_counted_until_they_end() -> None:
    backlog = Backlog()
    backlog.stream(1, 0.0)
    backlog.stream(2, 0.0)
    backlog.end(1, 1.0)
    backlog.end(1, 1.0)
    assert backlog.num_streams == 1


def test_what_we_had_a_moment_ago_is_not_others() -> None:
    backlog = Backlog()
    backlog.prompt(1, A, 1.0, 0.0)
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
