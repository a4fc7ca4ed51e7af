"""The decode side, message by message: every edge of its table, and what must never happen on it."""

import asyncio
from dataclasses import fields, replace

import pytest

from contracts.clock import settle
from contracts.errors import (
    Draining,
    HandoffError,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    NoRoom,
    RequestCancelled,
    StaleEpoch,
    UnknownHandoff,
)
from contracts.kv_layout import KVLayout
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.ticket import AbortRequest, CommitResponse, ConnectRequest, RenewRequest
from contracts.worker import WorkerRef
from kv_transfer.connector import ByteRange, Write
from kv_transfer.handoff import TargetState
from kv_transfer.links import Links, Side
from kv_transfer.local import LocalConnector, WriteFault
from kv_transfer.memory_pool import MemoryPool
from kv_transfer.receiver import Receiver

NEXT_LIFE = WorkerRef("p", 4)


def abort_of(pair, handoff_id="h", prefill=None):
    return AbortRequest(handoff_id, prefill or pair.p.ref, pair.d.ref, "test")


def renewal(pair, *handoff_ids):
    return RenewRequest(pair.p.ref, pair.d.ref, handoff_ids)


async def stalled_write(pair, grant, stall_s):
    """A write that is inside the window for `stall_s`, with its first block landed."""
    pair.faults.append(WriteFault(stall_s=stall_s, landed_bytes=pair.layout.block_bytes))
    address, key = grant.windows[0]
    size = pair.layout.block_bytes
    writes = [Write(0, block * size, size) for block in grant.block_ids[grant.num_cached_tokens // 4 :]]
    writing = asyncio.ensure_future(pair.source.write(address, key, writes))
    await settle()
    return writing


async def test_connect_agrees_or_names_the_field(pair):
    answer = await pair.receiver.connect(ConnectRequest(pair.p.ref, pair.d.ref, pair.layout))
    assert answer.decode == pair.d.ref
    assert answer.connectors == (pair.target.address(),)
    other = KVLayout("m", "bfloat16", num_layers=1, num_kv_heads=1, head_size=1, block_size=4)
    with pytest.raises(LayoutMismatch, match="dtype"):
        await pair.receiver.connect(ConnectRequest(pair.p.ref, pair.d.ref, other))
    with pytest.raises(StaleEpoch):
        await pair.receiver.connect(ConnectRequest(pair.p.ref, WorkerRef("d", 6), pair.layout))


UNLIKE = {
    "model": "other",
    "dtype": "bfloat16",
    "block_size": 8,
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_size": 2,
    "tp_size": 2,
    "hash_seed": 1,
    "transfer_dtype": "int8",
    "protocol_version": 2,
}


def test_every_field_of_a_layout_has_an_unlike_value_here():
    assert {field.name for field in fields(KVLayout)} == set(UNLIKE)


@pytest.mark.parametrize("field", UNLIKE)
async def test_unlike_peers_are_refused_when_they_connect_and_when_they_commit(pair, field):
    other = replace(pair.layout, **{field: UNLIKE[field]})
    with pytest.raises(LayoutMismatch, match=f"differs in {field}: ours .*, theirs {UNLIKE[field]!r}"):
        await pair.receiver.connect(ConnectRequest(pair.p.ref, pair.d.ref, other))
    links = Links(Side(pair.p.ref, other, (pair.source,), pair.clock))
    with pytest.raises(LayoutMismatch, match=f"differs in {field}"):
        await links.get(pair.receiver, pair.d.ref)
    await pair.receiver.reserve(pair.reserve_request())
    with pytest.raises(LayoutMismatch, match=f"differs in {field}"):
        await pair.receiver.commit(pair.ticket(layout=other))


async def test_a_grant_opens_exactly_the_blocks_that_are_not_cached(pair):
    grant = await pair.receiver.reserve(pair.reserve_request(hashes=(b"a", b"b", b"c")))
    assert grant.num_cached_tokens == 4
    assert grant.block_ids[0] == 8  # the known block
    size = pair.layout.block_bytes
    written = sorted(r.offset + at for r in pair.target.writable() for at in range(0, r.length, size))
    assert written == sorted(block * size for block in grant.block_ids[1:])
    assert pair.receiver.counts() == {TargetState.RESERVED: 1}


async def test_reserve_is_idempotent_also_while_the_engine_is_asked(pair):
    first, second = await asyncio.gather(*(pair.receiver.reserve(pair.reserve_request()) for _ in range(2)))
    assert first == second == await pair.receiver.reserve(pair.reserve_request())
    assert pair.pool.num_leased == 1
    with pytest.raises(HandoffError, match="other facts"):
        await pair.receiver.reserve(pair.reserve_request(hashes=(b"a", b"b", b"c")))


async def test_no_room_says_when_to_ask_again(pair):
    await pair.receiver.reserve(pair.reserve_request("h1"))
    await pair.receiver.reserve(pair.reserve_request("h2"))
    with pytest.raises(NoRoom) as caught:
        await pair.receiver.reserve(pair.reserve_request("h3"))
    assert caught.value.retry_after_s == pair.receive.retry_after_s
    await pair.receiver.abort(abort_of(pair, "h1"))
    await settle()
    await pair.receiver.reserve(pair.reserve_request("h3"))


async def test_messages_for_another_life_are_refused_everywhere(pair):
    await pair.receiver.reserve(pair.reserve_request())
    old_d, old_p = WorkerRef("d", 6), WorkerRef("p", 2)
    for prefill, decode in ((pair.p.ref, old_d), (old_p, pair.d.ref), (pair.p.ref, WorkerRef("d", 8))):
        calls = (
            pair.receiver.reserve(pair.reserve_request("n", prefill=prefill, decode=decode)),
            pair.receiver.commit(pair.ticket(prefill=prefill, decode=decode)),
            pair.receiver.abort(AbortRequest("h", prefill, decode, "late")),
            pair.receiver.renew(RenewRequest(prefill, decode, ("h",))),
        )
        for call in calls:
            with pytest.raises(StaleEpoch):
                await call
    assert pair.receiver.counts() == {TargetState.RESERVED: 1}


STRANGER = WorkerRef("q", 9)
NOT_ITS_OWN = "hand-off h belongs to p, epoch 3; q, epoch 9, has no say in it"


async def refused_to_a_stranger(pair, receiver):
    calls = (
        receiver.reserve(pair.reserve_request(prefill=STRANGER)),
        receiver.commit(pair.ticket(prefill=STRANGER)),
        receiver.abort(abort_of(pair, prefill=STRANGER)),
    )
    for call in calls:
        with pytest.raises(HandoffError, match=NOT_ITS_OWN):
            await call
    assert (await receiver.renew(RenewRequest(STRANGER, pair.d.ref, ("h",)))).lost_handoff_ids == ("h",)


async def test_a_handoff_belongs_to_the_life_that_reserved_it(pair):
    await pair.receiver.reserve(pair.reserve_request())
    for _ in range(3):
        await pair.clock.advance(1.0)
        await refused_to_a_stranger(pair, pair.receiver)
    assert pair.receiver.counts() == {TargetState.RESERVED: 1}
    await pair.clock.advance(1.0)  # what a stranger renews is not renewed
    assert [h for h, _ in pair.told.lost] == ["h"]
    await refused_to_a_stranger(pair, pair.receiver)
    await pair.receiver.reserve(pair.reserve_request("i"))
    committed = await pair.receiver.commit(pair.ticket(handoff_id="i", request=request_of("i")))
    assert committed.prefill == pair.p.ref
    with pytest.raises(HandoffError, match="belongs to p, epoch 3"):
        await pair.receiver.commit(pair.ticket(handoff_id="i", prefill=STRANGER))


def request_of(request_id):
    return GenerationRequest(request_id, tuple(range(14)), SamplingParams(), (42,))


async def test_a_handoff_belongs_to_whoever_reserves_it_while_the_engine_is_asked(pair):
    receiver = pair.make_receiver(SlowPool(pair.clock))
    asking = asyncio.ensure_future(receiver.reserve(pair.reserve_request()))
    await settle()
    with pytest.raises(HandoffError, match=NOT_ITS_OWN):
        await receiver.reserve(pair.reserve_request(prefill=STRANGER))
    with pytest.raises(HandoffError, match="other facts"):
        await receiver.reserve(pair.reserve_request(hashes=(b"a", b"b", b"c")))
    assert (await receiver.renew(RenewRequest(STRANGER, pair.d.ref, ("h",)))).lost_handoff_ids == ("h",)
    await receiver.abort(abort_of(pair, prefill=STRANGER))  # not known yet: means nothing to the one who asks
    assert (await pair.turn(asking)).prefill == pair.p.ref


async def test_a_stranger_s_abort_that_comes_first_does_not_block_the_id(pair):
    await pair.receiver.abort(abort_of(pair, prefill=STRANGER))
    assert (await pair.receiver.reserve(pair.reserve_request())).handoff_id == "h"
    assert pair.receiver.counts() == {TargetState.RESERVED: 1}


async def test_commit_adopts_once_and_repeats_its_answer(pair):
    await pair.receiver.reserve(pair.reserve_request())
    answers = await asyncio.gather(*(pair.receiver.commit(pair.ticket()) for _ in range(3)))
    assert [*answers, await pair.receiver.commit(pair.ticket())] == [CommitResponse("h", pair.p.ref, pair.d.ref, 4)] * 4
    assert [t.handoff_id for t in pair.told.adopted] == ["h"]
    assert list(pair.pool.adopted) == ["h"]
    assert not pair.target.writable()
    assert not pair.receiver.counts()
    await pair.receiver.abort(abort_of(pair))  # late: harmless
    assert (await pair.receiver.renew(renewal(pair, "h"))).lost_handoff_ids == ()
    with pytest.raises(UnknownHandoff):
        await pair.receiver.reserve(pair.reserve_request())
    assert list(pair.pool.adopted) == ["h"]
    assert not pair.told.lost


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("dtype", {"layout": KVLayout("m", "bfloat16", 1, 1, 1, 4)}),
        ("num_computed_tokens", {"num_computed_tokens": 13}),
        ("num_tokens", {"request": GenerationRequest("h", (1, 2), SamplingParams(), (3,))}),
        ("request_id", {"request": GenerationRequest("x", tuple(range(14)), SamplingParams(), (3,))}),
        ("block_hashes", {"block_hashes": (b"x", b"y", b"q")}),
    ],
)
async def test_a_ticket_that_does_not_fit_ends_the_handoff(pair, field, change):
    await pair.receiver.reserve(pair.reserve_request())
    with pytest.raises(HandoffError, match=field):
        await pair.receiver.commit(pair.ticket(**change))
    await settle()
    assert not pair.pool.adopted
    assert len(pair.pool.free) == 8
    assert [h for h, _ in pair.told.lost] == ["h"]
    with pytest.raises(HandoffError, match=field):
        await pair.receiver.commit(pair.ticket())


