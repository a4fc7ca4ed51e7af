"""What every registry keeps: the newest life of each worker, while its word is fresh."""

import asyncio
import contextlib
import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from contracts.clock import VirtualClock, settle
from contracts.errors import LayoutMismatch, StaleEpoch, Unavailable, WorkerIdTaken
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef, WorkerState
from registry import keys
from registry.client import RedisRegistryClient
from registry.config import LeaseConfig, RedisConfig, parse_redis_url
from registry.link import RedisLink
from router.config import RegistryConfig
from router.workers.embedded_registry import EmbeddedRegistry
from router.workers.redis_registry import RedisRegistry
from router.workers.registry import ChangeKind
from rpc.announce import UNHEARD, Announcer
from tests.redis_process import RedisProcess, require_redis_server

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 16)
TTL_S, QUIET_S = 5.0, 3.0


def info(worker_id="a", epoch=1, kind=WorkerKind.DECODE, **changes):
    base = WorkerInfo(WorkerRef(worker_id, epoch), kind, f"{worker_id}:1", "m", LAYOUT, ("local",), 100, 10)
    return replace(base, **changes)


class AgeingClock(VirtualClock):
    """A virtual clock that takes the leases in a Redis along: they expire by its clock, which nobody can turn.

    It moves in small steps, between which what was asked of Redis is answered.
    """

    link: RedisLink

    async def advance(self, delta_s: float) -> None:
        target, steps = self.now() + delta_s, max(1, round(delta_s / 0.25))
        for step in range(steps):
            await self.age(delta_s / steps)
            await super().advance(target - self.now() if step == steps - 1 else delta_s / steps)
            for _ in range(4):
                await self.link.run("PING")

    async def age(self, delta_s: float) -> None:
        await self.link.run("EVAL", AGE, 0, round(delta_s * 1000))


