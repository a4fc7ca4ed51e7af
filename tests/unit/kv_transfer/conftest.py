"""A pair of workers in one process, on a virtual clock: what most tests of the hand-off start from."""

import asyncio
from dataclasses import dataclass, field

import pytest

from contracts.clock import VirtualClock, settle
from contracts.kv_layout import KVLayout
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.ticket import ReserveRequest, Ticket
from contracts.worker import WorkerRef
from kv_transfer.config import Integrity, ReceiverConfig, SenderConfig
from kv_transfer.digests import InlineDigester
from kv_transfer.links import Links, Side
from kv_transfer.local import LocalConnector, LocalHub, WriteFault
from kv_transfer.memory_pool import MemoryPool
from kv_transfer.receiver import Receiver
from kv_transfer.region import SharedRegion
from kv_transfer.sender import HandoffFacts, PrefillResult, Sender

LAYOUT = KVLayout("m", "float32", num_layers=1, num_kv_heads=1, head_size=1, block_size=4)
BLOCK = LAYOUT.block_bytes
NUM_TOKENS = 14  # four blocks, the last in part
SOURCE_BLOCKS = (5, 6, 7, 2)
HASHES = (b"a", b"b", b"c")


@dataclass
class Told:
    """What the receiver's events and its on_fatal said."""

    adopted: list = field(default_factory=list)
    lost: list = field(default_factory=list)
    fatal: list = field(default_factory=list)

    def on_adopted(self, ticket):
        self.adopted.append(ticket)

    def on_lost(self, handoff_id, cause):
        self.lost.append((handoff_id, cause))


class CountingDigester(InlineDigester):
    """Counts the blocks that it reads."""

    num_read = 0

    async def digests(self, ranges):
        self.num_read += len(ranges)
        return await super().digests(ranges)


class Noting(Receiver):
    """A receiver that notes the keys of its grants, for tickets that a test writes itself."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.keys = {}

    async def reserve(self, request):
        grant = await super().reserve(request)
        self.keys[request.handoff_id] = grant.windows[0][1]
        return grant


class Pair:
    """Prefill worker p and decode worker d."""

    layout = LAYOUT
    hashes = HASHES
    num_tokens = NUM_TOKENS
    source_blocks = SOURCE_BLOCKS

    def __init__(self, send_integrity=Integrity.OFF, receive_integrity=None):
        self.clock = VirtualClock()
        self.hub = LocalHub()
        self.faults = []
        self.source_region = SharedRegion(8 * BLOCK)
        self.target_region = SharedRegion(9 * BLOCK)
        self.source_region.buffer[:] = bytes(range(256))
        self.source = LocalConnector(self.hub, self.clock, self._fault)
        self.target = LocalConnector(self.hub, self.clock)
        self.source.expose(self.source_region)
        self.target.expose(self.target_region)
        self.p = Side(
            WorkerRef("p", 3), LAYOUT, (self.source,), self.clock, digester=CountingDigester(self.source_region)
        )
        self.d = Side(
            WorkerRef("d", 7), LAYOUT, (self.target,), self.clock, digester=CountingDigester(self.target_region)
        )
        self.told = Told()
        self.pool = MemoryPool(8, LAYOUT.block_size, {b"a": 8})
        received = send_integrity if receive_integrity is None else receive_integrity
        self.receive = ReceiverConfig(
            lease_s=4, sweep_every_s=0.5, quiesce_poll_s=0.1, max_remembered=8, integrity=received
        )
        self.send = SenderConfig(
            reserve_timeout_s=3,
            call_timeout_s=2,
            commit_timeout_s=5,
            write_timeout_s=6,
            renew_every_s=1,
            integrity=send_integrity,
        )
        self.receiver = self.make_receiver(self.pool)
        self.links = Links(self.p, self.send)

    def make_receiver(self, pool):
        self.latest = Noting(self.d, pool, self.told, self.receive, self.told.fatal.append)
        return self.latest

    def _fault(self, index):
        return self.faults.pop(0) if self.faults else WriteFault()

    def sender(self, handoff_id="h", hashes=(b"x", b"y", b"z"), peer=None, time_left_s=None):
        facts = HandoffFacts(handoff_id, self.d.ref, NUM_TOKENS, hashes, time_left_s)
        return Sender(facts, peer or self.receiver, self.links, self.send)

    def result(self, num_tokens=NUM_TOKENS):
        request = GenerationRequest("user", tuple(range(num_tokens)), SamplingParams(), (42,))
        return PrefillResult(request, SOURCE_BLOCKS, num_cached_tokens=4)

    def reserve_request(self, handoff_id="h", hashes=(b"x", b"y", b"z"), prefill=None, decode=None):
        return ReserveRequest(handoff_id, prefill or self.p.ref, decode or self.d.ref, NUM_TOKENS, hashes)

    def ticket(self, **changes):
        facts = {
            "handoff_id": "h",
            "prefill": self.p.ref,
            "decode": self.d.ref,
            "layout": LAYOUT,
            "request": GenerationRequest("h", tuple(range(NUM_TOKENS)), SamplingParams(), (42,)),
            "num_computed_tokens": NUM_TOKENS,
            "num_cached_tokens": 0,
            "window_key": self.latest.keys.get(changes.get("handoff_id", "h"), 0),
            "block_hashes": (b"x", b"y", b"z"),
        }
        return Ticket(**(facts | changes))

    async def turn(self, work, limit_s=60.0):
        """The result of `work`, moving the clock on as long as it takes."""
        task = asyncio.ensure_future(work)
        end = self.clock.now() + limit_s
        await settle()
        while not task.done():
            assert self.clock.now() < end, "it hangs"
            await self.clock.advance(0.1)
        return await task

    async def close(self):
        await self.turn(self.links.close())
        await self.turn(self.receiver.close())
        await self.turn(self.source.close())
        await self.turn(self.target.close())
        self.source_region.close()
        self.target_region.close()


@pytest.fixture
async def pair():
    made = Pair()
    made.receiver.start()
    yield made
    await made.close()