async def test_a_ticket_redeems_no_grant_but_its_own(pair):
    """Both a Reserve and a Commit may come so late that the first time is forgotten: then nobody has written these blocks."""
    await pair.receiver.reserve(pair.reserve_request())
    late_commit = pair.ticket()
    await pair.receiver.abort(abort_of(pair))
    await settle()
    for number in range(pair.receive.max_remembered):
        await pair.receiver.abort(abort_of(pair, f"other-{number}"))
    await pair.receiver.reserve(pair.reserve_request())  # a late copy
    with pytest.raises(HandoffError, match="another grant"):
        await pair.receiver.commit(late_commit)
    await settle()
    assert not pair.pool.adopted
    assert len(pair.pool.free) == 8


async def test_commits_of_what_is_not_held_are_refused(pair):
    with pytest.raises(UnknownHandoff):
        await pair.receiver.commit(pair.ticket())
    await pair.receiver.reserve(pair.reserve_request())
    await pair.receiver.abort(abort_of(pair))
    await settle()
    with pytest.raises(RequestCancelled):
        await pair.receiver.commit(pair.ticket())


async def test_what_nobody_here_waits_for_is_freed_at_once_and_what_is_not_known_is_left_alone(pair):
    cause = RequestCancelled("its reader has left")
    pair.receiver.give_up("h", cause)
    await pair.receiver.reserve(pair.reserve_request())
    for _ in range(2):
        pair.receiver.give_up("h", cause)
        await settle()
    assert len(pair.pool.free) == 8
    assert pair.told.lost == [("h", cause)]
    with pytest.raises(RequestCancelled, match="its reader has left"):
        await pair.receiver.commit(pair.ticket())


