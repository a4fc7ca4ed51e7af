"""The prefill side: what is sent when, and that nothing is under way once it has ended."""

import asyncio
from dataclasses import replace

import pytest

from contracts.clock import settle
from contracts.errors import (
    DeadlineExceeded,
    HandoffError,
    InternalError,
    LayoutMismatch,
    NoRoom,
    RequestCancelled,
    StaleEpoch,
    TransferFailed,
    Unavailable,
    UnknownHandoff,
    WorkerLost,
)
from contracts.kv_layout import KVLayout
from contracts.ticket import RenewResponse
from contracts.worker import WorkerRef
from kv_transfer.config import SenderConfig
from kv_transfer.handoff import SourceState, TargetState
from kv_transfer.links import MAX_LINKS, Links, Side
from kv_transfer.local import Delivery, WriteFault


class Peer:
    """A peer in front of a receiver, whose next answers a test may set: an error to raise, or a function to call."""

    def __init__(self, receiver):
        self._receiver = receiver
        self.heard = []
        self.next = {name: [] for name in ("connect", "reserve", "commit", "abort", "renew")}

    async def _answer(self, name, call, message):
        self.heard.append(name)
        planned = self.next[name].pop(0) if self.next[name] else None
        if isinstance(planned, Exception):
            raise planned
        return await (call if planned is None else planned)(message)

    async def connect(self, message):
        return await self._answer("connect", self._receiver.connect, message)

    async def reserve(self, message):
        return await self._answer("reserve", self._receiver.reserve, message)

    async def commit(self, message):
        return await self._answer("commit", self._receiver.commit, message)

    async def abort(self, message):
        return await self._answer("abort", self._receiver.abort, message)

    async def renew(self, message):
        return await self._answer("renew", self._receiver.renew, message)


class Heard:
    """Counts what a LinkListener hears."""

    def __init__(self):
        self.waits_s, self.num_untold = [], 0

    def granted(self, waited_s):
        self.waits_s.append(waited_s)

    def untold(self):
        self.num_untold += 1


@pytest.fixture
def peer(pair):
    return Peer(pair.receiver)


def landed(pair, block_ids):
    size = pair.layout.block_bytes
    return [
        pair.target_region.buffer[t * size : (t + 1) * size] == pair.source_region.buffer[s * size : (s + 1) * size]
        for s, t in zip(pair.source_blocks, block_ids, strict=True)
    ]


async def test_full_blocks_travel_while_later_chunks_compute(pair):
    sender = pair.sender()
    sender.advance(3, pair.source_blocks[:1])  # before the start: nothing full yet
    sender.start()
    await settle()
    assert sender.state is SourceState.SENDING
    blocks = next(iter(pair.pool._leased)).block_ids
    assert landed(pair, blocks) == [False] * 4
    for computed, want in ((3, 0), (4, 1), (9, 2), (9, 2), (8, 2), (14, 3)):
        sender.advance(computed, pair.source_blocks)
        await settle()
        assert landed(pair, blocks) == [True] * want + [False] * (4 - want)
    stats = await sender.finish(pair.result())
    assert landed(pair, blocks) == [True] * 4
    assert sender.state is SourceState.RELEASED
    assert not sender.failed
    assert (stats.connector, stats.kv_bytes, stats.num_blocks, stats.num_cached_blocks) == ("local", 4 * 32, 4, 0)
    assert list(pair.pool.adopted) == ["h"]


async def test_one_call_at_the_end_coalesces_neighbours(pair):
    sender = pair.sender()
    sender.start()
    stats = await sender.finish(pair.result())
    assert stats.num_writes == 2  # source blocks 5, 6, 7 and 2 onto 0, 1, 2, 3


async def test_cached_blocks_are_not_sent(pair):
    sender = pair.sender(hashes=(b"a", b"b", b"c"))
    sender.start()
    stats = await sender.finish(pair.result())
    assert (stats.num_blocks, stats.num_cached_blocks, stats.kv_bytes) == (3, 1, 3 * 32)
    assert not any(pair.target_region.buffer[8 * 32 :])  # the cached block


async def test_the_ticket_says_all(pair):
    sender = pair.sender()
    sender.start()
    await sender.finish(pair.result())
    (ticket,) = pair.told.adopted
    assert ticket.request.request_id == ticket.handoff_id == "h"
    assert ticket.request.output_token_ids == (42,)
    assert ticket.num_computed_tokens == pair.num_tokens
    assert ticket.num_cached_tokens == 4
    assert ticket.block_hashes == (b"x", b"y", b"z")
    assert (ticket.prefill, ticket.decode, ticket.layout) == (pair.p.ref, pair.d.ref, pair.layout)


