"""The hand-off under random interleavings, faults and losses: both tables, and Sender × Receiver on a virtual clock.

What must hold whatever happens: blocks are released exactly once, never while a window on them can be written; nothing
leaks; every hand-off ends with exactly one outcome; adopted blocks have the right bytes and keep them.
"""

import asyncio
import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.clock import VirtualClock, settle
from contracts.errors import DiptychError, HandoffError, InternalError, WorkerLost
from contracts.kv_layout import KVLayout
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.ticket import AbortRequest
from contracts.worker import WorkerRef
from kv_transfer.config import ReceiverConfig, SenderConfig
from kv_transfer.handoff import (
    SOURCE_TABLE,
    TARGET_TABLE,
    SourceAction,
    SourceEvent,
    SourceState,
    TargetAction,
    TargetEvent,
    TargetState,
    step,
    unobserved,
)
from kv_transfer.links import Links, Side
from kv_transfer.local import Delivery, LocalConnector, LocalHub, WriteFault
from kv_transfer.memory_pool import MemoryPool
from kv_transfer.receiver import Receiver
from kv_transfer.region import SharedRegion
from kv_transfer.sender import HandoffFacts, PrefillResult, Sender

# The tables by themselves.


def walk(table, state, events):
    """The states and actions that a sequence of events leads through; impossible events are left out."""
    states, actions = [state], []
    for event in events:
        if (state, event) in table:
            state, did = step(table, state, event)
            states.append(state)
            actions.extend(did)
    return states, actions


@given(st.lists(st.sampled_from(TargetEvent), max_size=30))
def test_target_gives_its_lease_away_once_and_only_behind_closed_windows(events):
    states, actions = walk(TARGET_TABLE, TargetState.RESERVED, events)
    assert actions.count(TargetAction.CLOSE_WINDOWS) <= 1
    assert actions.count(TargetAction.ADOPT) + actions.count(TargetAction.RELEASE) <= 1
    for gives in (TargetAction.ADOPT, TargetAction.RELEASE):
        if gives in actions:
            assert actions.index(TargetAction.CLOSE_WINDOWS) < actions.index(gives)
    if TargetAction.RELEASE in actions:
        assert TargetState.DRAINING in states
    ends = (TargetState.ADOPTED, TargetState.RELEASED)
    first_end = next((i for i, s in enumerate(states) if s in ends), len(states))
    assert len(set(states[first_end:])) <= 1


@given(st.lists(st.sampled_from(SourceEvent), max_size=30))
def test_source_gives_its_blocks_back_once_and_never_with_a_write_under_way(events):
    states, actions = walk(SOURCE_TABLE, SourceState.COMPUTING, events)
    assert actions.count(SourceAction.GIVE_BACK) <= 1
    assert actions.count(SourceAction.TELL_PEER) <= 1
    assert (states[-1] is SourceState.RELEASED) == (SourceAction.GIVE_BACK in actions)
    for before, after in itertools.pairwise(states):
        if before is SourceState.SENDING and after is SourceState.RELEASED:
            assert SourceAction.TELL_PEER not in actions  # committed: the peer has acknowledged the last write
    if SourceAction.STOP in actions and SourceAction.GIVE_BACK in actions:
        assert actions.index(SourceAction.STOP) < actions.index(SourceAction.TELL_PEER)


@pytest.mark.parametrize(
    ("table", "states", "ends"),
    [
        (SOURCE_TABLE, SourceState, {SourceState.RELEASED}),
        (TARGET_TABLE, TargetState, {TargetState.ADOPTED, TargetState.RELEASED}),
    ],
)
def test_every_state_is_reached_and_leads_to_an_end(table, states, ends):
    start = next(iter(states))
    reached, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (of, _), (to, _) in table.items():
            if of is state and to not in reached:
                reached.add(to)
                todo.append(to)
    assert reached == set(states)
    for state in set(states) - ends:
        assert any(of is state and to is not state for (of, _), (to, _) in table.items())
    for (of, _), (to, actions) in table.items():
        if of in ends:
            assert to is of
            assert actions == ()