async def test_abort_frees_at_once_and_again_is_harmless(pair):
    await pair.receiver.reserve(pair.reserve_request())
    for _ in range(3):
        await pair.receiver.abort(abort_of(pair))
        await settle()
    assert len(pair.pool.free) == 8
    assert [h for h, _ in pair.told.lost] == ["h"]


async def test_an_abort_that_comes_first_is_remembered(pair):
    await pair.receiver.abort(abort_of(pair))
    await pair.receiver.abort(abort_of(pair))
    with pytest.raises(UnknownHandoff):
        await pair.receiver.reserve(pair.reserve_request())
    assert len(pair.pool.free) == 8


class SlowPool(MemoryPool):
    """An engine that takes a second to answer."""

    def __init__(self, clock, error=None):
        super().__init__(8, 4)
        self._clock = clock
        self._error = error

    async def reserve(self, handoff_id, num_tokens, block_hashes):
        await self._clock.sleep(1.0)
        if self._error is not None:
            raise self._error
        return await super().reserve(handoff_id, num_tokens, block_hashes)


async def test_an_abort_while_the_engine_is_asked_gets_nothing(pair):
    pool = SlowPool(pair.clock)
    receiver = pair.make_receiver(pool)
    asking = asyncio.ensure_future(receiver.reserve(pair.reserve_request()))
    await settle()
    assert (await receiver.renew(renewal(pair, "h"))).lost_handoff_ids == ()
    with pytest.raises(UnknownHandoff):
        await receiver.commit(pair.ticket())
    await receiver.abort(abort_of(pair))
    with pytest.raises(UnknownHandoff):
        await pair.turn(asking)
    assert len(pool.free) == 8
    assert not pair.target.writable()


