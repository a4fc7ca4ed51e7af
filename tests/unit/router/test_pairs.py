"""The pair book: what counts, when a pair is bad, when a canary is due, and when all is forgotten."""

import pytest

from contracts.clock import VirtualClock
from contracts.errors import (
    DeadlineExceeded,
    DigestMismatch,
    Draining,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    NoRoom,
    Overloaded,
    RequestCancelled,
    TransferFailed,
    UnknownHandoff,
    WorkerLost,
)
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.config import CanaryConfig
from router.workers.pairs import Pair, PairBook, PairState, may_be_the_way
from router.workers.registry import Change, ChangeKind

CONFIG = CanaryConfig(
    interval_s=10.0, spacing_s=1.0, canary_failures=2, handoff_failures=3, retry_s=1.0, max_backoff_s=6.0
)
LOST = TransferFailed("lost")
FULL = NoRoom("full")


def pair(prefill="p", decode="d", epoch=1):
    return Pair(WorkerRef(prefill, epoch), WorkerRef(decode, epoch))


P = pair()


def book(config=CONFIG):
    """With all workers of these tests in it."""
    clock = VirtualClock()
    kept = PairBook(config, clock)
    for name in ("p", "p0", "p1", "p2", "d", "d0", "d1", "d2", "other"):
        kept.on_change(change(ChangeKind.JOINED, WorkerRef(name, 1)))
    return kept, clock


def change(kind, ref):
    layout = KVLayout("m", "float32", 1, 1, 8, 16)
    return Change(kind, WorkerInfo(ref, WorkerKind.DECODE, "a:1", "m", layout, (), 8, 8))


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (LOST, True),
        (DigestMismatch("differs"), True),
        (LayoutMismatch("dtype", "a", "b"), True),
        (UnknownHandoff("gone"), True),
        (WorkerLost("no answer"), True),
        (InternalError("a fault"), True),
        (DeadlineExceeded("the client gave it a second"), False),
        (Draining("leaves"), False),
        (FULL, False),
        (Overloaded("full"), False),
        (InvalidRequest("prompt", 1, "no"), False),
        (RequestCancelled("left"), False),
    ],
)
def test_what_may_be_the_fault_of_the_way(error, counts):
    assert may_be_the_way(error) is counts


# h, c: a user's hand-off or a canary failed; n: no room for either; o: a hand-off was committed
@pytest.mark.parametrize(
    ("events", "state"),
    [
        ("", PairState.UNKNOWN),
        ("hh", PairState.UNKNOWN),
        ("hhh", PairState.BAD),
        ("c", PairState.UNKNOWN),
        ("cc", PairState.BAD),
        ("nnnnnnnn", PairState.UNKNOWN),
        ("o", PairState.OK),
        ("ohh", PairState.OK),
        ("hhohh", PairState.OK),
        ("coc", PairState.OK),
        ("occ", PairState.BAD),
        ("hhn" + "h", PairState.BAD),  # no room says nothing, neither way
        ("cco", PairState.OK),
        ("ccoc", PairState.OK),
        ("chh", PairState.UNKNOWN),
    ],
)
def test_a_pair_is_bad_after_so_many_failures_running(events, state):
    kept, _ = book()
    for event in events:
        if event == "o":
            kept.worked(P)
        elif event == "c":
            kept.canary_failed(P, LOST)
        else:
            kept.failed(P, LOST if event == "h" else FULL)
    assert kept.state(P) is state
    assert kept.is_bad(P.prefill, P.decode) is (state is PairState.BAD)
    assert kept.state(pair("p", "other")) is PairState.UNKNOWN, "no pair answers for another"
    assert kept.reason(P) == ("" if events in ("", "nnnnnnnn") or events.endswith("o") else "lost")


def test_with_canaries_off_nothing_is_bad_because_nothing_would_find_out_that_it_is_good_again():
    kept, _ = book(CanaryConfig(interval_s=0.0))
    for _ in range(10):
        kept.failed(P, LOST)
    assert kept.state(P) is PairState.UNKNOWN


async def due_at(kept, clock, until):
    """The instants up to `until`, in steps of half a second, at which a canary for P is due."""
    found = []
    while clock.now() <= until:
        if kept.due([P]):
            found.append(clock.now())
            return found
        await clock.advance(0.5)
    return found


