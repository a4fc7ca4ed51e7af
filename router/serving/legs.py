"""The two legs of a request, as connections: a prefill call per request, and one decode session per worker.

    PrefillLeg     Run(request, target) ──▶ tokens ──▶ handed_off
                                                   └─▶ handoff_failed ──retarget──▶ …
    DecodeSession  idle ──first command──▶ open ──broken──▶ idle (all that it carried is told, at once)

Both put events into the inbox of the request they belong to, in the order in which they came; the flow reads that one
inbox. Each is meant for one life of a worker and says so in every command; what another life answers is not believed.
Cancelling is immediate and needs no await. Does not know what the flow does about an event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

import grpc

from contracts.errors import (
    DiptychError,
    Draining,
    InternalError,
    NotOfThisCluster,
    RequestCancelled,
    StaleEpoch,
    Unavailable,
    WorkerLost,
)
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from contracts.prefill import Target
from contracts.request import GenerationRequest
from contracts.wire import delta_from_pb, request_to_pb
from contracts.wire_handoff import worker_ref_from_pb, worker_ref_to_pb
from contracts.wire_prefill import event_from_pb, target_to_pb
from contracts.worker import WorkerInfo, check_life
from observability.log import get_logger
from router.serving.inbox import DecodeLost, Inbox, PrefillEnded, Turns
from rpc.channel import wait_connected
from rpc.errors import from_rpc_error

log = get_logger(__name__)
_Command = TypeVar("_Command")
_PrefillCall = grpc.aio.StreamStreamCall[prefill_pb2.PrefillCommand, prefill_pb2.PrefillEvent]
_NEVER_HEARD = (
    StaleEpoch,
    NotOfThisCluster,
)  # it has started again, or has another secret: nothing of the request is there


class _Commands(Generic[_Command]):
    """What is said to a worker, in order, as gRPC's own task for it reads them. Costs half of a queue and a generator.

    Calls are given their commands and not written to, though that saves gRPC's task: where the worker has just refused the call,
    the reason that it gave is lost to the writer ten times as often (see `rpc.errors`).
    """

    def __init__(self) -> None:
        self._left: deque[_Command] = deque()
        self._ended = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def empty(self) -> bool:
        """Whether all were read."""
        return not self._left

    def put(self, command: _Command) -> None:
        """Say it after all others."""
        self._left.append(command)
        self._wake()

    def end(self) -> None:
        """No more come."""
        self._ended = True
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Command:
        while not self._left:
            if self._ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                # gRPC cancels its reading task with the call, and makes a traceback of it that costs more than all the rest
                raise StopAsyncIteration from None
            finally:
                self._reader = None
        return self._left.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class PrefillLine:
    """The connection to one life of a prefill worker, which legs are made of. Does not own `channel`."""

    def __init__(self, worker: WorkerInfo, channel: grpc.aio.Channel, connect_timeout_s: float) -> None:
        self.worker = worker
        self.ref = worker_ref_to_pb(worker.ref)
        self.name = f"prefill worker {worker.ref.worker_id}"
        self._channel = channel
        self._connect_timeout_s = connect_timeout_s
        self._stub = prefill_pb2_grpc.PrefillStub(channel)

    @property
    def stands(self) -> bool:
        """Whether a call may begin at once."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self) -> None:
        """Return when it stands. Raises DiptychError when it does not within its time."""
        if not self.stands:
            await wait_connected(self._channel, self.worker.address, self._connect_timeout_s)

    def call(self, commands: _Commands[prefill_pb2.PrefillCommand]) -> _PrefillCall:
        """Begin a call."""
        return self._stub.Run(commands)

    def leg(self, inbox: Inbox) -> PrefillLeg:
        """A new leg, not open."""
        return PrefillLeg(self, inbox)


