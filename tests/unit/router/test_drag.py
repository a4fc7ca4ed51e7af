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
    drag.num_tokens += round(took_s / gap_s) * num_streams
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
        drag.num_tokens += 3 * 4
    assert drag.step_s(4) is None


def test_the_ledger_ends_a_segment_with_every_change() -> None:
    ledger, now = Ledger(), 0.0
    drag = ledger.stream(D, -1, now)
    for key in range(20):
        drag.num_tokens += 20
        now += 0.4
        ledger.prompt((P, WorkerKind.PREFILL), key, WORK, now)
        drag.num_tokens += 10
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
        drag.num_tokens += 2
        ledger.stream(other, key, key - 9.5)
        ledger.prompt((other, WorkerKind.DECODE), key, WORK, key - 9.5)
        if key % 4 == 1:
            ledger.stream(D, 1, key - 9.5)
    assert drag.step_s(1) is not None
