"""Lives and endings that are remembered, within bounds."""

import pytest

from contracts.errors import HandoffError, StaleEpoch
from contracts.worker import WorkerRef
from kv_transfer.memory import Bounded, Endings, Lives

D = WorkerRef("d", 7)


def test_only_current_lives_are_heard():
    lives = Lives(D, 10)
    assert not lives.check(WorkerRef("p", 3), D)
    assert not lives.check(WorkerRef("p", 3), D)
    assert lives.check(WorkerRef("p", 4), D)
    assert not lives.check(WorkerRef("q", 1), D)
    with pytest.raises(StaleEpoch, match="epoch of p: expected 4, got 3"):
        lives.check(WorkerRef("p", 3), D)
    for epoch in (6, 8):
        with pytest.raises(StaleEpoch, match="epoch of d: expected 7"):
            lives.check(WorkerRef("p", 4), WorkerRef("d", epoch))
    with pytest.raises(HandoffError, match="this is d, not e"):
        lives.check(WorkerRef("p", 4), WorkerRef("e", 7))


def test_a_newer_life_named_in_a_message_for_another_is_not_believed():
    lives = Lives(D, 10)
    lives.check(WorkerRef("p", 3), D)
    with pytest.raises(StaleEpoch):
        lives.check(WorkerRef("p", 9), WorkerRef("d", 6))
    assert not lives.check(WorkerRef("p", 3), D)


def test_the_oldest_is_forgotten_first():
    book = Bounded(2)
    for name in ("a", "b", "a", "c"):
        book.put(name, name.upper())
    assert (book.get("a"), book.get("b"), book.get("c")) == ("A", None, "C")


def test_an_ending_is_told_to_its_owner_alone():
    p, q, endings = WorkerRef("p", 3), WorkerRef("q", 1), Endings(4)
    endings.give_up("h", q, "never reserved")
    assert (endings.of("h", q), endings.of("h", p)) == ("never reserved", None)
    endings.put("h", p, 4)
    endings.give_up("h", p, "too late")
    assert endings.of("h", p) == 4
    for stranger in (q, WorkerRef("p", 4)):
        with pytest.raises(HandoffError, match="belongs to p, epoch 3"):
            endings.of("h", stranger)
        with pytest.raises(HandoffError, match="belongs to p, epoch 3"):
            endings.give_up("h", stranger, "not mine")