async def test_times_are_measured(pair):
    pair.faults += [WriteFault(delay_s=1.0), WriteFault(delay_s=2.0)]
    sender = pair.sender()
    sender.start()
    sender.advance(4, pair.source_blocks)
    await pair.clock.advance(0.4)
    stats = await pair.turn(sender.finish(pair.result()))
    assert stats.transfer_s == pytest.approx(3.0)
    assert stats.exposed_s == pytest.approx(2.6)
    assert pair.told.adopted[0].stages.transfer_s == pytest.approx(2.6)
    assert stats.gb_per_s > 0


async def test_writes_are_bounded(pair):
    pair.send = SenderConfig(max_write_bytes=64)
    sender = pair.sender()
    sender.start()
    await sender.finish(pair.result())
    assert pair.source._num_writes == 2


async def test_no_room_is_asked_again_while_computing_goes_on(pair, peer):
    peer.next["reserve"] = [NoRoom("full", 0.5), NoRoom("full"), WorkerLost("lost"), DeadlineExceeded("slow")]
    pair.links.listener = heard = Heard()
    sender = pair.sender(peer=peer)
    sender.start()
    sender.advance(8, pair.source_blocks)
    finishing = asyncio.ensure_future(sender.finish(pair.result()))
    await pair.clock.advance(0.45)
    assert peer.heard == ["connect", "reserve"]
    assert sender.state is SourceState.COMPUTING
    await pair.turn(finishing)
    assert peer.heard[1:6] == ["reserve"] * 5
    assert heard.waits_s == [pytest.approx(0.5 + 0.02 + 0.04 + 0.08)]
    assert list(pair.pool.adopted) == ["h"]


@pytest.mark.parametrize("time_left_s", [None, 1.0])
async def test_no_room_for_too_long_fails_with_no_room(pair, peer, time_left_s):
    """Also where the request's own time is shorter: that room was missing is more than that time is up."""
    peer.next["reserve"] = [NoRoom("full")] * 1000
    sender = pair.sender(peer=peer, time_left_s=time_left_s)
    sender.start()
    with pytest.raises(NoRoom):
        await pair.turn(sender.finish(pair.result()))
    assert pair.clock.now() <= (time_left_s or pair.send.reserve_timeout_s)
    assert sender.failed
    await settle()
    assert peer.heard[-1] == "abort"


@pytest.mark.parametrize("error", [LayoutMismatch("dtype", 1, 2), StaleEpoch("d", 1, 2), HandoffError("draining")])
@pytest.mark.parametrize("call", ["connect", "reserve"])
async def test_answers_are_final_at_once(pair, peer, call, error):
    peer.next[call] = [error]
    sender = pair.sender(peer=peer)
    sender.start()
    await settle()
    assert sender.failed
    with pytest.raises(type(error)):
        await sender.finish(pair.result())
    assert peer.heard.count(call) == 1
    assert pair.clock.now() == 0


@pytest.mark.parametrize(
    ("answer", "untold"), [(None, 0), (Unavailable("gone"), 1), (StaleEpoch("d", 1, 2), 0), (TimeoutError(), 1)]
)
async def test_a_farewell_that_does_not_get_through_is_heard_of(pair, peer, answer, untold):
    """A decode worker that has another life by now holds nothing of this one."""
    pair.links.listener = heard = Heard()
    peer.next["abort"] = [answer]
    sender = pair.sender(peer=peer)
    sender.start()
    await settle()
    await sender.abort("bye")
    await settle()
    assert peer.heard[-1] == "abort"
    assert heard.num_untold == untold
    assert heard.waits_s == [0.0]


async def test_a_peer_that_never_answers(pair, peer):
    async def hang(message):
        await pair.clock.sleep(1000)

    peer.next["reserve"] = [hang] * 10
    sender = pair.sender(peer=peer)
    sender.start()
    with pytest.raises(TransferFailed, match="does not answer"):
        await pair.turn(sender.finish(pair.result()))
    assert not sender._links._farewells or await pair.turn(pair.links.close()) is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (WriteFault(delivery=Delivery.FAIL, landed_bytes=40), "connection lost"),
        (WriteFault(delivery=Delivery.DROP), "longer than 6 s"),
        (WriteFault(stall_s=9.0, landed_bytes=10), "longer than 6 s"),
    ],
)
async def test_a_transfer_that_fails_is_cleaned_up_on_both_sides(pair, fault, message):
    pair.faults.append(fault)
    sender = pair.sender()
    sender.start()
    with pytest.raises(TransferFailed, match=message):
        await pair.turn(sender.finish(pair.result()))
    assert sender.state is SourceState.RELEASED
    assert not pair.source._copies
    await settle()
    assert len(pair.pool.free) == 8
    assert not pair.receiver.counts()
    again = pair.sender("h2")  # re-target: another hand-off over the same blocks
    again.start()
    await pair.turn(again.finish(pair.result()))
    assert list(pair.pool.adopted) == ["h2"]


