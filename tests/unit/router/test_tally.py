"""A router's own account of a worker, beside the worker's word: nothing is counted twice, and others' requests are seen."""

from dataclasses import replace

import pytest

from contracts.clock import VirtualClock
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from router.policies import burden
from router.workers.registry import Worker
from router.workers.tally import Tally


def info(kind):
    return WorkerInfo(WorkerRef("w", 1), kind, "h:1", "m", KVLayout("m", "float32", 1, 1, 8, 16), (), 64, 100)


def announced(kind, at, **load):
    return Worker(info(kind), WorkerLoad(**load), at)


@pytest.mark.parametrize("kind", WorkerKind)
def test_what_is_announced_of_ours_counts_once(kind):
    tally = Tally(info(kind))
    for _ in range(4):
        tally.add(1, 100, 0)
    mine = tally.candidate(announced(kind, 1.0, num_running=1, num_waiting=3, num_queued_tokens=400))
    assert mine.others == 0.0
    assert mine.num_inflight_tokens == 400
    if kind is WorkerKind.PREFILL:
        assert burden(mine) == 400


def test_others_are_what_was_announced_beyond_ours_at_that_time():
    kind, clock = WorkerKind.PREFILL, VirtualClock()
    tally = Tally(info(kind), clock.now)
    tally.add(1, 100, 0)
    word = announced(kind, 1.0, num_running=1, num_waiting=3, num_queued_tokens=800)
    assert tally.candidate(word).others == 0.75
    tally.add(1, 50, 0)
    assert burden(tally.candidate(word)) == 150 + 600, "what is given since then comes on top"
    tally.add(0, -100, 0)
    tally.add(0, -50, 0)
    assert burden(tally.candidate(word)) == 600, "and what is done comes off"
    clock.skip(0.2)
    assert tally.candidate(announced(kind, 2.0, num_running=2)).others == 1.0, "ours are computed: those are others'"
    assert burden(tally.candidate(announced(kind, 3.0))) == 0


@pytest.mark.parametrize("kind", WorkerKind)
@pytest.mark.parametrize("heard_first", [True, False])
def test_what_has_ended_since_a_word_is_no_work_of_others(kind, heard_first):
    """One user's next turn comes a moment after the last: the worker is as free as it is, not as its last word has it."""
    clock = VirtualClock()
    tally = Tally(info(kind), clock.now)
    tally.add(1, 100, 120)
    word = announced(kind, 1.0, num_running=1, num_queued_tokens=100, kv_usage=0.3)
    if heard_first:
        tally.heard(word.load)
    tally.add(-1, -100, -120)
    clock.skip(0.05)  # else: the word was on its way when it ended
    after = tally.candidate(word)
    assert (after.others, after.ended) == (0.0, 1.0)
    assert burden(after) == 0
    clock.skip(1.0)
    assert burden(tally.candidate(word)) == 0, "and so it stays until the next word"
    tally.add(1, 50, 60)
    both = announced(kind, 2.0, num_running=2, num_queued_tokens=100, kv_usage=0.5)
    shared = tally.candidate(both)
    assert (shared.others, shared.ended) == (0.5, 0.0)
    tally.add(-1, -50, -60)
    ended = tally.candidate(both)
    assert (ended.others, ended.ended) == (0.5, 0.5)
    assert burden(ended) == (50 if kind is WorkerKind.PREFILL else 512 + 50 * 16 // 2 + 50), "what is left is another's"


@pytest.mark.parametrize("kind", WorkerKind)
def test_what_had_ended_long_before_a_word_is_not_what_it_tells_of(kind):
    clock = VirtualClock()
    tally = Tally(info(kind), clock.now)
    for _ in range(3):
        tally.add(1, 100, 120)
        tally.add(-1, -100, -120)
    clock.skip(0.2)
    assert tally.candidate(announced(kind, 1.0, num_running=3)).others == 1.0


def test_a_word_that_is_heard_of_again_is_no_new_one():
    """A look into Redis says when the worker spoke last, not what it would say now."""
    tally = Tally(info(WorkerKind.PREFILL))
    word = announced(WorkerKind.PREFILL, 1.0, num_waiting=4, num_queued_tokens=400)
    assert burden(tally.candidate(word)) == 400
    for _ in range(4):
        tally.add(1, 100, 0)
    assert burden(tally.candidate(replace(word, heard_at=1.1))) == 800


def test_a_prefill_worker_may_still_have_ours_that_are_computed():
    """They wait for their hand-off, and are no work that an announcement would count."""
    clock = VirtualClock()
    tally = Tally(info(WorkerKind.PREFILL), clock.now)
    tally.add(1, 100, 0)
    tally.add(0, -100, 0)
    clock.skip(0.2)
    assert tally.candidate(announced(WorkerKind.PREFILL, 1.0, num_running=1)).others == 1.0
    assert not tally.empty
    tally.add(-1, 0, 0)
    assert tally.empty


def test_it_is_empty_only_when_all_that_was_counted_is_given_back():
    tally = Tally(info(WorkerKind.DECODE))
    tally.add(1, 10, 20)
    tally.add(-1, -10, 0)
    assert not tally.empty
    tally.add(0, 0, -20)
    assert tally.empty