AGE = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  if left >= 0 then redis.call('PEXPIRE', key, left - ARGV[1]) end
end
"""


@contextlib.asynccontextmanager
async def redis_registry(process, clock):
    patient = RedisConfig(parse_redis_url(process.url), connect_timeout_s=10.0, command_timeout_s=10.0)
    link = clock.link = RedisLink(patient, clock)
    registry = RedisRegistry(link, RegistryConfig(TTL_S, QUIET_S / TTL_S), "m", clock)
    link.start()
    registry.start()
    async with asyncio.timeout(10):
        while registry.problem:
            await asyncio.sleep(0.001)
    try:
        yield registry
    finally:
        await registry.close()
        await link.close()


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory):
    require_redis_server()
    process = RedisProcess(tmp_path_factory.mktemp("redis"))
    process.start()
    yield process
    process.kill()


@pytest.fixture(params=["embedded", "redis"])
async def kept(request):
    changes = []
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "embedded":
            clock = VirtualClock()
            registry = EmbeddedRegistry(RegistryConfig(TTL_S, QUIET_S / TTL_S), "m", clock)
        else:
            process = request.getfixturevalue("shared_redis")
            process.command("FLUSHALL")
            clock = AgeingClock()
            registry = await stack.enter_async_context(redis_registry(process, clock))
        registry.subscribe(lambda change: changes.append((change.kind, change.info.ref)))
        yield registry, clock, changes


async def test_an_announcement_is_believed_for_its_ttl(kept):
    registry, clock, changes = kept
    assert await registry.announce(info(), WorkerLoad()) == TTL_S
    await clock.advance(TTL_S)
    assert [w.info.ref for w in registry.workers(WorkerKind.DECODE)] == [WorkerRef("a", 1)]
    assert registry.ready(WorkerKind.PREFILL) == ()
    await clock.advance(0.1)
    assert registry.workers() == (), "stale even before anybody sweeps"
    registry.expire()
    assert changes == [(ChangeKind.JOINED, WorkerRef("a", 1)), (ChangeKind.LOST, WorkerRef("a", 1))]


async def test_who_is_quiet_is_not_offered_until_heard_again(kept):
    registry, clock, changes = kept
    await registry.announce(info(), WorkerLoad())
    await clock.advance(QUIET_S)
    assert len(registry.ready(WorkerKind.DECODE)) == 1
    await clock.advance(0.1)
    assert registry.ready(WorkerKind.DECODE) == ()
    await registry.announce(info(), WorkerLoad())
    assert len(registry.ready(WorkerKind.DECODE)) == 1
    assert changes == [(ChangeKind.JOINED, WorkerRef("a", 1))], "it was never lost"


async def test_how_long_a_pool_has_been_empty(kept):
    registry, clock, _ = kept
    assert registry.absent_s(WorkerKind.DECODE) == math.inf
    for worker_id in "ab":
        await registry.announce(info(worker_id), WorkerLoad(state=WorkerState.STARTING))
    await registry.leave(WorkerRef("a", 1))
    assert registry.absent_s(WorkerKind.DECODE) == 0
    assert registry.absent_s(WorkerKind.PREFILL) == math.inf
    await clock.advance(TTL_S + 1)
    assert registry.absent_s(WorkerKind.DECODE) == TTL_S + 1, "b is silent, but nobody has swept"
    registry.expire()
    await clock.advance(2)
    assert registry.absent_s(WorkerKind.DECODE) == 2
    await registry.announce(info("a", 2), WorkerLoad())
    assert registry.absent_s(WorkerKind.DECODE) == 0


async def test_a_newer_life_replaces_the_older_which_is_refused_from_then_on(kept):
    registry, _, changes = kept
    await registry.announce(info(epoch=1), WorkerLoad())
    await registry.announce(info(epoch=2), WorkerLoad())
    with pytest.raises(StaleEpoch):
        await registry.announce(info(epoch=1), WorkerLoad())
    assert [w.info.ref.epoch for w in registry.workers()] == [2]
    assert [kind for kind, _ in changes] == [ChangeKind.JOINED, ChangeKind.LOST, ChangeKind.JOINED]


async def test_a_living_namesake_elsewhere_is_refused_and_told_what_to_do(kept):
    registry, clock, changes = kept
    await registry.announce(info(epoch=1), WorkerLoad())
    for epoch in (2, 1, 0):
        with pytest.raises(WorkerIdTaken, match=r"'a'.* a:1 has it .* b:1 wants it; give each worker a --worker-id"):
            await registry.announce(info(epoch=epoch, address="b:1"), WorkerLoad())
    await clock.advance(TTL_S - 1)
    await registry.announce(info(epoch=1), WorkerLoad())
    assert [w.info.address for w in registry.workers()] == ["a:1"]
    assert changes == [(ChangeKind.JOINED, WorkerRef("a", 1))], "the first goes on undisturbed"


async def test_a_restart_elsewhere_joins_when_the_old_life_has_been_silent_for_its_ttl(kept):
    registry, clock, changes = kept
    await registry.announce(info(epoch=1), WorkerLoad())
    await clock.advance(TTL_S - 1)
    with pytest.raises(WorkerIdTaken):
        await registry.announce(info(epoch=2, address="b:1"), WorkerLoad())
    await clock.advance(1.1)
    await registry.announce(info(epoch=2, address="b:1"), WorkerLoad())
    assert [kind for kind, _ in changes] == [ChangeKind.JOINED, ChangeKind.LOST, ChangeKind.JOINED]
    with pytest.raises(WorkerIdTaken, match="b:1 has it"):
        await registry.announce(info(epoch=1), WorkerLoad())


class Here:
    """The registry as a worker's client, without a network."""

    def __init__(self, registry) -> None:
        self._registry = registry

    async def announce(self, told, load) -> float:
        return await self._registry.announce(told, load)

    async def leave(self, ref) -> int:
        return await self._registry.leave(ref)

    async def close(self) -> None:
        """Nothing to close."""


async def test_a_worker_whose_name_is_taken_goes_on_trying_says_so_once_and_is_in_soon_after_it_is_free(kept, caplog):
    registry, clock, _ = kept
    caplog.set_level("WARNING")
    first = asyncio.create_task(Announcer(Here(registry), info(), WorkerLoad, clock).run())
    await settle()
    second = asyncio.create_task(Announcer(Here(registry), info(epoch=2, address="b:1"), WorkerLoad, clock).run())
    await clock.advance(20.0)
    assert [w.info.address for w in registry.workers()] == ["a:1"]
    first.cancel()  # dies without a word
    await clock.advance(TTL_S + 1.1)
    assert [w.info.address for w in registry.workers()] == ["b:1"]
    second.cancel()
    assert [record.getMessage() for record in caplog.records] == [UNHEARD]


async def test_a_restart_elsewhere_joins_at_once_when_the_connection_to_the_old_life_broke_or_it_left(kept):
    registry, _, changes = kept
    await registry.announce(info(epoch=1), WorkerLoad())
    registry.suspect(WorkerRef("a", 1))
    with pytest.raises(StaleEpoch):
        await registry.announce(info(epoch=0, address="b:1"), WorkerLoad())
    await registry.announce(info(epoch=2, address="b:1"), WorkerLoad())
    await registry.leave(WorkerRef("a", 2))
    await registry.announce(info(epoch=3, address="c:1"), WorkerLoad())
    assert [w.info.address for w in registry.workers()] == ["c:1"]
    kinds = [ChangeKind.JOINED, ChangeKind.LOST, ChangeKind.JOINED, ChangeKind.LEFT, ChangeKind.JOINED]
    assert [kind for kind, _ in changes] == kinds


