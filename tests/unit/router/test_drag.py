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
        ledger.end({P}, key, now)
    assert drag.step_s(1) == pytest.approx(0.02, rel=0.05)
    assert drag.share(P) == pytest.approx(0.5, abs=0.05)
    ledger.end({D}, -1, now)
    assert ledger.backlog(D).empty


def test_a_ledger_forgets_workers_that_came_and_went() -> None:
    ledger = Ledger()
    ledger.stream(D, 1, 0.0)
    for number in range(2000):
        ref = WorkerRef(f"w{number}", 1)
        ledger.prompt((ref, WorkerKind.PREFILL), 2, WORK, 1.0)
        ledger.end({ref}, 2, 2.0)
    assert len(ledger._backlogs) <= 256
    assert ledger.backlog(D).num_streams == 1
