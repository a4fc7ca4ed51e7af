"""The chooser with bad pairs: no combination of two that do not work together, whatever else must be avoided."""

from dataclasses import replace
from itertools import product

import pytest
from prometheus_client import CollectorRegistry

from contracts.clock import VirtualClock
from contracts.errors import TransferFailed
from contracts.kv_layout import KVLayout
from contracts.sampling import SamplingParams
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from observability.policy_metrics import PolicyMetrics
from router.choosing.choice import Chooser
from router.choosing.prefix_index import PrefixIndex
from router.choosing.prompts import Prompts
from router.config import CanaryConfig, RetryConfig
from router.policies import Candidate, LeastLoaded, RoundRobin
from router.serving.progress import Job, Progress
from router.workers.pairs import Pair, PairBook
from router.workers.registry import Change, ChangeKind

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 16)


class Offered:
    """Pools whose workers are all ready."""

    def __init__(self, num_prefill, num_decode, busy=()):
        self._pools = {
            kind: tuple(_candidate(f"{kind.value[0]}{i}", kind, busy) for i in range(count))
            for kind, count in ((WorkerKind.PREFILL, num_prefill), (WorkerKind.DECODE, num_decode))
        }

    def candidates(self, kind):
        return self._pools[kind]


def _candidate(worker_id, kind, busy):
    info = WorkerInfo(WorkerRef(worker_id, 1), kind, "h:1", "m", LAYOUT, (), 64, 64)
    return Candidate(info, WorkerLoad(num_running=9, num_queued_tokens=99) if worker_id in busy else WorkerLoad())


def chooser(num_prefill, num_decode, bad=(), busy=(), policy=RoundRobin):
    book, offered = PairBook(CanaryConfig(), VirtualClock()), Offered(num_prefill, num_decode, busy)
    for candidate in (c for kind in WorkerKind for c in offered.candidates(kind)):
        book.on_change(Change(ChangeKind.JOINED, candidate.info))
    for prefill, decode in bad:
        for _ in range(2):
            book.canary_failed(Pair(WorkerRef(prefill, 1), WorkerRef(decode, 1)), TransferFailed("lost"))
    prompts = Prompts(PrefixIndex(VirtualClock()), PolicyMetrics(CollectorRegistry()))
    return Chooser(offered, {kind: policy() for kind in WorkerKind}, book, prompts)


def progress(*avoid):
    job = Job(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), deadline=60.0)
    books = Progress(job, VirtualClock(), RetryConfig())
    books.avoid.update(WorkerRef(worker_id, 1) for worker_id in avoid)
    return books


def pairs(chosen_by, books, *, forced=False, times=12):
    """Every pair that comes out when it is asked again and again, as "p0d1"."""
    found = set()
    for _ in range(times):
        chosen = chosen_by.pair(books, forced=forced)
        found.add("".join(info.ref.worker_id for info in chosen) if chosen else None)
    return found


ALL_OF_P0 = (("p0", "d0"), ("p0", "d1"))
ALL_OF_D0 = (("p0", "d0"), ("p1", "d0"))
CROSSED = (("p0", "d0"), ("p1", "d1"))
ALL = (*ALL_OF_P0, ("p1", "d0"), ("p1", "d1"))


@pytest.mark.parametrize(
    ("bad", "avoid", "forced", "expected"),
    [
        (ALL_OF_P0, (), False, {"p1d0", "p1d1"}),
        (ALL_OF_D0, (), False, {"p0d1", "p1d1"}),
        (CROSSED, (), False, {"p0d1", "p1d0"}),
        (ALL, (), False, {None}),
        (ALL, (), True, {None}),
        # who failed the request comes after who did not, and a bad pair never
        (CROSSED, ("d1",), False, {"p1d0"}),
        (CROSSED, ("p0",), False, {"p1d0"}),
        (CROSSED, ("d0", "p1"), False, {"p0d1"}),
        # fresh are p1 and d1, which do not work together: the fresh prefill worker with the decode worker to avoid
        (CROSSED, ("p0", "d0"), False, {"p1d0"}),
        (ALL_OF_D0, ("d1",), False, {"p0d1", "p1d1"}),
        # a prefill worker that failed it: alone is better, unless the hand-over is forced
        (ALL_OF_P0, ("p1",), False, {None}),
        (ALL_OF_P0, ("p1",), True, {"p1d0", "p1d1"}),
        ((), ("p0", "p1"), False, {None}),
        ((), ("p0", "p1", "d0"), True, {"p0d1", "p1d1"}),
    ],
)
def test_which_pairs_may_come(bad, avoid, forced, expected):
    assert pairs(chooser(2, 2, bad), progress(*avoid), forced=forced) == expected