async def test_a_restart_while_the_engine_is_asked_gets_nothing(pair):
    pool = SlowPool(pair.clock)
    receiver = pair.make_receiver(pool)
    asking = asyncio.ensure_future(receiver.reserve(pair.reserve_request()))
    await settle()
    await receiver.connect(ConnectRequest(NEXT_LIFE, pair.d.ref, pair.layout))
    with pytest.raises(StaleEpoch):
        await pair.turn(asking)
    assert len(pool.free) == 8


async def test_an_asker_that_leaves_does_not_lose_the_lease(pair):
    pool = SlowPool(pair.clock)
    receiver = pair.make_receiver(pool)
    receiver.start()
    asking = asyncio.ensure_future(receiver.reserve(pair.reserve_request()))
    await settle()
    asking.cancel()
    await pair.clock.advance(1.0)
    assert receiver.counts() == {TargetState.RESERVED: 1}
    await pair.clock.advance(10.0)
    assert len(pool.free) == 8
    await receiver.close()


async def test_a_request_that_never_fits_is_said_so(pair):
    receiver = pair.make_receiver(SlowPool(pair.clock, InvalidRequest("prompt", 99, "at most 8 blocks")))
    with pytest.raises(InvalidRequest, match="at most 8"):
        await pair.turn(receiver.reserve(pair.reserve_request()))
    assert not pair.told.fatal


async def test_a_lease_runs_out_unless_renewed(pair):
    await pair.receiver.reserve(pair.reserve_request("kept"))
    await pair.receiver.reserve(pair.reserve_request("left"))
    for _ in range(6):
        await pair.clock.advance(1.0)
        answer = await pair.receiver.renew(renewal(pair, "kept"))
        assert answer.lost_handoff_ids == ()
        assert answer.lease_s == pair.receive.lease_s
    assert [h for h, _ in pair.told.lost] == ["left"]
    assert len(pair.pool.free) == 4
    assert (await pair.receiver.renew(renewal(pair, "left", "never"))).lost_handoff_ids == ("left", "never")
    with pytest.raises(UnknownHandoff, match="ran out"):
        await pair.receiver.commit(pair.ticket(handoff_id="left"))
    await pair.clock.advance(5.0)
    assert len(pair.pool.free) == 8


async def test_asking_again_for_the_same_room_renews_it(pair):
    await pair.receiver.reserve(pair.reserve_request())
    for _ in range(3):
        await pair.clock.advance(3.0)
        await pair.receiver.reserve(pair.reserve_request())
    assert pair.receiver.counts() == {TargetState.RESERVED: 1}


