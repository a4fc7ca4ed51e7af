"""A hand-over by itself, its events in an order of our choice: timers, and what a failure is counted as."""

import asyncio
import itertools

import pytest
from prometheus_client import CollectorRegistry

from contracts.clock import VirtualClock
from contracts.errors import Draining, InternalError, RequestCancelled, Unavailable, WorkerLost
from contracts.kv_layout import KVLayout
from contracts.prefill import FirstTokens, HandedOff, HandoffFailed
from contracts.request import FinishReason, TokenDelta
from contracts.sampling import SamplingParams
from contracts.wire import error_info
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from observability.policy_metrics import PolicyMetrics
from observability.stages import HandoffStats, StageTimes
from router.choosing.prefix_index import PrefixIndex
from router.choosing.prompts import Prompts
from router.config import BreakerConfig, RetryBudgetConfig, RetryConfig
from router.halt import Halt
from router.serving.attempts import Means
from router.serving.handover import TRANSITIONS, HandOver, News, Stage
from router.serving.inbox import DecodeLost, DecodeTokens
from router.serving.progress import Job, Progress
from router.serving.retry_budget import RetryBudget
from router.workers.breakers import Breakers, BreakerState
from router.workers.registry import Change, ChangeKind

RETRY = RetryConfig(handoff_verdict_s=3.0, max_handoff_failures=5)
JOB = Job(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=4), deadline=60.0)


def worker(worker_id, kind):
    layout = KVLayout("m", "float32", 1, 1, 8, 16)
    return WorkerInfo(WorkerRef(worker_id, 1), kind, "h:1", "m", layout, (), 64, 64)


class Session:
    def attach(self, handoff_id, wait_s, inbox):
        pass

    def cancel(self, request_id):
        pass


class Leg:
    def __init__(self, inbox):
        self.inbox, self.targets, self.cancelled = inbox, [], False

    def start(self, request, target):
        self.targets.append(target)

    def retarget(self, target):
        self.targets.append(target)

    def cancel(self):
        self.cancelled = True


class OpenPools:
    """Connections that carry nothing."""

    def __init__(self, clock):
        self.claims, self.suspected, self.breakers = {}, [], Breakers(BreakerConfig(failures_in_a_row=1), clock)

    def session(self, ref):
        return Session()

    find_session = session

    def prefill_leg(self, ref, inbox):
        self.leg = Leg(inbox)
        return self.leg

    def burden(self, ref, num_requests, num_tokens, num_kv_tokens=0):
        pass

    def suspect(self, ref):
        self.suspected.append(ref)

    def has_left(self, ref):
        return False


class World:
    """One hand-over from p0 to d0, then d1, d2 … as many as there are."""

    def __init__(self, num_decode=3):
        self.clock = VirtualClock()
        self.pools = OpenPools(self.clock)
        self.prompts = Prompts(PrefixIndex(self.clock), PolicyMetrics(CollectorRegistry()))
        self.prefill = worker("p0", WorkerKind.PREFILL)
        self.decodes = [worker(f"d{i}", WorkerKind.DECODE) for i in range(num_decode)]
        for info in (self.prefill, *self.decodes):
            self.pools.breakers.on_change(Change(ChangeKind.JOINED, info))
        ids = (f"id-{n}" for n in itertools.count())
        budget = RetryBudget(RetryBudgetConfig(), self.clock)
        means = Means(self.pools, self, self.clock, RETRY, lambda: next(ids), Halt(), self, budget)
        self.progress = Progress(JOB, self.clock, RETRY, budget=budget)
        self.attempt = HandOver(means, self.progress, self.prefill, self.decodes[0])
        self.got, self.verdicts = [], []

    def decode_for(self, prefill, progress):
        return next((d for d in self.decodes if d.ref not in progress.avoid), None)

    def failed(self, pair, error):
        self.verdicts.append(pair)

    def worked(self, pair):
        pass

    async def run(self):
        async for delta in self.attempt.deltas():
            self.got.append(self.progress.accept(delta))

    async def __aenter__(self):
        self.task = asyncio.ensure_future(self.run())
        await self.turn()
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait((self.task,))

    async def turn(self):
        await self.clock.advance(0.001)

    async def hears(self, *events):
        for event in events:
            self.pools.leg.inbox.put_nowait(event)
            await self.turn()

    @property
    def aims(self):
        return [t.decode.worker_id for t in self.pools.leg.targets]

    def handoff(self, number):
        return self.pools.leg.targets[number].handoff_id

    def state(self, worker_id):
        return self.pools.breakers.state(WorkerRef(worker_id, 1))


def first():
    return FirstTokens(TokenDelta("r", 0, (7,)))


def decode_says(handoff_id, error):
    return DecodeTokens(TokenDelta(handoff_id, 0, finish_reason=FinishReason.ERROR, error=error_info(error)))


