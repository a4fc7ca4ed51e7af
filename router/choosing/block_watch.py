"""This router's ear on every worker's prefix cache: one stream per worker, its news written into the index.

    worker joins ──▶ following ──stream breaks, a message is missing──▶ pause ──▶ following (a new snapshot)
         └─ leaves or is lost ──▶ forgotten

Every router follows every worker by itself, so all have the same index without sharing anything (docs/adr/0021). While a stream
is broken the index keeps what it knew: old news choose better than none. A worker that has no such service keeps no prefixes.
Does not know requests or policies.
"""

from __future__ import annotations

import asyncio

import grpc

from contracts import wire_handoff
from contracts.clock import Clock
from contracts.errors import DiptychError, HandoffError
from contracts.pb.diptych.v1 import blocks_pb2, blocks_pb2_grpc
from contracts.worker import WorkerInfo, WorkerRef, check_life
from observability.log import get_logger
from observability.private import reason
from router.choosing.prefix_index import PrefixIndex
from router.workers.registry import Change, ChangeKind
from rpc.channel import ChannelConfig, ChannelOpener, open_channel
from rpc.errors import from_rpc_error

log = get_logger(__name__)
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0


class BlockWatch:
    """Owns a channel and a task per worker; `close` gives them back. Hears of workers by `on_change`."""

    def __init__(
        self, index: PrefixIndex, clock: Clock, config: ChannelConfig, opener: ChannelOpener = open_channel
    ) -> None:
        self._index = index
        self._clock = clock
        self._config = config
        self._opener = opener
        self._following: dict[WorkerRef, asyncio.Task[None]] = {}
        self._followed: dict[WorkerRef, WorkerInfo] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def followed(self) -> tuple[WorkerInfo, ...]:
        """The workers that have told of their blocks."""
        return tuple(self._followed.values())

    def on_change(self, change: Change) -> None:
        """Follow who joins, forget who leaves or is lost."""
        info = change.info
        if change.kind is ChangeKind.JOINED:
            self._index.join(info)
            self._begin(info)
            return
        self._index.forget(info.ref)
        self._followed.pop(info.ref, None)
        task: asyncio.Task[None] | None = self._following.pop(info.ref, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Follow nobody any more. Idempotent."""
        following, self._following = self._following, {}
        for task in following.values():
            task.cancel()
        await asyncio.gather(*following.values(), *self._ending, return_exceptions=True)

    def _begin(self, info: WorkerInfo, after_s: float = 0.0) -> None:
        task = asyncio.ensure_future(self._follow(info, after_s))
        task.add_done_callback(lambda task: self._ended(task, info))
        self._following[info.ref] = task

    async def _follow(self, info: WorkerInfo, after_s: float) -> None:
        await self._clock.sleep(after_s)
        async with self._opener(info.address, self._config) as channel:
            stub = blocks_pb2_grpc.BlockEventsStub(channel)
            pause_s = _FIRST_PAUSE_S
            while True:
                ear = _Ear(self._index, info, self._followed)
                why = await _listen(stub, ear)
                if isinstance(why, grpc.aio.AioRpcError) and why.code() is grpc.StatusCode.UNIMPLEMENTED:
                    log.info("a worker does not tell of its blocks", worker_id=info.ref.worker_id)
                    self._index.forget(info.ref)  # nor is anything expected there
                    return
                pause_s = _FIRST_PAUSE_S if ear.num_messages else min(2 * pause_s, _LONGEST_PAUSE_S)
                log.info("block events end", worker_id=info.ref.worker_id, reason=_said(why), again_in_s=pause_s)
                await self._clock.sleep(pause_s)

    def _ended(self, task: asyncio.Task[None], info: WorkerInfo) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("following a worker failed; it is tried again", error, worker_id=info.ref.worker_id)
        if self._following.get(info.ref) is task:
            self._begin(info, _LONGEST_PAUSE_S)


class _Ear:
    """One stream's messages, written into the index in their order."""

    def __init__(self, index: PrefixIndex, info: WorkerInfo, followed: dict[WorkerRef, WorkerInfo]) -> None:
        self._index = index
        self._followed = followed
        self._info = info
        self.ref = info.ref
        self._num_in_snapshot = 0  # blocks of the snapshot that is under way
        self.num_messages = 0

    def hear(self, message: blocks_pb2.WatchResponse) -> None:
        """Raises HandoffError for one that cannot be the next: then all that there is must be asked for anew."""
        ref = self.ref
        check_life(ref, wire_handoff.worker_ref_from_pb(message.worker))
        if message.number != self.num_messages + 1:
            raise HandoffError(f"block events: got message {message.number}, expected {self.num_messages + 1}")
        self.num_messages += 1
        match message.WhichOneof("event"):
            case "snapshot":
                self._take_snapshot(message.snapshot)
            case "changes":
                self._index.removed(ref, message.changes.removed)
                self._index.stored(ref, message.changes.stored)
            case other:
                raise HandoffError(f"block events: got event {other}, must be snapshot or changes")

    def _take_snapshot(self, part: blocks_pb2.BlockSnapshot) -> None:
        """Each part counts at once, so that none of them holds the event loop for long."""
        size = self._num_in_snapshot + len(part.blocks)
        if size > self._info.num_blocks:
            raise HandoffError(
                f"block events: got a snapshot of more than the {self._info.num_blocks} blocks there are"
            )
        if self._num_in_snapshot:
            self._index.stored(self.ref, part.blocks)
        else:
            self._index.replace(self.ref, part.blocks)
        self._num_in_snapshot = size if part.more else 0
        self._followed[self.ref] = self._info


async def _listen(stub: blocks_pb2_grpc.BlockEventsAsyncStub, ear: _Ear) -> Exception | None:
    """One stream to its end; why it ended, None where the worker ended it in good order."""
    call = stub.Watch(blocks_pb2.WatchRequest(worker=wire_handoff.worker_ref_to_pb(ear.ref)))
    try:
        async for message in call:
            ear.hear(message)
    except (grpc.aio.AioRpcError, DiptychError) as error:
        return error
    finally:
        call.cancel()
    return None


def _said(why: Exception | None) -> str:
    if isinstance(why, grpc.aio.AioRpcError):
        why = from_rpc_error(why, "the worker")
    return "the worker ended them" if why is None else f"{type(why).__name__}: {reason(why)}"