async def test_who_left_is_not_brought_back_by_a_late_word(kept):
    registry, _clock, changes = kept
    await registry.announce(info(), WorkerLoad())
    await registry.leave(WorkerRef("a", 0))
    assert registry.workers(), "the farewell of an older life is nothing"
    await registry.leave(WorkerRef("a", 1))
    await registry.leave(WorkerRef("a", 1))
    assert registry.workers() == ()
    with pytest.raises(StaleEpoch):
        await registry.announce(info(), WorkerLoad())
    await registry.announce(info(epoch=2), WorkerLoad())
    assert [kind for kind, _ in changes] == [ChangeKind.JOINED, ChangeKind.LEFT, ChangeKind.JOINED]


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.DRAINING])
async def test_only_ready_workers_are_offered(kept, state):
    registry, _, _ = kept
    await registry.announce(info(), WorkerLoad(state=state))
    assert registry.ready(WorkerKind.DECODE) == ()
    assert len(registry.workers(WorkerKind.DECODE)) == 1


async def test_a_suspect_is_not_offered_until_it_speaks(kept):
    registry, _, _ = kept
    await registry.announce(info(), WorkerLoad())
    registry.suspect(WorkerRef("a", 0))
    assert registry.ready(WorkerKind.DECODE), "another life was meant"
    registry.suspect(WorkerRef("a", 1))
    assert registry.ready(WorkerKind.DECODE) == ()
    await registry.announce(info(), WorkerLoad())
    assert len(registry.ready(WorkerKind.DECODE)) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [({"model_name": "other"}, "model_name"), ({"layout": replace(LAYOUT, block_size=32)}, "block_size")],
)
async def test_a_worker_that_does_not_fit_is_refused_by_field(kept, change, field):
    registry, _, _changes = kept
    await registry.announce(info(), WorkerLoad())
    with pytest.raises(LayoutMismatch) as caught:
        await registry.announce(info("b", **change), WorkerLoad())
    assert caught.value.field == field
    assert len(registry.workers()) == 1


async def test_the_last_of_an_old_layout_makes_way_for_a_new_one(kept):
    registry, _, _ = kept
    await registry.announce(info(), WorkerLoad())
    await registry.leave(WorkerRef("a", 1))
    await registry.announce(info("b", layout=replace(LAYOUT, model="m2")), WorkerLoad())
    assert [w.info.layout.model for w in registry.workers()] == ["m2"]


async def test_a_lease_says_itself_for_how_long_it_is_believed(redis_process):
    clock = AgeingClock()
    async with redis_registry(redis_process, clock) as registry:
        for worker_id, ttl_s in (("short", 2.0), ("long", 4 * TTL_S)):
            client = RedisRegistryClient(clock.link, LeaseConfig(ttl_s))
            await client.announce(info(worker_id), WorkerLoad())
        await clock.advance(1.2)  # a look
        assert len(registry.workers()) == 2
        await clock.advance(1.2)
        assert {w.info.ref.worker_id for w in registry.workers()} == {"long"}
        await clock.advance(1.8 * TTL_S)
        registry.expire()
        assert len(registry.ready(WorkerKind.DECODE)) == 1
        await clock.advance(1.8 * TTL_S)
        registry.expire()
        assert registry.workers() == ()


async def test_thirty_seconds_without_redis_lose_nobody_let_newcomers_in_and_end_by_themselves(redis_process):
    """The outage of tests/integration/test_redis_outage.py in virtual time: what the table makes of it, and Redis afterwards."""
    clock = AgeingClock()
    async with redis_registry(redis_process, clock) as registry:
        changes = []
        registry.subscribe(lambda change: changes.append((change.kind, change.info.ref.worker_id)))

        async def until_there(there):
            async with asyncio.timeout(10):
                while bool(registry.problem) is there:
                    await VirtualClock.advance(clock, 0.1)
                    await asyncio.sleep(0.005)

        async def seconds(number):
            for _ in range(number):
                await VirtualClock.advance(clock, 1.0)
                registry.expire()

        def ready():
            return {w.info.ref.worker_id for kind in WorkerKind for w in registry.ready(kind)}

        await registry.announce(info("p", kind=WorkerKind.PREFILL), WorkerLoad())
        for worker_id in "abc":
            await registry.announce(info(worker_id), WorkerLoad())
        redis_process.kill()
        await until_there(False)
        await seconds(5)
        await registry.announce(info("new"), WorkerLoad())
        await seconds(5)
        registry.suspect(info("a").ref)  # its connection breaks, and stands again
        assert ready() == {"p", "b", "c", "new"}
        await seconds(2)
        registry.acquit(info("a").ref)
        await seconds(3)
        with contextlib.suppress(Unavailable):
            await registry.leave(info("b").ref)
        await seconds(5)
        registry.suspect(info("c").ref)  # its does not
        await seconds(10)
        assert ready() == {"p", "a", "new"}
        assert registry.problem
        redis_process.start()
        await until_there(True)
        for _ in range(3):
            for worker_id in ("a", "new"):  # who lives speaks
                await registry.announce(info(worker_id), WorkerLoad())
            await clock.advance(TTL_S / 2)
            registry.expire()
        assert ready() == {"a", "new"}, "p and c say nothing any more"
        left = (ChangeKind.LEFT, "b"), (ChangeKind.LOST, "p"), (ChangeKind.LOST, "c")
        assert [c for c in changes if c[0] is not ChangeKind.JOINED] == list(left)
        assert redis_process.command("EXISTS", keys.worker("new"), keys.worker("a")) == 2