def test_no_choice_ever_combines_a_bad_pair_while_another_is_there():
    """Every subset of bad pairs of 2 x 2, every set to avoid, forced or not, both policies."""
    names = [f"{p}{d}" for p, d in ALL]
    for flags, avoid, forced, policy in product(
        product((False, True), repeat=4), product((False, True), repeat=4), (False, True), (RoundRobin, LeastLoaded)
    ):
        bad = [pair for pair, is_bad in zip(ALL, flags, strict=True) if is_bad]
        avoided = [name for name, is_avoided in zip(("p0", "p1", "d0", "d1"), avoid, strict=True) if is_avoided]
        found = pairs(chooser(2, 2, bad, policy=policy), progress(*avoided), forced=forced, times=4)
        good = {n for n, is_bad in zip(names, flags, strict=True) if not is_bad}
        assert found <= good | {None}, (bad, avoided, forced)
        if forced:
            assert (None in found) is (not good), (bad, avoided)
        else:
            usable = {n for n in good if n[:2] not in avoided}
            assert (None in found) is (not usable), (bad, avoided)
            assert not {n for n in found if n} - usable


def test_load_decides_among_those_that_may_come():
    by_load = chooser(2, 2, CROSSED, busy=("d0", "p0"), policy=LeastLoaded)
    assert pairs(by_load, progress()) == {"p0d1"}, "the free decode worker, by the only way to it"


@pytest.mark.parametrize(
    ("bad", "avoid", "expected"),
    [
        ((), (), {"d0", "d1"}),
        ((("p0", "d0"),), (), {"d1"}),
        ((("p0", "d0"),), ("d1",), {"d1"}),
        ((), ("d1",), {"d0"}),
        (ALL_OF_P0, (), {None}),
    ],
)
def test_a_hand_off_that_failed_is_aimed_anew(bad, avoid, expected):
    by = chooser(2, 2, bad)
    found = {by.decode_for(WorkerRef("p0", 1), progress(*avoid)) for _ in range(6)}
    assert {info and info.ref.worker_id for info in found} == expected


def test_a_decode_worker_that_nobody_reaches_runs_requests_alone():
    by = chooser(2, 2, ALL_OF_D0)
    assert {by.decode(progress()).ref.worker_id for _ in range(4)} == {"d0", "d1"}


def test_the_way_that_another_answer_took_is_taken_unless_it_is_bad():
    first = progress()
    first.at = {WorkerKind.PREFILL: WorkerRef("p1", 1), WorkerKind.DECODE: WorkerRef("d1", 1)}
    beside = Progress(first.job, VirtualClock(), RetryConfig(), beside=first)
    assert pairs(chooser(2, 2), beside) == {"p1d1"}
    assert pairs(chooser(2, 2, CROSSED), beside) == {"p0d1"}


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(0, 0), (0, 2), (2, 0)])
def test_without_a_pool_there_is_no_pair(num_prefill, num_decode):
    by = chooser(num_prefill, num_decode)
    assert by.pair(progress(), forced=True) is None
    assert by.pairs() == []
    assert (by.decode(progress()) is None) is (num_decode == 0)


def test_bad_pairs_are_those_of_workers_that_are_there():
    assert [str(pair) for pair in chooser(1, 2, CROSSED).bad_pairs()] == ["p0 to d0"]


def test_workers_that_are_too_small_for_a_request_are_no_candidates():
    offered = chooser(2, 2)
    for kind, candidates in offered._pools._pools.items():
        small = replace(candidates[0], info=replace(candidates[0].info, max_model_len=2))
        offered._pools._pools[kind] = (small, candidates[1])
    books = progress()
    assert pairs(offered, books) == {"p1d1"}
    assert {offered.decode(books).ref.worker_id for _ in range(4)} == {"d1"}
    assert {offered.decode_for(WorkerRef("p0", 1), books).ref.worker_id for _ in range(4)} == {"d1"}
    assert offered.has_other(WorkerKind, books)
    books.avoid.update((WorkerRef("p1", 1), WorkerRef("d1", 1)))
    assert not offered.has_other(WorkerKind, books), "the small ones are no help"


def doubted(by, *worker_ids):
    """Their breakers are open."""
    pools = by._pools._pools
    for kind, candidates in pools.items():
        pools[kind] = tuple(replace(c, doubtful=c.info.ref.worker_id in worker_ids) for c in candidates)
    return by


def test_a_worker_whose_breaker_is_open_is_taken_only_where_there_is_no_other():
    books = progress()
    assert pairs(doubted(chooser(2, 2), "p0", "d1"), books) == {"p1d0"}
    assert {doubted(chooser(0, 2), "d0").decode(books).ref.worker_id for _ in range(4)} == {"d1"}
    assert {doubted(chooser(0, 1), "d0").decode(books).ref.worker_id for _ in range(4)} == {"d0"}
    assert doubted(chooser(1, 2), "d0").decode_for(WorkerRef("p0", 1), books).ref.worker_id == "d1"
    assert doubted(chooser(1, 1), "d0").decode_for(WorkerRef("p0", 1), books).ref.worker_id == "d0"
    assert pairs(doubted(chooser(1, 2), "d0", "d1"), books) == {"p0d0", "p0d1"}


def test_a_prefill_pool_of_open_breakers_is_used_only_by_who_insists():
    assert pairs(doubted(chooser(2, 1), "p0", "p1"), progress()) == {None}, "a decode worker alone is better"
    assert pairs(doubted(chooser(2, 1), "p0", "p1"), progress(), forced=True) == {"p0d0", "p1d0"}
