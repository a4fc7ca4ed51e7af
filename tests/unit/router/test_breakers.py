"""A breaker per life of a worker: every row of its table, what counts, who may probe, how long it rests, what rumours do."""

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.clock import VirtualClock
from contracts.errors import (
    DeadlineExceeded,
    DigestMismatch,
    Draining,
    InternalError,
    InvalidRequest,
    NoRoom,
    Overloaded,
    RequestCancelled,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.config import BreakerConfig
from router.workers.breakers import TRANSITIONS, Breakers, BreakerState, Event
from router.workers.registry import Change, ChangeKind

CONFIG = BreakerConfig(failures_in_a_row=3, min_requests=6, failure_share=0.5, open_s=1.0, max_open_s=8.0, jitter=0.2)
REF = WorkerRef("d0", 1)
LOST = WorkerLost("gone")
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


def info(ref=REF):
    return WorkerInfo(ref, WorkerKind.DECODE, "h:1", "m", KVLayout("m", "float32", 1, 1, 8, 16), (), 64, 64)


def breakers(config=CONFIG, clock=None):
    made = Breakers(config, clock if clock is not None else VirtualClock(), Random(7))
    made.on_change(Change(ChangeKind.JOINED, info()))
    return made


def fail(made, times=3, error=LOST):
    for _ in range(times):
        made.begin(REF).failed(error)


def test_every_state_hears_every_event_that_it_can_meet():
    known = set(product(BreakerState, Event)) - {(CLOSED, Event.RESTED), (HALF_OPEN, Event.RESTED)}
    assert set(TRANSITIONS) == known


def test_failures_in_a_row_open_it_and_another_worker_is_not_touched():
    made = breakers()
    other = WorkerRef("d1", 1)
    made.on_change(Change(ChangeKind.JOINED, info(other)))
    fail(made, 2)
    assert made.offers(REF)
    fail(made, 1)
    assert made.state(REF) is OPEN
    assert not made.offers(REF)
    assert made.offers(other)
    assert made.state(other) is CLOSED


def test_a_success_breaks_the_row_but_a_share_of_failures_opens_it_too():
    made = breakers()
    for _ in range(2):
        fail(made, 1)
        made.begin(REF).worked()
    assert made.state(REF) is CLOSED, "half of four: too few to judge"
    fail(made, 1)
    assert made.state(REF) is CLOSED
    fail(made, 1)
    assert made.state(REF) is OPEN, "four of six"


async def test_what_is_older_than_the_window_does_not_count():
    clock = VirtualClock()
    made = breakers(clock=clock)
    for _ in range(2):
        fail(made, 1)
        made.begin(REF).worked()
    await clock.advance(CONFIG.window_s)
    fail(made, 2)
    assert made.state(REF) is CLOSED


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (WorkerLost("x"), True),
        (Unavailable("x"), True),
        (InternalError("x"), True),
        (Overloaded("x"), False),
        (NoRoom("x"), False),
        (Draining("x"), False),
        (RequestCancelled("x"), False),
        (DeadlineExceeded("x"), False),
        (InvalidRequest("n", 1, "no"), False),
        (TransferFailed("x"), False),
        (DigestMismatch("x"), False),
    ],
)
def test_only_what_the_worker_is_to_blame_for_counts(error, counts):
    made = breakers()
    fail(made, 20, error)
    assert made.offers(REF) is not counts


def test_an_answer_that_begins_and_breaks_off_is_a_failure():
    made = breakers()
    for _ in range(3):
        trial = made.begin(REF)
        trial.worked()
        trial.failed(LOST)
    assert made.state(REF) is OPEN, "three of six"


async def test_after_its_rest_one_at_a_time_may_probe():
    clock = VirtualClock()
    made = breakers(clock=clock)
    fail(made)
    await clock.advance(CONFIG.open_s * (1 - CONFIG.jitter) - 0.001)
    assert not made.offers(REF)
    await clock.advance(2 * CONFIG.jitter * CONFIG.open_s + 0.002)
    assert made.state(REF) is HALF_OPEN
    assert made.offers(REF)
    probe = made.begin(REF)
    assert not made.offers(REF), "one is under way"
    probe.end()
    assert made.offers(REF), "its client left; another may"
    second = made.begin(REF)
    probe.end()
    assert not made.offers(REF), "who ended twice frees nobody else's place"
    await clock.advance(CONFIG.probe_timeout_s)
    assert made.offers(REF), "it says nothing"
    third = made.begin(REF)
    second.end()
    assert not made.offers(REF)
    third.worked()
    assert made.state(REF) is CLOSED
    assert made.offers(REF)


async def rest_over(made, clock):
    (report,) = made.report()
    await clock.advance(report.rests_s + 0.001)
    assert made.state(REF) is HALF_OPEN
    return report.rests_s


async def test_it_rests_twice_as_long_each_time_up_to_the_limit_and_forgets_after_good_times():
    clock = VirtualClock()
    made = breakers(BreakerConfig(failures_in_a_row=3, open_s=1.0, max_open_s=8.0, jitter=0.0), clock)
    fail(made)
    rests = []
    for _ in range(5):
        rests.append(await rest_over(made, clock))
        made.begin(REF).failed(LOST)
    assert rests == [1.0, 2.0, 4.0, 8.0, 8.0]
    await rest_over(made, clock)
    made.begin(REF).worked()
    fail(made)
    assert await rest_over(made, clock) == 8.0, "it only seemed well"
    made.begin(REF).worked()
    await clock.advance(8.1)
    fail(made)
    assert await rest_over(made, clock) == 1.0


