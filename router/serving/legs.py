"""The two legs of a request, as connections: one session per worker, prefill or decode.

    PrefillLeg     run(request, target) ──▶ tokens ──▶ handed_off
                                                   └─▶ handoff_failed ──retarget──▶ …
    PrefillLine, DecodeSession   idle ──first command──▶ open ──broken──▶ idle (all that it carried is told, at once)

Both put events into the inbox of the request they belong to, in the order in which they came; the flow reads that one
inbox. Each is meant for one life of a worker and says so in every command; what another life answers is not believed.
Cancelling is immediate and needs no await. Does not know what the flow does about an event.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import grpc

from contracts.errors import (
    DiptychError,
    Draining,
    InternalError,
    NotOfThisCluster,
    StaleEpoch,
    Unavailable,
    WorkerLost,
)
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from contracts.prefill import Target
from contracts.request import GenerationRequest
from contracts.wire import delta_from_pb, error_info_from_pb, request_to_pb
from contracts.wire_handoff import worker_ref_from_pb, worker_ref_to_pb
from contracts.wire_prefill import event_from_pb, target_to_pb
from contracts.worker import WorkerInfo, check_life
from observability.log import get_logger
from router.serving.inbox import DecodeLost, Inbox, PrefillEnded, Turns
from router.serving.progress import as_exception
from rpc.channel import wait_connected
from rpc.errors import from_rpc_error

log = get_logger(__name__)
_Command = TypeVar("_Command")
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
        self._left: OrderedDict[int, _Command] = OrderedDict()
        self._numbers = itertools.count()
        self._ended = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def empty(self) -> bool:
        """Whether all were read."""
        return not self._left

    def put(self, command: _Command) -> int:
        """Say it after all others. Returns what it is taken back by."""
        number = next(self._numbers)
        self._left[number] = command
        self._wake()
        return number

    def take_back(self, number: int) -> bool:
        """Do not say it; False when it was read already."""
        return self._left.pop(number, None) is not None

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
        return self._left.popitem(last=False)[1]

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request on a prefill session: who hears of it, and the numbers of the commands that were said of it."""

    inbox: Inbox
    said: list[int]