class Believing(RuleBasedStateMachine):
    """Against a model that keeps everything it was told."""

    def __init__(self):
        super().__init__()
        self.clock, self.registry = self.open()
        self.live = {}
        self.registry.subscribe(self.on_change)
        self.told = {}  # worker → (epoch, when)
        self.left = {}  # worker → when its last life left
        self.at = {}  # worker → where its last accepted word came from
        self.suspects = set()

    def open(self):
        clock = VirtualClock()
        return clock, EmbeddedRegistry(RegistryConfig(TTL_S), "m", clock)

    def on_change(self, change):
        ref = change.info.ref
        if change.kind is ChangeKind.JOINED:
            assert ref.worker_id not in self.live, "two lives at once"
            self.live[ref.worker_id] = ref.epoch
        else:
            assert self.live.pop(ref.worker_id) == ref.epoch

    def run(self, coroutine):
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("an embedded registry does not wait")

    @rule(worker=st.sampled_from("ab"), epoch=st.integers(1, 3), place=st.sampled_from("xy"))
    def announce(self, worker, epoch, place):
        known, _ = self.told.get(worker, (0, 0.0))
        stale = (epoch < known and self.fresh(worker)) or (self.remembered(worker) and epoch <= known)
        taken = self.fresh(worker) and self.at[worker] != place and worker not in self.suspects
        try:
            self.run(self.registry.announce(info(worker, epoch, address=f"{place}:1"), WorkerLoad()))
        except WorkerIdTaken:
            assert taken
        except StaleEpoch:
            assert stale
            assert not taken
        else:
            assert not stale
            assert not taken
            self.told[worker] = (epoch, self.clock.now())
            self.left.pop(worker, None)
            self.at[worker] = place
            self.suspects.discard(worker)

    @rule(worker=st.sampled_from("ab"))
    def suspect(self, worker):
        if self.fresh(worker):
            self.run(self.tell_suspicion(WorkerRef(worker, self.told[worker][0])))
            self.suspects.add(worker)

    async def tell_suspicion(self, ref):
        self.registry.suspect(ref)

    @rule(worker=st.sampled_from("ab"), epoch=st.integers(1, 3))
    def leave(self, worker, epoch):
        self.run(self.registry.leave(WorkerRef(worker, epoch)))
        if self.fresh(worker) and self.told[worker][0] == epoch:
            self.left[worker] = self.clock.now()

    @rule(seconds=st.sampled_from([1.3, 3.1, 6.0]))
    def time_passes(self, seconds):
        self.move(seconds)
        self.registry.expire()

    def move(self, seconds):
        self.clock._now += seconds

    def fresh(self, worker):
        _, when = self.told.get(worker, (0, -1e9))
        return worker not in self.left and self.clock.now() - when <= TTL_S

    def remembered(self, worker):
        return worker in self.left and self.clock.now() - self.left[worker] <= 2 * TTL_S

    @invariant()
    def exactly_the_fresh_are_there(self):
        there = {w.info.ref.worker_id: w.info.ref.epoch for w in self.registry.workers()}
        assert there == {w: told[0] for w, told in self.told.items() if self.fresh(w)}
        assert there == self.live


def test_believing_embedded():
    steps = settings(max_examples=100, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(Believing, settings=steps)


def test_believing_redis(shared_redis):
    class BelievingRedis(Believing):
        def open(self):
            shared_redis.command("FLUSHALL")
            clock = AgeingClock()
            self.runner = asyncio.Runner()
            self.opened = redis_registry(shared_redis, clock)
            return clock, self.runner.run(self.opened.__aenter__())

        def run(self, coroutine):
            return self.runner.run(coroutine)

        def move(self, seconds):
            self.run(self.clock.advance(seconds))

        def teardown(self):
            self.runner.run(self.opened.__aexit__(None, None, None))
            self.runner.close()

    steps = settings(max_examples=25, stateful_step_count=15, deadline=None)
    run_state_machine_as_test(BelievingRedis, settings=steps)
