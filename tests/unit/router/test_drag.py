"""What prefill takes from streams is found from the gaps between their tokens, and only where nothing else explains them."""

import random

import pytest

from contracts.worker import WorkerKind, WorkerRef
from router.choosing.costs import PromptWork
from router.choosing.drag import Drag
from router.choosing.ledger import Ledger

P, OTHER, D = WorkerRef("p", 1), WorkerRef("q", 1), WorkerRef("d", 1)
WORK = PromptWork(500), 0.5


def played(drag: Drag, now: float, took_s: float, gap_s: float, num_streams: int = 4) -> float:
    """Streams run for a while at that gap; the instant at its end."""
    for step in range(1, round(took_s / gap_s) + 1):
        drag.heard(num_streams, now + step * gap_s)
    return now + took_s


def taught(dragged_gap_s: float, *, reads: bool = False, busy: tuple[WorkerRef, ...] = (P,)) -> Drag:
    drag, now, rng = Drag(), 0.0, random.Random(1)
    for _ in range(40):
        drag.change(now, 4, False, ())
        now = played(drag, now, 0.6, 0.024 * rng.lognormvariate(0, 0.05))
        drag.change(now, 4, reads, busy)
        now = played(drag, now, 0.6, dragged_gap_s * rng.lognormvariate(0, 0.05))
    return drag


def test_a_prefill_worker_on_the_same_machine_slows_streams_by_a_share_of_its_time() -> None:
    drag = taught(0.03)
    assert drag.step_s(4) == pytest.approx(0.024, rel=0.1)
    assert drag.share(P) == pytest.approx(0.2, abs=0.04)
    assert drag.share(OTHER) == 0.0


def test_one_elsewhere_does_not() -> None:
    assert taught(0.024).share(P) < 0.03


@pytest.mark.parametrize(("reads", "busy"), [(True, (P,)), (False, (P, OTHER))])
def test_what_has_another_explanation_is_nobody_s_drag(reads: bool, busy: tuple[WorkerRef, ...]) -> None:
    drag = taught(0.06, reads=reads, busy=busy)
    assert (drag.share(P), drag.share(OTHER)) == (0.0, 0.0)


def test_a_few_tokens_tell_nothing() -> None:
    drag = Drag()
    for turn in range(20):
        drag.change(turn * 0.3, 4, False, ())
        drag.heard(3 * 4, turn * 0.3 + 0.1)
    assert drag.step_s(4) is None


def test_the_ledger_ends_a_segment_with_every_change() -> None:
    ledger, now = Ledger(), 0.0
    drag = ledger.stream(D, -1, now)
    for key in range(20):
        drag.heard(20, now)
        now += 0.4
        ledger.prompt((P, WorkerKind.PREFILL), key, WORK, now)
        drag.heard(10, now)
        now += 0.4
        assert ledger.computed(P, key, now) is not None
        ledger.end(P, key, now)
    assert drag.step_s(1) == pytest.approx(0.02, rel=0.05)
    assert drag.share(P) == pytest.approx(0.5, abs=0.05)
    ledger.end(D, -1, now)
    assert ledger.backlog(D).empty


def test_a_ledger_forgets_a_worker_that_went_when_nothing_of_ours_is_there() -> None:
    ledger = Ledger()
    ledger.prompt((P, WorkerKind.PREFILL), 1, WORK, 0.0)
    ledger.stream(D, 2, 0.0)
    assert set(ledger.known) == {P, D}
    ledger.gone(P)
    ledger.gone(D)
    assert set(ledger.holding) == {P, D}, "what runs there runs on"
    ledger.end(P, 1, 1.0)
    ledger.end(D, 2, 1.0)
    assert ledger.known == ()
    ledger.end(P, 1, 1.0)
    assert ledger.computed(P, 1, 1.0) is None
    ledger.stream(D, 3, 2.0)  # a word that was under way
    ledger.end(D, 3, 2.0)
    assert ledger.known == ()


def test_a_ledger_keeps_what_it_learnt_of_any_number_of_workers() -> None:
    ledger = Ledger()
    for number in range(600):
        ledger.drag(WorkerRef(f"w{number}", 1))
    taught_to = ledger.drag(WorkerRef("w0", 1))
    for number in range(600):
        ledger.end(WorkerRef(f"w{number}", 1), 1, 1.0)
    assert ledger.drag(WorkerRef("w0", 1)) is taught_to


def test_a_change_at_one_decode_worker_leaves_the_segments_of_others() -> None:
    ledger = Ledger()
    drag = ledger.stream(D, 1, 0.0)
    other = WorkerRef("other", 1)
    for key in range(10, 22):  # too short for a segment each, if each ended one
        drag.heard(2, key - 10)
        ledger.stream(other, key, key - 9.5)
        ledger.prompt((other, WorkerKind.DECODE), key, WORK, key - 9.5)
        if key % 4 == 1:
            ledger.stream(D, 1, key - 9.5)
    assert drag.step_s(1) is not None


@pytest.mark.parametrize("waits_s", [0.03, 0.3, 1.2])
@pytest.mark.parametrize("queued_s", [0.0, 0.5])
def test_what_streams_lost_is_seen_from_their_tokens(waits_s: float, queued_s: float) -> None:
    drag = taught(0.024)
    drag.change(100.0, 4, False, ())
    begun = played(drag, 100.0, 0.6, 0.024)
    drag.change(begun, 4, True, ())
    stalls = played(drag, begun, queued_s, 0.024) if queued_s else begun
    last = max(mark.at for mark in drag._marks)
    drag.heard(4, last + 0.024 + waits_s)  # the step that read a prompt too
    until = last + 0.024 + waits_s
    drag.heard(4, until + 0.024)
    assert drag.lost_s(stalls, until) == pytest.approx(4 * waits_s, rel=0.1, abs=0.02)
    assert drag.lost_s(begun, until) == pytest.approx(4 * waits_s, rel=0.1, abs=0.15)  # however long it waited before


def test_streams_that_come_and_go_meanwhile_count_for_as_long_as_they_are_there() -> None:
    drag = taught(0.024)
    drag.change(100.0, 4, False, ())
    now = played(drag, 100.0, 0.6, 0.024)
    drag.heard(0, now)
    drag.change(now, 4, True, ())
    drag.change(now + 0.5, 1, True, ())  # three end, and one waits on
    drag.heard(1, now + 1.0)
    assert drag.lost_s(now, now + 1.0) == pytest.approx(4 * 0.5 + 0.5, rel=0.05)


def test_what_is_not_known_of_a_loss_is_not_made_up() -> None:
    strange = Drag()
    assert strange.lost_s(0.0, 1.0) is None, "nobody had a token"
    strange.change(0.0, 2, True, ())
    strange.heard(2, 0.1)
    strange.heard(2, 1.0)
    assert strange.lost_s(0.1, 1.0) is None, "what a token takes is not known"
    drag = taught(0.024)
    drag.change(100.0, 4, False, ())
    played(drag, 100.0, 60.0, 0.024)
    assert drag.lost_s(101.0, 159.0) is None, "too long ago"
    assert drag.lost_s(150.0, 159.0) == pytest.approx(0.0, abs=2.0)