async def test_abort_waits_for_the_write_under_way(pair):
    pair.faults.append(WriteFault(stall_s=2.0, landed_bytes=10))
    sender = pair.sender()
    sender.start()
    sender.advance(8, pair.source_blocks)
    await settle()
    aborting = [asyncio.ensure_future(sender.abort("client left")) for _ in range(2)]
    finishing = asyncio.ensure_future(sender.finish(pair.result()))
    await pair.clock.advance(1.9)
    assert not any(task.done() for task in aborting)
    assert pair.receiver.counts() == {TargetState.RESERVED: 1}  # not told before the own write has ended
    await pair.clock.advance(0.2)
    assert all(task.done() for task in aborting)
    with pytest.raises(RequestCancelled, match="client left"):
        await finishing
    assert len(pair.pool.free) == 8
    assert pair.told.lost[0][1].message == "given up by p: client left"
    await sender.abort("again")


@pytest.mark.parametrize("moment_s", [0.0, 0.5, 1.5, 2.5])
async def test_a_caller_that_is_cancelled_leaves_nothing_behind(pair, peer, moment_s):
    pair.faults += [WriteFault(delay_s=1.0, stall_s=1.0)]

    async def slow_commit(ticket):
        await pair.clock.sleep(1.0)
        return await pair.receiver.commit(ticket)

    peer.next["commit"] = [slow_commit]
    sender = pair.sender(peer=peer)
    sender.start()
    finishing = asyncio.ensure_future(sender.finish(pair.result()))
    await pair.clock.advance(moment_s)
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pair.turn(finishing)
    assert sender.state is SourceState.RELEASED
    assert not pair.source._copies
    await pair.clock.advance(5.0)
    assert len(pair.pool.free) == 8
    assert not pair.receiver.counts()


async def test_abort_before_anything(pair, peer):
    sender = pair.sender(peer=peer)
    await sender.abort("never mind")
    assert sender.state is SourceState.RELEASED
    assert peer.heard == []
    with pytest.raises(InternalError, match="after its end"):
        sender.start()
    sender = pair.sender(peer=peer)
    sender.start()
    await sender.abort("at once")
    assert sender.state is SourceState.RELEASED
    assert sender.failed


async def test_a_lost_commit_answer_is_asked_for_again(pair, peer):
    async def lose_answer(ticket):
        await pair.receiver.commit(ticket)
        raise WorkerLost("the answer got lost")

    peer.next["commit"] = [WorkerLost("the request got lost"), lose_answer]
    sender = pair.sender(peer=peer)
    sender.start()
    await pair.turn(sender.finish(pair.result()))
    assert peer.heard.count("commit") == 3
    assert list(pair.pool.adopted) == ["h"]


async def test_a_commit_that_is_never_answered_fails_in_time(pair, peer):
    peer.next["commit"] = [WorkerLost("gone")] * 1000
    sender = pair.sender(peer=peer)
    sender.start()
    with pytest.raises(TransferFailed, match="does not answer: gone"):
        await pair.turn(sender.finish(pair.result()))
    assert pair.clock.now() <= pair.send.commit_timeout_s


async def test_the_lease_is_renewed_for_as_long_as_prefill_takes(pair):
    sender = pair.sender()
    sender.start()
    await pair.clock.advance(60.0)
    assert pair.receiver.counts() == {TargetState.RESERVED: 1}
    await sender.finish(pair.result())
    await pair.clock.advance(60.0)
    assert list(pair.pool.adopted) == ["h"]


async def test_a_lease_that_is_lost_ends_the_handoff(pair, peer):
    async def lost(request):
        return RenewResponse(request.prefill, request.decode, request.handoff_ids, 4.0)

    peer.next["renew"] = [lost]
    sender = pair.sender(peer=peer)
    sender.start()
    await pair.clock.advance(1.5)
    assert sender.failed
    with pytest.raises(UnknownHandoff, match="does not hold h any more"):
        await sender.finish(pair.result())