class PrefillLine:
    """The one Prefill.Session stream to one life of a prefill worker. Owns its task and the table of who hears what.

    A worker that reads slowly is not written to; prompts that nobody wants any more by the time at which it reads are not sent.
    """

    def __init__(self, worker: WorkerInfo, channel: grpc.aio.Channel, connect_timeout_s: float) -> None:
        self.worker = worker
        self.name = f"prefill worker {worker.ref.worker_id}"
        self._ref = worker_ref_to_pb(worker.ref)
        self._channel = channel
        self._connect_timeout_s = connect_timeout_s
        self._carried: dict[str, _Prompt] = {}  # by request id
        self._commands: _Commands[prefill_pb2.PrefillCommand] = _Commands()
        self._cancel: prefill_pb2.PrefillCommand | None = None  # the last command, if it is a cancel
        self._task: asyncio.Task[None] | None = None
        self._closed: DiptychError | None = None

    def leg(self, inbox: Inbox) -> PrefillLeg:
        """A new leg, not started."""
        return PrefillLeg(self, inbox)

    def start(self, request: GenerationRequest, target: Target, inbox: Inbox) -> None:
        """Send a prompt; `inbox` hears of it until its end."""
        if self._closed is not None:
            inbox.put_nowait(PrefillEnded(Unavailable(self._closed.message)))
            return
        run = prefill_pb2.PrefillRun(request=request_to_pb(request), target=target_to_pb(target))
        command = prefill_pb2.PrefillCommand(prefill=self._ref, run=run)
        self._carried[request.request_id] = _Prompt(inbox, [self._say(command)])
        if self._task is None:
            self._task = asyncio.ensure_future(self._drive(self._commands))

    def retarget(self, request_id: str, target: Target, inbox: Inbox) -> None:
        """Push its KV there instead."""
        prompt = self._carried.get(request_id)
        if prompt is not None and prompt.inbox is inbox:
            again = prefill_pb2.Retarget(request_id=request_id, target=target_to_pb(target))
            prompt.said.append(self._say(prefill_pb2.PrefillCommand(prefill=self._ref, retarget=again)))

    def cancel(self, request_id: str, inbox: Inbox) -> None:
        """Stop it, unless its end has come; its inbox hears nothing more."""
        prompt = self._carried.get(request_id)
        if prompt is None or prompt.inbox is not inbox:
            return
        del self._carried[request_id]
        if not [number for number in prompt.said if not self._commands.take_back(number)]:
            return  # the worker has not heard of it
        if self._cancel is None or self._commands.empty:  # else it has not left yet: many clients may leave at once
            cancel = prefill_pb2.PrefillCommand(prefill=self._ref, cancel=prefill_pb2.CancelPrefill())
            self._say(cancel)
            self._cancel = cancel
        self._cancel.cancel.request_ids.append(request_id)

    def close(self, reason: str) -> None:
        """End the session for good; what it carries, now or later, is told that the worker is lost."""
        self._closed = WorkerLost(f"{self.name}: {reason}")
        self._fail(self._closed)
        if self._task is not None:
            self._task.cancel()

    def _say(self, command: prefill_pb2.PrefillCommand) -> int:
        self._cancel = None
        return self._commands.put(command)

    async def _drive(self, commands: _Commands[prefill_pb2.PrefillCommand]) -> None:
        call: grpc.aio.StreamStreamCall[prefill_pb2.PrefillCommand, prefill_pb2.PrefillBatch] | None = None
        error: DiptychError = WorkerLost(f"{self.name}: the session was given up")
        try:
            if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
                await wait_connected(self._channel, self.worker.address, self._connect_timeout_s)
            call = prefill_pb2_grpc.PrefillStub(self._channel).Session(commands)
            async for batch in call:
                check_life(self.worker.ref, worker_ref_from_pb(batch.prefill))
                for event in batch.events:
                    self._deliver(event)
            error = Draining(f"{self.name}: the session ended")  # which a worker does only once it has drained
        except grpc.aio.AioRpcError as broken:
            told = from_rpc_error(broken, self.name)
            if isinstance(told, _NEVER_HEARD):
                error = Unavailable(told.message)
            else:  # whatever ended the session, it is no fault of every request that it carries
                error = told if isinstance(told, Unavailable | Draining) else WorkerLost(told.message)
        except StaleEpoch as broken:
            error = WorkerLost(broken.message)
        except DiptychError as broken:
            error = Unavailable(broken.message)  # it never heard of what the session carries
        finally:
            if call is not None:
                call.cancel()  # before the commands end, which would tell the worker that all is well
            commands.end()
            self._commands, self._cancel, self._task = _Commands(), None, None
            self._fail(error)

    def _deliver(self, message: prefill_pb2.PrefillEvent) -> None:
        prompt = self._carried.get(message.request_id)
        if prompt is None:  # cancelled here while the news was on its way
            return
        try:
            if message.WhichOneof("event") != "ended":
                prompt.inbox.put_nowait(event_from_pb(message))
                return
            told = message.ended
            error = as_exception(error_info_from_pb(told.error)) if told.HasField("error") else None
        except DiptychError as unreadable:
            self.cancel(message.request_id, prompt.inbox)
            fault = InternalError(f"{self.name}: unreadable event: {unreadable.logged}")
            prompt.inbox.put_nowait(PrefillEnded(fault))
            return
        del self._carried[message.request_id]
        prompt.inbox.put_nowait(PrefillEnded(error))

    def _fail(self, error: DiptychError) -> None:
        carried, self._carried = self._carried, {}
        if carried:
            log.warning("prefill session lost", reason=error, carried=len(carried))
        for prompt in carried.values():
            prompt.inbox.put_nowait(PrefillEnded(error))


class PrefillLeg:
    """One request on a prefill session; `cancel` ends it, at any moment, any number of times."""

    def __init__(self, line: PrefillLine, inbox: Inbox) -> None:
        self._line = line
        self._inbox = inbox
        self._request_id: str | None = None

    def start(self, request: GenerationRequest, target: Target) -> None:
        """Send the prompt. Returns at once; what happens comes as events."""
        self._request_id = request.request_id
        self._line.start(request, target, self._inbox)

    def retarget(self, target: Target) -> None:
        """Push the KV there instead, whether the hand-off before has failed or is under way."""
        if self._request_id is not None:
            self._line.retarget(self._request_id, target, self._inbox)

    def cancel(self) -> None:
        """Abort the request and its hand-off, unless it is over. No event comes after this."""
        if self._request_id is not None:
            self._line.cancel(self._request_id, self._inbox)


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