def test_an_impossible_pair_is_loud():
    with pytest.raises(InternalError, match="cannot happen"):
        step(SOURCE_TABLE, SourceState.COMPUTING, SourceEvent.COMMITTED)
    with pytest.raises(InternalError, match="cannot happen"):
        step(TARGET_TABLE, TargetState.RESERVED, TargetEvent.VERIFIED)


# Sender × Receiver.

LAYOUT = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, head_size=1, block_size=4)  # 32 bytes a block
BLOCK = LAYOUT.block_bytes
NUM_SENDERS = 5
SOURCE_BLOCKS = 4  # of each sender
POOL_BLOCKS = 9
KNOWN = {b"known": POOL_BLOCKS}  # one more block, of a prefix cache
REUSED = 0xEE  # what the source's memory is filled with as soon as it is its own again
SEND = SenderConfig(
    reserve_timeout_s=3, call_timeout_s=2, commit_timeout_s=5, write_timeout_s=3, renew_every_s=1, max_write_bytes=64
)
RECEIVE = ReceiverConfig(lease_s=4, sweep_every_s=0.5, quiesce_poll_s=0.1, max_remembered=64)

FATES = ["deliver"] * 6 + ["lose request", "lose answer", "duplicate", "late duplicate", "slow", "hang"]


class LossyPeer:
    """A network in front of a receiver: each call takes the next fate of a list."""

    def __init__(self, receiver, clock, fates, background):
        self._receiver = receiver
        self._clock = clock
        self._fates = fates
        self._background = background

    async def _carry(self, call, message):
        fate = self._fates.pop() if self._fates else "deliver"
        if fate == "lose request":
            raise WorkerLost("request lost")
        if fate == "hang":
            await self._clock.sleep(60)
        if fate == "slow":
            await self._clock.sleep(1.5)
        answer = await call(message)
        if fate == "lose answer":
            raise WorkerLost("answer lost")
        if fate == "duplicate":
            answer = await call(message)
        if fate == "late duplicate":
            self._background.append(asyncio.ensure_future(self._again(call, message)))
        return answer

    async def _again(self, call, message):
        await self._clock.sleep(4.5)
        try:
            await call(message)
        except DiptychError:
            return  # an answer to nobody

    async def connect(self, request):
        return await self._carry(self._receiver.connect, request)

    async def reserve(self, request):
        return await self._carry(self._receiver.reserve, request)

    async def commit(self, ticket):
        return await self._carry(self._receiver.commit, ticket)

    async def abort(self, request):
        return await self._carry(self._receiver.abort, request)

    async def renew(self, request):
        return await self._carry(self._receiver.renew, request)