async def test_a_decode_worker_that_restarted_ends_the_handoff(pair, peer):
    peer.next["renew"] = [StaleEpoch("d", 8, 7)]
    sender = pair.sender(peer=peer)
    sender.start()
    await pair.clock.advance(1.5)
    with pytest.raises(StaleEpoch):
        await sender.finish(pair.result())


async def test_renewals_may_be_lost_for_as_long_as_the_lease_lasts(pair, peer):
    peer.next["renew"] = [WorkerLost("gone"), WorkerLost("gone"), WorkerLost("gone")]
    sender = pair.sender(peer=peer)
    sender.start()
    await pair.clock.advance(3.5)
    assert not sender.failed
    peer.next["renew"] = [WorkerLost("gone")] * 100
    await pair.clock.advance(10.0)
    with pytest.raises(TransferFailed, match="the lease at d ran out"):
        await sender.finish(pair.result())


async def test_one_renewal_carries_every_lease_of_a_pair(pair, peer):
    asked = []

    async def note(request):
        asked.append(request.handoff_ids)
        return await pair.receiver.renew(request)

    peer.next["renew"] = [note] * 10
    senders = [pair.sender(name, peer=peer) for name in ("h1", "h2")]
    for sender in senders:
        sender.start()
    await pair.clock.advance(2.5)
    assert asked == [("h1", "h2")] * 2
    await senders[0].finish(pair.result())
    await pair.clock.advance(1.0)
    assert asked[2:] == [("h2",)]
    await senders[1].abort("over")
    await pair.clock.advance(5.0)
    assert len(asked) == 3, "nothing is renewed that is over"
    assert not pair.links.heartbeats._ending


async def test_what_one_renewal_loses_is_lost_alone(pair, peer):
    async def lose_h1(request):
        await pair.receiver.renew(request)
        return RenewResponse(request.prefill, request.decode, ("h1",), 4.0)

    peer.next["renew"] = [lose_h1]
    senders = [pair.sender(name, peer=peer) for name in ("h1", "h2")]
    for sender in senders:
        sender.start()
    await pair.clock.advance(20.0)
    assert [sender.failed for sender in senders] == [True, False]
    await senders[1].finish(pair.result())
    assert list(pair.pool.adopted) == ["h2"]


@pytest.mark.parametrize("call", ["connect", "reserve", "commit", "abort", "renew"])
async def test_an_answer_of_another_life_ends_all_that_is_held_there_at_once(pair, peer, call):
    """The decode worker has started again, and one answer of the new life is the first that is heard of it."""

    async def other_life(message):
        answer = await getattr(pair.receiver, call)(message)
        return replace(answer, decode=WorkerRef("d", 8))

    waits = pair.sender("waits", peer=peer)
    waits.start()
    await settle()
    if call == "connect":
        pair.links.drop(await pair.links.get(peer, pair.d.ref))
    peer.next[call] = [other_life]
    sender = pair.sender(peer=peer)
    sender.start()
    if call == "abort":  # a farewell: whoever says it has nothing to lose any more
        await sender.abort("bye")
        await settle()
        assert not waits.failed
        await waits.abort("over")
        return
    if call == "renew":
        await pair.clock.advance(1.5)
    with pytest.raises(StaleEpoch, match="epoch of d: expected 7, got 8"):
        await sender.finish(pair.result())
    await settle()
    assert waits.failed
    assert not pair.links._links, "the link to the old life is forgotten"
    await pair.clock.advance(5.0)
    assert len(pair.pool.free) == (4 if call == "commit" else 8)


@pytest.mark.parametrize(("time_left_s", "after_s"), [(None, 600.0), (5.0, 5.0), (900.0, 600.0)])
async def test_a_handoff_that_its_owner_forgot_does_not_hold_room_for_ever(pair, time_left_s, after_s):
    sender = pair.sender(time_left_s=time_left_s)
    sender.start()
    await pair.clock.advance(after_s - 0.5)
    assert pair.receiver.counts() == {TargetState.RESERVED: 1}
    await pair.clock.advance(1.0)
    assert sender.failed
    assert len(pair.pool.free) == 8
    with pytest.raises(DeadlineExceeded, match=f"not ended within {after_s:g} s"):
        await sender.finish(pair.result())