@pytest.mark.parametrize("how", ["abort", "expire", "restart"])
async def test_blocks_stay_fenced_while_a_writer_is_inside(pair, how):
    grant = await pair.receiver.reserve(pair.reserve_request())
    writing = await stalled_write(pair, grant, stall_s=30.0)
    if how == "abort":
        await pair.receiver.abort(abort_of(pair))
    elif how == "expire":
        await pair.clock.advance(5.0)
    else:
        await pair.receiver.connect(ConnectRequest(NEXT_LIFE, pair.d.ref, pair.layout))
    await pair.clock.advance(2.0)
    assert pair.receiver.counts() == {TargetState.DRAINING: 1}
    assert len(pair.pool.free) == 4
    if how != "restart":
        with pytest.raises((RequestCancelled, UnknownHandoff)):
            await pair.receiver.commit(pair.ticket())
        with pytest.raises(UnknownHandoff, match="draining"):
            await pair.receiver.reserve(pair.reserve_request())
        assert (await pair.receiver.renew(renewal(pair, "h"))).lost_handoff_ids == ("h",)
        await pair.receiver.abort(abort_of(pair))
    assert not pair.told.lost
    await pair.clock.advance(30.0)
    await writing
    assert len(pair.pool.free) == 8
    assert [h for h, _ in pair.told.lost] == ["h"]


async def test_a_restart_ends_only_older_lives_of_the_same_worker(pair):
    await pair.receiver.reserve(pair.reserve_request("mine"))
    other = WorkerRef("q", 1)
    await pair.receiver.reserve(pair.reserve_request("other", prefill=other))
    await pair.receiver.connect(ConnectRequest(NEXT_LIFE, pair.d.ref, pair.layout))
    await settle()
    assert [h for h, _ in pair.told.lost] == ["mine"]
    await pair.receiver.reserve(pair.reserve_request("new", prefill=NEXT_LIFE))
    await pair.receiver.reserve(pair.reserve_request("new", prefill=NEXT_LIFE))
    assert pair.receiver.counts() == {TargetState.RESERVED: 2}


async def test_a_commit_waits_until_its_writers_are_out(pair):
    grant = await pair.receiver.reserve(pair.reserve_request())
    writing = await stalled_write(pair, grant, stall_s=2.0)
    committing = asyncio.ensure_future(pair.receiver.commit(pair.ticket()))
    again = asyncio.ensure_future(pair.receiver.commit(pair.ticket()))
    await settle()
    assert pair.receiver.counts() == {TargetState.RECEIVING: 1}
    assert (await pair.receiver.renew(renewal(pair, "h"))).lost_handoff_ids == ()
    assert not pair.pool.adopted
    assert (await pair.turn(committing)).num_blocks == (await again).num_blocks == 4
    await writing


@pytest.mark.parametrize("how", ["abort", "expire"])
async def test_a_commit_that_waits_can_still_be_given_up(pair, how):
    grant = await pair.receiver.reserve(pair.reserve_request())
    writing = await stalled_write(pair, grant, stall_s=20.0)
    committing = asyncio.ensure_future(pair.receiver.commit(pair.ticket()))
    await settle()
    if how == "abort":
        await pair.receiver.abort(abort_of(pair))
    with pytest.raises((RequestCancelled, UnknownHandoff)):
        await pair.turn(committing)
    assert not pair.pool.adopted
    assert len(pair.pool.free) == 8
    await writing


class RefusingPool(MemoryPool):
    """An engine that takes the lease, gives it back and says why."""

    def __init__(self, error):
        super().__init__(8, 4)
        self._error = error

    async def adopt(self, request, lease, num_computed_tokens, seals):
        await super().release(lease)
        raise self._error


async def test_an_engine_that_does_not_take_it(pair):
    pool = RefusingPool(InvalidRequest("max_tokens", 9, "at most 8"))
    receiver = pair.make_receiver(pool)
    await receiver.reserve(pair.reserve_request())
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="at most 8"):
            await receiver.commit(pair.ticket())
    assert [h for h, _ in pair.told.lost] == ["h"]
    assert not pair.told.adopted
    assert (await receiver.renew(renewal(pair, "h"))).lost_handoff_ids == ("h",)