class WatchfulPool(MemoryPool):
    """Looks, whenever blocks change hands, whether a write could still touch them."""

    def __init__(self, connector, memory):
        super().__init__(POOL_BLOCKS, LAYOUT.block_size, KNOWN)
        self._connector = connector
        self._memory = memory
        self.contents = {}

    def check(self, blocks):
        for block in blocks:
            for one in self._connector.writable():
                assert not one.offset <= block * BLOCK < one.offset + one.length, f"block {block} can be written"

    async def adopt(self, request, lease, num_computed_tokens, seals):
        first = lease.num_cached_tokens // LAYOUT.block_size
        self.check(lease.block_ids[first:])
        for index, block in list(enumerate(lease.block_ids))[first:]:
            want = pattern(request.prompt_token_ids[0], index)
            assert bytes(self._memory[block * BLOCK : (block + 1) * BLOCK]) == want, f"block {index} is wrong"
        self.contents[request.request_id] = self.bytes_of(lease)
        await asyncio.sleep(0)
        await super().adopt(request, lease, num_computed_tokens, seals)

    async def release(self, lease, spoiled=()):
        self.check(lease.block_ids[lease.num_cached_tokens // LAYOUT.block_size :])
        await asyncio.sleep(0)
        await super().release(lease, spoiled)

    async def reserve(self, handoff_id, num_tokens, block_hashes):
        await asyncio.sleep(0)
        return await super().reserve(handoff_id, num_tokens, block_hashes)

    def bytes_of(self, lease):
        return [bytes(self._memory[b * BLOCK : (b + 1) * BLOCK]) for b in lease.block_ids]


def pattern(who, index):
    return bytes([1 + who * 16 + index]) * BLOCK


@dataclass
class Outcomes:
    """What the receiver's events said."""

    adopted: list = field(default_factory=list)
    lost: list = field(default_factory=list)

    def on_adopted(self, ticket):
        self.adopted.append(ticket.handoff_id)

    def on_lost(self, handoff_id, cause):
        self.lost.append(handoff_id)


class World:
    """One decode worker, one prefill worker in as many lives as it needs, five hand-offs."""

    def __init__(self, fates, faults, observer=unobserved):
        self.clock = VirtualClock()
        self.observer = observer
        self.hub = LocalHub()
        self.faults = faults
        self.fates = fates
        self.background = []
        self.decode_region = SharedRegion((POOL_BLOCKS + 1) * BLOCK)
        self.target = LocalConnector(self.hub, self.clock)
        self.target.expose(self.decode_region)
        self.pool = WatchfulPool(self.target, self.decode_region.buffer)
        self.outcomes = Outcomes()
        self.fatal = []
        decode = Side(WorkerRef("d", 7), LAYOUT, (self.target,), self.clock, observer)
        self.receiver = Receiver(decode, self.pool, self.outcomes, RECEIVE, self.fatal.append)
        self.decode_ref = decode.ref
        self.epoch = 0
        self.lives = []
        self.new_life()
        self.senders = {}
        self.owners = {}
        self.left = set()  # whose client has left: no other target is begun
        self.scribbled = set()  # whose source blocks are used for something else
        self.endings = {}
        self.computed = {}
        self.names = {}  # the hand-off ids of each, in the order in which they were begun
        self.turning = {}  # another target has come, the hand-off before is being given up

    def fault(self, index):
        return self.faults.pop() if self.faults else WriteFault()

    def new_life(self):
        """The prefill worker starts again; what its old life still does goes on as a zombie's work."""
        self.epoch += 1
        region = SharedRegion(NUM_SENDERS * SOURCE_BLOCKS * BLOCK)
        connector = LocalConnector(self.hub, self.clock, self.fault)
        connector.expose(region)
        side = Side(WorkerRef("p", self.epoch), LAYOUT, (connector,), self.clock, self.observer)
        self.lives.append((connector, region, Links(side, SEND)))

    def blocks(self, who):
        return tuple(range(who * SOURCE_BLOCKS, (who + 1) * SOURCE_BLOCKS))

    def start(self, who):
        if who in self.senders:
            return
        _, region, links = self.lives[-1]
        for index, block in enumerate(self.blocks(who)):
            region.buffer[block * BLOCK : (block + 1) * BLOCK] = pattern(who, index)
        num_tokens = (SOURCE_BLOCKS - 1) * LAYOUT.block_size + 1 + who % LAYOUT.block_size
        hashes = (b"known", b"b", b"c") if who % 2 else (b"a", b"b", b"c")
        self.names[who] = [f"h{who}"]
        facts = HandoffFacts(f"h{who}", self.decode_ref, num_tokens, hashes)
        self.owners[who] = links.side.ref
        self.computed[who] = 0
        self.begin(who, facts, (links, region))

    def begin(self, who, facts, memory):
        links, _ = memory
        peer = LossyPeer(self.receiver, self.clock, self.fates, self.background)
        sender = Sender(facts, peer, links, SEND)
        self.senders[who] = (sender, facts, memory)
        sender.start()
        sender.advance(self.computed[who], self.blocks(who))

    def retarget(self, who):
        """The router aims at another target, whatever the hand-off does; a run on a prefill worker does it in this order."""
        if who in self.senders and who not in self.turning and who not in self.left:
            self.turning[who] = asyncio.ensure_future(self._retarget(who))

    async def _retarget(self, who):
        sender, facts, memory = self.senders[who]
        await sender.abort("another target")
        if not sender.committed and who not in self.left and who not in self.scribbled:
            name = f"h{who}.{len(self.names[who])}"
            self.names[who].append(name)
            self.begin(who, replace(facts, handoff_id=name), memory)
        del self.turning[who]

    def advance(self, who, num_tokens):
        if who in self.senders and who not in self.endings:
            sender, facts, _ = self.senders[who]
            self.computed[who] = min(facts.num_tokens, self.computed[who] + num_tokens)
            sender.advance(self.computed[who], self.blocks(who))

    def finish(self, who):
        if who in self.senders and who not in self.endings:
            self.endings[who] = asyncio.ensure_future(self._finish(who))

    def go(self, who):
        """Start and compute a first chunk."""
        self.start(who)
        self.advance(who, 9)

    def cancel(self, who):
        """Its caller is cancelled, perhaps before `finish` has begun; who owns a sender ends it in any case."""
        if who in self.endings:
            self.endings[who].cancel()
            self.abort(who)

    def abort(self, who):
        if who in self.senders:
            self.left.add(who)
            self.background.append(asyncio.ensure_future(self._abort(who)))

    def stray_abort(self, who):
        """An Abort that the sender knows nothing of: it may be writing at this moment."""
        if who in self.senders:
            self.background.append(asyncio.ensure_future(self._stray_abort(who, self.owners[who])))

    def stranger_abort(self, who):
        """An Abort of a worker to which the hand-off does not belong: it must change nothing."""
        if who in self.senders:
            self.background.append(asyncio.ensure_future(self._stray_abort(who, WorkerRef("q", 1))))

    async def _stray_abort(self, who, prefill):
        before = self.receiver.counts()
        try:
            await self.receiver.abort(AbortRequest(self.names[who][-1], prefill, self.decode_ref, "stray"))
        except HandoffError:  # another's, or of an older life
            assert self.receiver.counts() == before

    async def _finish(self, who):
        result = None
        try:
            while result is None:
                result = await self._finish_one(who)
        except asyncio.CancelledError as error:
            result = error
        self.scribble(who)
        return result

    async def _finish_one(self, who):
        """How the hand-off under way ends; None when it is given up for another target, which is under way then."""
        if who in self.turning:
            await asyncio.shield(self.turning[who])
        sender, facts, _ = self.senders[who]
        request = GenerationRequest("user", (who,) * facts.num_tokens, SamplingParams(), (9,))
        try:
            return await sender.finish(PrefillResult(request, self.blocks(who)))
        except DiptychError as error:
            if who in self.turning:
                await asyncio.shield(self.turning[who])
            return error if self.senders[who][0] is sender else None

    async def _abort(self, who):
        if who in self.turning:
            await asyncio.shield(self.turning[who])
        await self.senders[who][0].abort("test")
        self.scribble(who)

    def scribble(self, who):
        """The source blocks are the caller's again: it uses them for something else at once."""
        if who in self.turning:  # a client that left while the target changed: what is being given up still reads them
            return
        self.scribbled.add(who)
        sender, _, (_, region) = self.senders[who]
        assert sender.state is SourceState.RELEASED
        for block in self.blocks(who):
            region.buffer[block * BLOCK : (block + 1) * BLOCK] = bytes([REUSED]) * BLOCK

    def check(self):
        assert not self.fatal, self.fatal
        self.pool.check(self.pool.free)
        assert REUSED not in bytes(self.decode_region.buffer), "a write read blocks that were given back"
        for handoff_id, lease in self.pool.adopted.items():
            assert self.pool.bytes_of(lease) == self.pool.contents[handoff_id], "adopted blocks were written"

    async def end(self):
        for who in self.senders:
            self.finish(who)
        for _ in range(100):
            await self.clock.advance(2.0)
            self.check()
            if all(task.done() for task in (*self.endings.values(), *self.background)) and not self.receiver.counts():
                break
        assert all(ending.done() for ending in self.endings.values()), "a hand-off hangs"
        granted = self.outcomes.adopted + self.outcomes.lost
        assert len(set(granted)) == len(granted), "two outcomes"
        assert sorted(self.outcomes.adopted) == sorted(self.pool.adopted)
        for who, ending in self.endings.items():
            if not ending.cancelled() and not isinstance(ending.result(), BaseException):
                assert self.names[who][-1] in self.pool.adopted, "the sender says committed, the engine has nothing"
        assert not self.receiver.counts()
        assert self.pool.num_leased == 0
        assert not self.target.writable()
        for lease in list(self.pool.adopted):
            self.pool.finish(lease)
        assert len(self.pool.free) == POOL_BLOCKS, "blocks have leaked"

    async def close(self):
        closing = asyncio.ensure_future(self._close())
        for _ in range(100):
            await self.clock.advance(5.0)
        assert closing.done(), "the world cannot be closed: something is still under way"
        await closing

    async def _close(self):
        for task in self.background:
            await task
        await self.receiver.close()
        for connector, region, links in self.lives:
            await links.close()
            await connector.close()
            region.close()
        await self.target.close()
        self.decode_region.close()


WHO = st.integers(0, NUM_SENDERS - 1)
OPERATIONS = st.one_of(
    st.tuples(st.just("start"), WHO),
    st.tuples(st.just("start"), WHO),
    st.tuples(st.just("advance"), WHO, st.integers(1, 9)),
    st.tuples(st.just("advance"), WHO, st.integers(1, 9)),
    st.tuples(st.just("finish"), WHO),
    st.tuples(st.just("finish"), WHO),
    st.tuples(st.just("abort"), WHO),
    st.tuples(st.just("stray_abort"), WHO),
    st.tuples(st.just("stranger_abort"), WHO),
    st.tuples(st.just("retarget"), WHO),
    st.tuples(st.just("cancel"), WHO),
    st.tuples(st.just("new_life")),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0, 4.0])),
    st.tuples(st.just("go"), WHO),
    st.tuples(st.just("turns"), st.integers(1, 5)),
)
FAULTS = st.builds(
    WriteFault,
    delivery=st.sampled_from([*[Delivery.DELIVER] * 4, Delivery.FAIL, Delivery.DROP]),
    delay_s=st.sampled_from([0.0, 0.0, 0.0, 0.5, 5.0]),
    stall_s=st.sampled_from([0.0, 0.0, 1.0, 12.0]),
    landed_bytes=st.sampled_from([0, 5, BLOCK, 2 * BLOCK]),
)


async def play(operations, fates, faults, observer=unobserved):
    world = World(fates, faults, observer)
    world.receiver.start()
    for name, *arguments in operations:
        if name == "tick":
            await world.clock.advance(arguments[0])
        elif name == "turns":
            await settle(arguments[0])
        else:
            getattr(world, name)(*arguments)
        world.check()
    await world.end()
    await world.close()
    return world


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(OPERATIONS, max_size=40),
    st.lists(st.sampled_from(FATES), max_size=40),
    st.lists(FAULTS, max_size=20),
)
def test_nothing_leaks_lies_or_hangs(operations, fates, faults):
    asyncio.run(play(operations, list(fates), list(faults)))


def test_without_faults_every_handoff_is_adopted():
    operations = [("start", who) for who in range(2)] + [("advance", who, 9) for who in range(2)]
    world = asyncio.run(play([*operations, ("tick", 0.0)], [], []))
    assert sorted(world.outcomes.adopted) == ["h0", "h1"]
    assert not world.outcomes.lost