async def test_a_new_pair_is_due_at_once_and_then_once_per_interval():
    kept, clock = book()
    assert kept.due([P]) == P
    kept.worked(P)
    assert await due_at(kept, clock, 30.0) == [10.0]


async def test_traffic_is_proof_enough():
    kept, clock = book()
    for _ in range(20):
        kept.worked(P)
        await clock.advance(2.0)
        assert kept.due([P]) is None


async def test_a_users_failure_calls_for_a_canary_soon():
    kept, clock = book()
    kept.worked(P)
    kept.failed(P, LOST)
    assert await due_at(kept, clock, 30.0) == [1.0]


async def test_room_that_is_missing_calls_for_none():
    kept, clock = book()
    kept.worked(P)
    kept.failed(P, FULL)
    assert await due_at(kept, clock, 30.0) == [10.0]


async def test_a_bad_pair_is_tried_again_at_growing_pauses_up_to_a_bound():
    kept, clock = book()
    pauses = []
    for _ in range(6):
        kept.canary_failed(P, LOST)
        began = clock.now()
        pauses.append((await due_at(kept, clock, began + 30))[0] - began)
    assert pauses == [1.0, 2.0, 4.0, 6.0, 6.0, 6.0]
    assert kept.state(P) is PairState.BAD
    kept.worked(P)
    assert kept.state(P) is PairState.OK
    assert await due_at(kept, clock, clock.now() + 30) == [clock.now()]


async def test_a_canary_that_did_not_get_as_far_changes_no_verdict():
    kept, clock = book()
    for failures, state in ((0, PairState.UNKNOWN), (2, PairState.BAD)):
        for _ in range(failures):
            kept.canary_failed(P, LOST)
        kept.canary_said_nothing(P)
        assert kept.state(P) is state
        began = clock.now()
        assert await due_at(kept, clock, began + 30) == [began + 10.0]


async def test_who_waited_longest_is_next_and_everybody_gets_a_turn():
    kept, clock = book()
    pairs = [pair(f"p{i}", f"d{j}") for i in range(3) for j in range(3)]
    turns = []
    for _ in range(9):
        chosen = kept.due(pairs)
        turns.append(chosen)
        kept.canary_said_nothing(chosen)
        await clock.advance(0.5)
    assert set(turns) == set(pairs)
    await clock.advance(10.0)
    assert kept.due(pairs) == turns[0]


@pytest.mark.parametrize("kind", [ChangeKind.LOST, ChangeKind.LEFT])
@pytest.mark.parametrize("gone", [P.prefill, P.decode])
def test_a_life_that_is_over_is_forgotten_with_all_its_pairs(kind, gone):
    kept, _ = book()
    others = pair("p", "d2"), pair("p2", "d")
    for known in (P, *others):
        kept.canary_failed(known, LOST)
        kept.canary_failed(known, LOST)
    kept.on_change(change(ChangeKind.JOINED, gone))
    assert kept.state(P) is PairState.BAD
    kept.on_change(change(kind, gone))
    assert kept.state(P) is PairState.UNKNOWN
    assert sorted(kept.state(other) for other in others) == [PairState.BAD, PairState.UNKNOWN]


@pytest.mark.parametrize("kind", [ChangeKind.LOST, ChangeKind.LEFT])
@pytest.mark.parametrize("gone", [P.prefill, P.decode])
def test_what_ends_after_its_worker_has_gone_is_not_kept_for_ever(kind, gone):
    kept, _ = book()
    kept.on_change(change(kind, gone))
    kept.worked(P)
    assert kept.state(P) is PairState.UNKNOWN
    for _ in range(3):
        kept.failed(P, LOST)
        kept.canary_failed(P, LOST)
        kept.canary_said_nothing(P)
    assert (kept.state(P), kept.reason(P)) == (PairState.UNKNOWN, "")
    kept.on_change(change(ChangeKind.JOINED, gone))  # the router did not hear it for a while
    kept.worked(P)
    assert kept.state(P) is PairState.OK


def test_another_life_is_another_pair():
    kept, _ = book()
    kept.canary_failed(P, LOST)
    kept.canary_failed(P, LOST)
    assert kept.state(pair(epoch=2)) is PairState.UNKNOWN
