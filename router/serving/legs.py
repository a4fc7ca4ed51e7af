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
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

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
_NEVER_HEARD = (
    StaleEpoch,
    NotOfThisCluster,
)  # it has started again, or has another secret: nothing of the request is there


class PrefillLeg:
    """One Prefill.Run call. Owns its task; `cancel` ends both, at any moment, any number of times."""

    def __init__(self, worker: WorkerInfo, channel: grpc.aio.Channel, connect_timeout_s: float, inbox: Inbox) -> None:
        self._worker = worker
        self._ref = worker_ref_to_pb(worker.ref)
        self._channel = channel
        self._connect_timeout_s = connect_timeout_s
        self._inbox = inbox
        self._commands: asyncio.Queue[prefill_pb2.PrefillCommand | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self, request: GenerationRequest, target: Target) -> None:
        """Send the prompt. Returns at once; what happens comes as events."""
        run = prefill_pb2.PrefillRun(request=request_to_pb(request), target=target_to_pb(target))
        self._commands.put_nowait(prefill_pb2.PrefillCommand(prefill=self._ref, run=run))
        self._task = asyncio.ensure_future(self._drive())

    def retarget(self, target: Target) -> None:
        """Push the KV there instead, whether the hand-off before has failed or is under way."""
        self._commands.put_nowait(prefill_pb2.PrefillCommand(prefill=self._ref, retarget=target_to_pb(target)))

    def cancel(self) -> None:
        """Abort the request and its hand-off, unless the call is over. No event comes after this."""
        if self._task is not None:
            self._task.cancel()

    async def _drive(self) -> None:
        name = f"prefill worker {self._worker.ref.worker_id}"
        call: grpc.aio.StreamStreamCall[prefill_pb2.PrefillCommand, prefill_pb2.PrefillEvent] | None = None
        error: DiptychError | None = WorkerLost(f"{name}: the connection was closed")
        try:
            await wait_connected(self._channel, self._worker.address, self._connect_timeout_s)
            call = prefill_pb2_grpc.PrefillStub(self._channel).Run(_drain(self._commands))
            async for message in call:
                check_life(self._worker.ref, worker_ref_from_pb(message.prefill))
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
            if call is None and error is not None:  # it never heard of the request
                error = Unavailable(error.message)
            if call is not None:
                call.cancel()  # before the commands end, which would tell the worker that all is well
            self._commands.put_nowait(None)
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
        self._commands: asyncio.Queue[decode_pb2.DecodeCommand | None] = asyncio.Queue()
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
        if self._cancel is None or self._commands.empty():  # else it has not left yet: many clients may leave at once
            self._cancel = decode_pb2.DecodeCommand(decode=self._ref, cancel=decode_pb2.Cancel())
            self._commands.put_nowait(self._cancel)
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
        self._commands.put_nowait(command)
        if self._task is None:
            self._task = asyncio.ensure_future(self._drive(self._commands))

    async def _drive(self, commands: asyncio.Queue[decode_pb2.DecodeCommand | None]) -> None:
        call: grpc.aio.StreamStreamCall[decode_pb2.DecodeCommand, decode_pb2.DecodeBatch] | None = None
        name = f"decode worker {self._worker.ref.worker_id}"
        error: DiptychError = Draining(f"{name}: the session ended")  # a worker ends it only when it is about to stop
        try:
            await wait_connected(self._channel, self._worker.address, self._connect_timeout_s)
            call = decode_pb2_grpc.DecodeStub(self._channel).Session(_drain(commands))
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
            commands.put_nowait(None)
            self._commands, self._cancel, self._task = asyncio.Queue(), None, None
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


async def _drain(commands: asyncio.Queue[_Command | None]) -> AsyncIterator[_Command]:
    try:
        while (command := await commands.get()) is not None:
            yield command
    except asyncio.CancelledError:
        return  # gRPC cancels its reading task with the call, and makes a traceback of it that costs more than all the rest