async def test_a_heartbeat_that_breaks_loses_what_it_kept(pair, peer, caplog):
    peer.next["renew"] = [KeyError("bug")]
    sender = pair.sender(peer=peer)
    sender.start()
    await pair.clock.advance(1.5)
    with pytest.raises(InternalError, match="cannot be renewed: KeyError"):
        await sender.finish(pair.result())
    assert "bug" in caplog.text


async def test_closing_the_links_ends_their_heartbeats(pair, peer):
    async def hang(message):
        await pair.clock.sleep(1000)

    peer.next["renew"] = [hang]
    sender = pair.sender(peer=peer)
    sender.start()
    await pair.clock.advance(1.5)
    await pair.links.close()
    assert not pair.links.heartbeats._ending
    await sender.abort("over")


async def test_an_abort_that_comes_after_the_commit_is_told_so(pair):
    sender = pair.sender()
    sender.start()
    assert not sender.committed
    await sender.finish(pair.result())
    await sender.abort("too late")
    assert sender.committed
    assert not sender.failed


async def test_misuse_is_loud(pair):
    sender = pair.sender()
    with pytest.raises(InternalError, match="before it was started"):
        await sender.finish(pair.result())
    sender.start()
    with pytest.raises(InternalError, match="started twice"):
        sender.start()
    with pytest.raises(InternalError, match="were reserved"):
        await sender.finish(pair.result(num_tokens=9))
    await sender.abort("over")


async def test_a_fault_of_ours_is_not_disguised(pair, peer):
    peer.next["commit"] = [KeyError("bug")]
    sender = pair.sender(peer=peer)
    sender.start()
    with pytest.raises(KeyError):
        await sender.finish(pair.result())
    assert sender.state is SourceState.RELEASED


async def test_the_loop_going_down_is_cancellation(pair):
    sender = pair.sender()
    sender.start()
    await settle()
    sender._ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sender.finish(pair.result())
    assert sender.state is SourceState.RELEASED


# Links.


async def test_one_connect_serves_all_and_failures_are_not_remembered(pair, peer):
    peer.next["connect"] = [WorkerLost("gone")]
    with pytest.raises(WorkerLost):
        await pair.links.get(peer, pair.d.ref)
    await settle()
    first, second = await asyncio.gather(pair.links.get(peer, pair.d.ref), pair.links.get(peer, pair.d.ref))
    assert first is second is await pair.links.get(peer, pair.d.ref)
    assert first.kind == "local"
    assert peer.heard == ["connect", "connect"]
    pair.links.drop(first)
    pair.links.drop(first)
    assert await pair.links.get(peer, pair.d.ref) is not first
    pair.links.drop(first)  # an old one: the new one stays
    await pair.links.get(peer, pair.d.ref)
    assert peer.heard == ["connect"] * 3


async def test_links_to_lives_that_are_over_do_not_pile_up(pair, peer):
    async def answer(request):
        return replace(await pair.receiver.connect(replace(request, decode=pair.d.ref)), decode=request.decode)

    first = await pair.links.get(peer, pair.d.ref)
    for epoch in range(1000, 1000 + MAX_LINKS):  # nobody told us that the ones before have ended
        assert len(pair.links._links) <= MAX_LINKS
        peer.next["connect"] = [answer]
        await pair.links.get(peer, WorkerRef("d", epoch))
    assert len(pair.links._links) == MAX_LINKS
    assert await pair.links.get(peer, pair.d.ref) is not first, "the oldest costs a Connect"


async def test_another_life_than_the_one_meant(pair, peer):
    async def other(request):
        answer = await pair.receiver.connect(request)
        return replace(answer, decode=WorkerRef("d", 8))

    peer.next["connect"] = [other]
    with pytest.raises(StaleEpoch):
        await pair.links.get(peer, pair.d.ref)


async def test_unlike_layouts_meet_at_connect(pair):
    layout = KVLayout("m", "float32", num_layers=2, num_kv_heads=1, head_size=1, block_size=4)
    links = Links(Side(pair.p.ref, layout, (pair.source,), pair.clock))
    with pytest.raises(LayoutMismatch, match="num_layers"):
        await links.get(pair.receiver, pair.d.ref)


async def test_a_farewell_nobody_hears_is_covered_by_the_lease(pair, peer):
    sender = pair.sender(peer=peer)
    sender.start()
    await settle()
    peer.next["abort"] = [WorkerLost("gone")]
    await sender.abort("bye")
    await pair.links.close()
    assert len(pair.pool.free) == 4
    await pair.clock.advance(5.0)
    assert len(pair.pool.free) == 8