def test_jitter_keeps_routers_from_probing_together():
    def rest(seed):
        made = Breakers(CONFIG, VirtualClock(), Random(seed))
        made.on_change(Change(ChangeKind.JOINED, info()))
        fail(made)
        return made.report()[0].rests_s

    rests = [rest(seed) for seed in range(20)]
    assert len(set(rests)) > 10
    assert all(0.8 <= rest_s <= 1.2 for rest_s in rests)


def test_what_began_before_it_opened_says_nothing():
    made = breakers()
    old = [made.begin(REF) for _ in range(5)]
    fail(made)
    opened = made.report()
    old[0].worked()
    old[1].failed(LOST)
    assert made.report() == opened


def test_who_had_to_go_there_all_the_same_and_was_served_closes_it():
    made = breakers()
    fail(made)
    made.begin(REF).worked()
    assert made.state(REF) is CLOSED


def test_a_life_that_is_over_is_forgotten_and_the_next_begins_closed():
    made = breakers()
    late = made.begin(REF)
    fail(made)
    made.on_change(Change(ChangeKind.LOST, info()))
    assert made.report() == ()
    late.failed(LOST)
    made.begin(REF).failed(LOST)
    assert made.samples() == []
    reborn = WorkerRef("d0", 2)
    made.on_change(Change(ChangeKind.JOINED, info(reborn)))
    assert made.offers(reborn)
    assert made.samples() == [("d0", "decode", 0)]


def test_a_rumour_costs_one_probe_and_is_not_passed_on():
    made, told = breakers(), []
    made.on_trip.append(lambda ref, reason: told.append((ref, reason)))
    made.warn(REF, "gone")
    assert made.state(REF) is HALF_OPEN
    assert made.offers(REF)
    probe = made.begin(REF)
    assert not made.offers(REF)
    probe.worked()
    assert made.state(REF) is CLOSED
    assert told == []
    made.warn(REF, "gone")
    made.begin(REF).failed(LOST)
    assert made.state(REF) is OPEN
    assert told == [(REF, "gone")]
    made.warn(REF, "again")
    assert made.state(REF) is OPEN
    made.warn(WorkerRef("who?", 1), "never heard of")


def test_a_rumour_may_come_before_its_worker_and_counts_for_a_while():
    clock = VirtualClock()
    made = Breakers(BreakerConfig(max_open_s=30.0), clock)
    for number in range(300):
        made.warn(WorkerRef(f"d{number}", 1), "gone")
    clock.skip(29.0)
    made.on_change(Change(ChangeKind.JOINED, info(WorkerRef("d299", 1))))
    made.on_change(Change(ChangeKind.JOINED, info(WorkerRef("d298", 2))))
    made.on_change(Change(ChangeKind.JOINED, info(WorkerRef("d0", 1))))
    assert [(report.worker_id, report.state) for report in made.report()] == [("d299", "half_open")], "bounded, by life"
    clock.skip(2.0)
    made.on_change(Change(ChangeKind.JOINED, info(WorkerRef("d297", 1))))
    assert len(made.report()) == 1


def test_each_opening_is_told_once():
    made, told, counted = breakers(), [], []
    made.on_trip.append(lambda ref, _: told.append(ref))
    made.on_open = lambda pool, cause: counted.append((pool, cause))
    fail(made, 10)
    assert told == [REF]
    assert counted == [("decode", "failures")]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin")),
        st.tuples(st.sampled_from(["worked", "failed", "cancelled", "end"]), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.floats(0, 12)),
        st.tuples(st.just("warn")),
    ),
    max_size=80,
)


@given(STEPS)
async def test_whatever_happens_a_worker_comes_back_when_it_works_and_one_probe_is_under_way_at_most(steps):
    clock = VirtualClock()
    made, trials = breakers(clock=clock), []
    for step in steps:
        match step:
            case ("begin",):
                was_offered, state = made.offers(REF), made.state(REF)
                trials.append(made.begin(REF))
                assert not (was_offered and state is HALF_OPEN and made.offers(REF)), "a probe holds the door"
            case ("wait", delay_s):
                await clock.advance(delay_s)
            case ("warn",):
                made.warn(REF, "rumour")
            case (verdict, index) if index < len(trials):
                trial = trials[index]
                {
                    "worked": trial.worked,
                    "failed": lambda t=trial: t.failed(LOST),
                    "cancelled": lambda t=trial: t.failed(RequestCancelled("left")),
                    "end": trial.end,
                }[verdict]()
        assert made.offers(REF) or made.state(REF) is not CLOSED
    await clock.advance(CONFIG.max_open_s * (1 + CONFIG.jitter) + CONFIG.probe_timeout_s)
    assert made.offers(REF), "no state is for ever"
    made.begin(REF).worked()
    assert made.state(REF) is CLOSED


async def test_outcomes_of_long_ago_are_forgotten_though_nothing_fails():
    """They were looked through at a failure only, so a worker that never failed had all of them kept."""
    clock = VirtualClock()
    made = breakers(clock=clock)
    for _ in range(100):
        await clock.advance(CONFIG.window_s / 10)
        made.begin(REF).worked()
    assert len(made._breakers[REF].outcomes) <= 10