def prefill_says(handoff_id, error):
    return HandoffFailed(handoff_id, error_info(error), 10.0)


async def test_a_late_word_on_an_old_hand_off_does_not_silence_the_wait_for_the_newer_ones_verdict():
    async with World() as world:
        await world.hears(first(), DecodeLost(world.handoff(0), WorkerLost("d0 is gone")))
        assert world.aims == ["d0", "d1"]
        await world.hears(
            decode_says(world.handoff(1), RequestCancelled("given up"))
        )  # why, the prefill worker will say
        await world.hears(prefill_says(world.handoff(0), WorkerLost("d0 is gone")))  # late
        await world.clock.advance(RETRY.handoff_verdict_s + 0.1)
        assert world.task.done(), "nobody waits for the verdict any more"
        with pytest.raises(RequestCancelled):
            world.task.result()


async def test_a_prefill_worker_that_acknowledges_in_time_is_not_given_up():
    async with World() as world:
        await world.hears(first(), DecodeLost(world.handoff(0), WorkerLost("d0 is gone")))
        await world.hears(prefill_says(world.handoff(0), WorkerLost("d0 is gone")))
        await world.clock.advance(2 * RETRY.handoff_verdict_s)
        assert not world.task.done()
        assert world.aims == ["d0", "d1"]


async def test_one_that_never_acknowledges_is():
    async with World() as world:
        await world.hears(first(), DecodeLost(world.handoff(0), WorkerLost("d0 is gone")))
        await world.clock.advance(RETRY.handoff_verdict_s + 0.1)
        with pytest.raises(Unavailable):
            world.task.result()
        assert world.prefill.ref in world.progress.avoid


@pytest.mark.parametrize("error", [WorkerLost("gone"), Draining("stops"), InternalError("broken"), Unavailable("no")])
async def test_a_hand_off_that_fails_where_no_other_worker_is_left_is_one_failure(error):
    async with World(num_decode=1) as world:
        event = (
            DecodeLost(world.handoff(0), error)
            if isinstance(error, WorkerLost)
            else decode_says(world.handoff(0), error)
        )
        await world.hears(first(), event)
        raised = world.task.exception()
        assert type(raised) is (type(error) if isinstance(error, WorkerLost | Draining) else Unavailable)
        world.progress.fail(raised)  # as the flow does
        expected = (0, 1) if isinstance(error, Draining) else (1, 0)
        assert (world.progress.num_failures, world.progress.num_moves) == expected
        assert world.progress.num_worker_deaths == isinstance(error, WorkerLost)


async def test_the_breakers_hear_of_lost_workers_and_their_faults_but_not_of_failed_hand_offs():
    async with World() as world:
        await world.hears(first(), prefill_says(world.handoff(0), Unavailable("bytes did not arrive")))
        assert world.aims == ["d0", "d1"]
        assert world.state("d0") is BreakerState.CLOSED, "that is the pair's"
        assert len(world.verdicts) == 1
        await world.hears(decode_says(world.handoff(1), InternalError("a fault")))
        assert world.state("d1") is BreakerState.OPEN
        await world.hears(DecodeLost(world.handoff(2), WorkerLost("gone")))
        assert world.state("d2") is BreakerState.OPEN


def test_the_stages_are_whole_and_a_commit_is_never_taken_back():
    for stage in Stage:
        committed = stage >= Stage.DECODING
        heard = {news for news in News if (stage, news) in TRANSITIONS}
        assert heard == {News.TOKENS, News.HANDED_OFF} | ({News.NO_BOOKS} if committed else {News.GIVEN_UP, News.AIMED})
        for news in heard:
            assert TRANSITIONS[stage, news] >= (stage if committed else Stage.SENDING)
            assert (TRANSITIONS[stage, news] >= Stage.DECODING) is (committed or news <= News.HANDED_OFF)


async def test_a_commit_that_comes_after_decode_gave_it_up_is_too_late():
    async with World() as world:
        said = RequestCancelled("told to give it up")
        await world.hears(first(), decode_says(world.handoff(0), said))
        assert not world.task.done(), "the prefill worker is about to say why"
        await world.hears(HandedOff(world.handoff(0), HandoffStats(), StageTimes()))
        assert isinstance(world.task.exception(), RequestCancelled)


async def test_what_is_said_of_a_hand_off_that_was_given_up_moves_nothing():
    async with World() as world:
        await world.hears(first(), DecodeLost(world.handoff(0), WorkerLost("d0 is gone")))
        await world.hears(
            decode_says(world.handoff(0), InternalError("late")), DecodeLost(world.handoff(0), WorkerLost("again"))
        )
        assert (world.aims, world.task.done()) == (["d0", "d1"], False)
        assert world.state("d1") is BreakerState.CLOSED
