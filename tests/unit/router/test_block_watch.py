"""A router's ear: what it writes into the index, and when it asks anew."""

import asyncio

import grpc
import pytest

from contracts.clock import VirtualClock
from contracts.errors import HandoffError, StaleEpoch
from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import blocks_pb2
from contracts.pb.diptych.v1.types_pb2 import WorkerRef as WorkerRefPb
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.choosing.block_watch import BlockWatch, _Ear
from router.choosing.prefix_index import PrefixIndex
from router.workers.registry import Change, ChangeKind
from rpc.channel import ChannelConfig

REF = WorkerRef("w", 3)
INFO = WorkerInfo(REF, WorkerKind.DECODE, "h:1", "m", KVLayout("m", "float32", 1, 1, 8, 16), (), 64, 8)


def message(number, ref=REF, **event):
    kinds = {"snapshot": blocks_pb2.BlockSnapshot, "changes": blocks_pb2.BlockChanges}
    events = {kind: kinds[kind](**fields) for kind, fields in event.items()}
    worker = WorkerRefPb(worker_id=ref.worker_id, epoch=ref.epoch)
    return blocks_pb2.WatchResponse(worker=worker, number=number, **events)


@pytest.fixture
def ear():
    index = PrefixIndex(VirtualClock())
    index.join(INFO)
    return _Ear(index, INFO, {})


def heard(ear, *messages):
    for one in messages:
        ear.hear(one)
    return ear._index.names(REF)


def test_a_snapshot_may_come_in_parts_each_of_which_counts_at_once(ear):
    ear._index.stored(REF, [9])
    assert heard(ear, message(1, snapshot={"blocks": [1, 2], "more": True})) == {1, 2}
    assert heard(ear, message(2, snapshot={"blocks": [3]})) == {1, 2, 3}
    assert heard(ear, message(3, changes={"stored": [4], "removed": [1]})) == {2, 3, 4}
    assert heard(ear, message(4, snapshot={})) == set(), "a new one is all there is"


def test_what_is_removed_makes_room_for_what_is_stored(ear):
    full = heard(ear, message(1, snapshot={"blocks": range(8)}))
    assert len(full) == 8
    assert heard(ear, message(2, changes={"stored": [11, 12], "removed": [0, 1]})) == {*range(2, 8), 11, 12}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (message(3, changes={"stored": [1]}), HandoffError),
        (message(1, changes={"stored": [1]}), HandoffError),
        (message(2), HandoffError),
        (message(2, WorkerRef("w", 2), changes={"stored": [1]}), StaleEpoch),
        (message(2, WorkerRef("x", 3), changes={"stored": [1]}), HandoffError),
        (message(2, snapshot={"blocks": range(9)}), HandoffError),
        (message(2, snapshot={"blocks": range(9), "more": True}), HandoffError),
    ],
)
def test_what_cannot_be_next_changes_nothing_and_ends_the_stream(ear, wrong, error):
    heard(ear, message(1, snapshot={"blocks": [5]}))
    with pytest.raises(error):
        ear.hear(wrong)
    assert ear._index.names(REF) == {5}


class Stream:
    """One call: messages, then an end or an error."""

    def __init__(self, *messages, end=None):
        self._messages = messages
        self._end = end
        self.cancelled = False

    async def __aiter__(self):
        for one in self._messages:
            yield one
        if self._end == "never":
            await asyncio.Event().wait()
        if self._end is not None:
            raise self._end

    def cancel(self):
        self.cancelled = True


class Channel:
    """Each call gets the next stream; `asked_at` says when."""

    def __init__(self, clock, *streams):
        self._clock = clock
        self.streams = list(streams)
        self.asked_at = []
        self.closed = False

    def unary_stream(self, *args, **kwargs):
        return self._call

    def _call(self, request):
        assert request.worker.epoch == REF.epoch
        self.asked_at.append(self._clock.now())
        return self.streams[len(self.asked_at) - 1]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.closed = True


def rpc_error(code):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="gone")


async def watching(*streams, seconds=0.0):
    clock = VirtualClock()
    channel, index = Channel(clock, *streams), PrefixIndex(clock)
    watch = BlockWatch(index, clock, ChannelConfig(), lambda address, config: channel)
    watch.on_change(Change(ChangeKind.JOINED, INFO))
    for _ in range(int(seconds * 20)):
        await clock.advance(0.05)
    return watch, index, channel


def test_parts_together_may_not_be_more_than_the_worker_holds(ear):
    heard(ear, message(1, snapshot={"blocks": range(6), "more": True}))
    with pytest.raises(HandoffError, match="more than the 8 blocks"):
        ear.hear(message(2, snapshot={"blocks": range(6, 9)}))
    assert len(ear._index.names(REF)) == 6


async def test_after_a_gap_it_asks_anew_and_keeps_what_it_knew_until_then():
    gap = Stream(message(1, snapshot={"blocks": [1]}), message(3, changes={"stored": [2]}))
    again = Stream(message(1, snapshot={"blocks": [7]}), end="never")
    watch, index, channel = await watching(gap, again, seconds=0.1)
    assert index.names(REF) == {1}
    assert gap.cancelled
    watch, index, channel = await watching(gap, again, seconds=1.0)
    assert index.names(REF) == {7}
    assert watch.followed == (INFO,)
    await watch.close()
    assert channel.closed


async def test_pauses_grow_while_nothing_comes_and_begin_again_when_something_does():
    lost = [Stream(end=rpc_error(grpc.StatusCode.UNAVAILABLE)) for _ in range(4)]
    spoke = Stream(message(1, snapshot={}), end=rpc_error(grpc.StatusCode.UNAVAILABLE))
    watch, _, channel = await watching(*lost, spoke, Stream(end="never"), seconds=12.0)
    pauses = [later - before for before, later in zip(channel.asked_at, channel.asked_at[1:], strict=False)]
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0, 0.25], abs=0.06)
    await watch.close()


async def test_a_worker_without_the_service_is_asked_once():
    watch, index, channel = await watching(Stream(end=rpc_error(grpc.StatusCode.UNIMPLEMENTED)), seconds=5.0)
    assert len(channel.asked_at) == 1
    assert watch.followed == ()
    assert index.workers == (), "nothing is expected there"
    await watch.close()


async def test_a_fault_of_ours_is_said_and_does_not_end_it_for_good():
    clock = VirtualClock()
    index, stream = PrefixIndex(clock), Stream(message(1, snapshot={"blocks": [1]}), end="never")
    channels = [Channel(clock, Stream(end=ZeroDivisionError("mine"))), Channel(clock, stream)]
    watch = BlockWatch(index, clock, ChannelConfig(), lambda address, config: channels.pop(0))
    watch.on_change(Change(ChangeKind.JOINED, INFO))
    for _ in range(20):
        await clock.advance(0.5)
    assert index.names(REF) == {1}
    await watch.close()


@pytest.mark.parametrize("kind", [ChangeKind.LEFT, ChangeKind.LOST])
async def test_who_goes_is_forgotten(kind):
    stream = Stream(message(1, snapshot={"blocks": [1]}), end="never")
    watch, index, channel = await watching(stream, seconds=0.2)
    watch.on_change(Change(kind, INFO))
    assert index.workers == ()
    assert index.num_names == 0
    assert watch.followed == ()
    await watch.close()
    assert channel.closed
    assert stream.cancelled