class PrefillLeg:
    """One Prefill.Run call. Owns its task; `cancel` ends both, at any moment, any number of times."""

    def __init__(self, line: PrefillLine, inbox: Inbox) -> None:
        self._line = line
        self._inbox = inbox
        self._commands: _Commands[prefill_pb2.PrefillCommand] = _Commands()
        self._call: _PrefillCall | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Send the call's headers, if the connection stands: gRPC sends nothing else before those are gone. Returns at once.

        Whoever opens a leg cancels it, also if it never starts.
        """
        if self._line.stands:
            self._call = self._line.call(self._commands)

    def start(self, request: GenerationRequest, target: Target) -> None:
        """Send the prompt. Returns at once; what happens comes as events."""
        run = prefill_pb2.PrefillRun(request=request_to_pb(request), target=target_to_pb(target))
        self._commands.put(prefill_pb2.PrefillCommand(prefill=self._line.ref, run=run))
        self._task = asyncio.ensure_future(self._drive())

    def retarget(self, target: Target) -> None:
        """Push the KV there instead, whether the hand-off before has failed or is under way."""
        self._commands.put(prefill_pb2.PrefillCommand(prefill=self._line.ref, retarget=target_to_pb(target)))

    def cancel(self) -> None:
        """Abort the request and its hand-off, unless the call is over. No event comes after this."""
        if self._call is not None:  # not by the task alone: one that has not begun ends without a word
            self._call.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _drive(self) -> None:
        name, worker = self._line.name, self._line.worker
        error: DiptychError | None = WorkerLost(f"{name}: the connection was closed")
        try:
            if self._call is None:
                await self._line.connect()
                self._call = self._line.call(self._commands)
            async for message in self._call:
                check_life(worker.ref, worker_ref_from_pb(message.prefill))
                self._inbox.put_nowait(event_from_pb(message))
            error = None
        except grpc.aio.AioRpcError as broken:
            error = from_rpc_error(broken, name)
            if isinstance(error, RequestCancelled):  # not by us: its server went down
                error = WorkerLost(error.message)
            elif isinstance(error, _NEVER_HEARD):
                error = Unavailable(error.message)
        except StaleEpoch as broken:
            error = WorkerLost(broken.message)
        except DiptychError as broken:
            error = Unavailable(broken.message) if isinstance(broken, _NEVER_HEARD) else broken
        finally:
            if self._call is None and error is not None:  # it never heard of the request
                error = Unavailable(error.message)
            if self._call is not None:
                self._call.cancel()  # before the commands end, which would tell the worker that all is well
            self._commands.end()
            self._inbox.put_nowait(PrefillEnded(error))


class DecodeSession:
    """The one Decode.Session stream to one life of a decode worker. Owns its task and the table of who hears what."""

    def __init__(
        self,
        worker: WorkerInfo,
        channel: grpc.aio.Channel,
        connect_timeout_s: float,
        on_lost: Callable[[WorkerInfo], None],
        turns: Turns | None = None,
    ) -> None:
        """`turns` are shared by all sessions of a router, None for one of its own."""
        self._worker = worker
        self._ref = worker_ref_to_pb(worker.ref)
        self._channel = channel
        self._connect_timeout_s = connect_timeout_s
        self._on_lost = on_lost
        self._turns = turns if turns is not None else Turns()
        self._inboxes: dict[str, Inbox] = {}
        self._commands: _Commands[decode_pb2.DecodeCommand] = _Commands()
        self._cancel: decode_pb2.DecodeCommand | None = None  # the last command, if it is a cancel
        self._task: asyncio.Task[None] | None = None
        self._closed: DiptychError | None = None

    def attach(self, handoff_id: str, wait_s: float, inbox: Inbox) -> None:
        """Follow a hand-off; may be said before the worker knows of it."""
        command = decode_pb2.DecodeCommand(
            decode=self._ref, attach=decode_pb2.Attach(handoff_id=handoff_id, wait_s=wait_s)
        )
        self._carry(handoff_id, command, inbox)

    def generate(self, request: GenerationRequest, inbox: Inbox) -> None:
        """Run a request on this worker alone."""
        command = decode_pb2.DecodeCommand(
            decode=self._ref, generate=decode_pb2.GenerateAlone(request=request_to_pb(request))
        )
        self._carry(request.request_id, command, inbox)

    def cancel(self, request_id: str) -> None:
        """Stop it, unless its end has come; its inbox hears nothing more."""
        if self._inboxes.pop(request_id, None) is None:
            return
        if self._cancel is None or self._commands.empty:  # else it has not left yet: many clients may leave at once
            self._cancel = decode_pb2.DecodeCommand(decode=self._ref, cancel=decode_pb2.Cancel())
            self._commands.put(self._cancel)
        self._cancel.cancel.request_ids.append(request_id)

    def close(self, reason: str) -> None:
        """End the session for good; what it carries, now or later, is told that the worker is lost."""
        self._closed = WorkerLost(f"decode worker {self._worker.ref.worker_id}: {reason}")
        self._fail(self._closed)
        if self._task is not None:
            self._task.cancel()

    def _carry(self, request_id: str, command: decode_pb2.DecodeCommand, inbox: Inbox) -> None:
        if self._closed is not None:
            inbox.put_nowait(DecodeLost(request_id, Unavailable(self._closed.message)))
            return
        self._inboxes[request_id] = inbox
        self._cancel = None
        self._commands.put(command)
        if self._task is None:
            self._task = asyncio.ensure_future(self._drive(self._commands))

    async def _drive(self, commands: _Commands[decode_pb2.DecodeCommand]) -> None:
        call: grpc.aio.StreamStreamCall[decode_pb2.DecodeCommand, decode_pb2.DecodeBatch] | None = None
        name = f"decode worker {self._worker.ref.worker_id}"
        error: DiptychError = Draining(f"{name}: the session ended")  # a worker ends it only when it is about to stop
        try:
            await wait_connected(self._channel, self._worker.address, self._connect_timeout_s)
            call = decode_pb2_grpc.DecodeStub(self._channel).Session(commands)
            async for batch in call:
                check_life(self._worker.ref, worker_ref_from_pb(batch.decode))
                for delta in batch.deltas:
                    self._deliver(delta.request_id, delta)
        except grpc.aio.AioRpcError as broken:
            told = from_rpc_error(broken, name)
            error = (Unavailable if isinstance(told, _NEVER_HEARD) else WorkerLost)(told.message)
        except DiptychError as broken:
            error = Unavailable(broken.message)  # it never heard of what the session carries
        finally:
            if call is not None:
                call.cancel()
            commands.end()
            self._commands, self._cancel, self._task = _Commands(), None, None
            self._fail(error)
            if self._closed is None:
                self._on_lost(self._worker)

    def _deliver(self, request_id: str, message: types_pb2.TokenDelta) -> None:
        inbox = self._inboxes.get(request_id)
        if inbox is None:  # cancelled here while the news was on its way
            return
        try:
            delta = delta_from_pb(message)
        except DiptychError as error:
            fault = InternalError(f"decode worker {self._worker.ref.worker_id}: unreadable delta: {error.logged}")
            self.cancel(request_id)
            inbox.put_nowait(DecodeLost(request_id, fault))
            return
        if not inbox.stash(delta, self._turns):  # nobody reads it: the worker need not go on
            self.cancel(request_id)
            return
        if delta.finish_reason is not None or delta.error is not None:
            del self._inboxes[request_id]

    def _fail(self, error: DiptychError) -> None:
        carried, self._inboxes = self._inboxes, {}
        if carried:
            log.warning("decode session lost", reason=error, carried=len(carried))
        for request_id, inbox in carried.items():
            inbox.put_nowait(DecodeLost(request_id, error))