async def test_a_fault_of_ours_is_fatal_and_hangs_nobody(pair):
    receiver = pair.make_receiver(RefusingPool(KeyError("bug")))
    await receiver.reserve(pair.reserve_request())
    with pytest.raises(InternalError):
        await receiver.commit(pair.ticket())
    await settle()
    assert [type(error) for error in pair.told.fatal] == [KeyError]


async def test_draining_grants_nothing_and_waits_for_what_there_is(pair):
    await pair.receiver.reserve(pair.reserve_request())
    draining = asyncio.ensure_future(pair.receiver.drain(60.0))
    await settle()
    with pytest.raises(Draining, match="about to stop"):
        await pair.receiver.reserve(pair.reserve_request("late"))
    await pair.receiver.reserve(pair.reserve_request())  # what is held already goes on
    assert not draining.done()
    assert (await pair.receiver.commit(pair.ticket())).num_blocks == 4
    await pair.turn(draining)


@pytest.mark.parametrize("committing", [False, True])
async def test_draining_gives_up_when_patience_ends_what_is_not_adopted(pair, committing):
    grant = await pair.receiver.reserve(pair.reserve_request())
    writing = await stalled_write(pair, grant, stall_s=3.0)
    draining = asyncio.ensure_future(pair.receiver.drain(1.0))
    await settle()
    commit = asyncio.ensure_future(pair.receiver.commit(pair.ticket())) if committing else None
    await pair.clock.advance(0.9)
    assert pair.receiver.counts() == {TargetState.RECEIVING if committing else TargetState.RESERVED: 1}
    await pair.clock.advance(0.5)
    assert pair.receiver.counts() == {TargetState.DRAINING: 1}
    with pytest.raises(Draining):
        await pair.receiver.commit(pair.ticket())
    assert len(pair.pool.free) == 4, "a writer is inside"
    assert not draining.done()
    await pair.turn(draining)
    assert len(pair.pool.free) == 8
    assert [(h, type(cause)) for h, cause in pair.told.lost] == [("h", Draining)]
    if commit is not None:
        with pytest.raises(Draining):
            await commit
    await pair.turn(writing)


async def test_close_frees_what_is_quiesced_and_fences_the_rest_for_ever(pair):
    stuck = await pair.receiver.reserve(pair.reserve_request("stuck"))
    await pair.receiver.reserve(pair.reserve_request("free"))
    writing = await stalled_write(pair, stuck, stall_s=30.0)
    await pair.receiver.close()  # without the clock moving
    assert len(pair.pool.free) == 4
    causes = dict(pair.told.lost)
    assert isinstance(causes["free"], RequestCancelled)
    assert isinstance(causes["stuck"], InternalError)
    await pair.receiver.close()
    await pair.turn(writing)


async def test_close_waits_for_the_engine_s_answers(pair):
    pool = SlowPool(pair.clock)
    receiver = pair.make_receiver(pool)
    asking = asyncio.ensure_future(receiver.reserve(pair.reserve_request()))
    await settle()
    await pair.turn(receiver.close())
    await asking
    assert len(pool.free) == 8


async def test_windows_are_opened_on_all_connectors_or_on_none(pair):
    class Full(LocalConnector):
        def open_window(self, ranges):
            raise NoRoom("no window left")

    full = Full(pair.hub, pair.clock)
    full.expose(pair.target_region)
    side = Side(pair.d.ref, pair.layout, (pair.target, full), pair.clock)
    receiver = Receiver(side, pair.pool, pair.told, pair.receive, pair.told.fatal.append)
    with pytest.raises(NoRoom, match="no window left"):
        await receiver.reserve(pair.reserve_request())
    assert not pair.target.writable()
    assert len(pair.pool.free) == 8


async def test_the_memory_of_finished_handoffs_is_bounded(pair):
    for number in range(20):
        await pair.receiver.abort(abort_of(pair, f"x{number}"))
    await pair.receiver.reserve(pair.reserve_request("x0"))  # long forgotten
    with pytest.raises(UnknownHandoff):
        await pair.receiver.reserve(pair.reserve_request("x19"))


async def test_grants_name_ranges_that_can_be_written(pair):
    grant = await pair.receiver.reserve(pair.reserve_request())
    assert pair.target.writable() == (ByteRange(min(grant.block_ids) * 32, 4 * 32),)
