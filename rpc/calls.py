"""What stands around each handler of a gRPC server: messages that must come and be taken in time, errors that become statuses.

    call ──▶ ErrorInterceptor ──▶ its first message, within `stall_s` ──▶ servicer ──▶ each message taken within `stall_s`
                                     └─▶ DEADLINE_EXCEEDED                   └─▶ DiptychError ──▶ a status

gRPC itself waits for ever for the message of a call, and calls a handler of a unary request only then. So each handler is
made one of a stream here, and the one message is read by us. Does not know what the services do.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from contracts.errors import DeadlineExceeded, DiptychError, InternalError, InvalidRequest
from observability.log import get_logger
from rpc.errors import to_status

log = get_logger(__name__)
_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")
_T = TypeVar("_T")
_Context = grpc.aio.ServicerContext[_Req, _Resp]
_HANDLERS = 64  # that are kept ready; more than the services of one server have
_OURS = "/diptych."
_CROWD = 4096  # so many wait for their message only while somebody sends calls without any
_CROWD_PATIENCE = 0.05  # of `stall_s`, for the oldest of a crowd
_NEWS_S = 0.1  # after the end of a call's messages gRPC tells that it was cancelled, if it was


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a servicer raises into a status: ours by its class, anything else into INTERNAL, logged in full.

    A call whose message does not come for `stall_s` is ended, and a stream whose caller does not read for as long: else each
    would hold its request, and what that holds, for ever. The first message counts; our services' streams may pause after it.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._silent = Silent(stall_s)
        # A service's handlers are the same at each call; those that refuse a call are made for it, so there is a bound.
        self._wrapped = lru_cache(maxsize=_HANDLERS)(self._wrap)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Req, _Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Req, _Resp] | None:
        """gRPC's hook: wraps the handler that will serve this call; None is gRPC's way of saying UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self._wrapped(handler, handler_call_details.method)

    def _wrap(self, handler: grpc.RpcMethodHandler[_Req, _Resp], method: str) -> grpc.RpcMethodHandler[_Req, _Resp]:
        requests = _Requests(handler.request_deserializer, handler.request_streaming, method, self._silent)
        if not handler.response_streaming:
            answer = guard(behaviour_of(handler), requests)
            # Bytes are read inside the guard: gRPC itself answers unreadable ones with UNKNOWN and logs a fault of ours.
            return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)
        behaviour = behaviour_of(handler)
        if inspect.isasyncgenfunction(behaviour):
            stream = guard_stream(behaviour, requests, self._stall_s)
        else:  # it writes by itself
            stream = guard(behaviour, requests)
        return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)


def behaviour_of(handler: grpc.RpcMethodHandler[_Req, _Resp]) -> Callable[..., Any]:
    """The one function of a handler. The stubs know only those of synchronous servers."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(behaviour for behaviour in kinds if behaviour is not None)


def parsed(parse: Callable[[bytes], _Req] | None, raw: bytes) -> _Req | bytes:
    """The message that these bytes are. Raises InvalidRequest when they are none."""
    try:
        return raw if parse is None else parse(raw)
    except DecodeError as error:
        raise InvalidRequest("message", f"{len(raw)} bytes", f"cannot be read: {error}") from error


class Silent:
    """Calls whose message has not come yet, the oldest first: each is given `stall_s`, the oldest of a crowd much less.

    One timer for all of them: one for each call would cost more than all the rest that is done for its message.
    """

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._waiting: dict[asyncio.Timeout, float] = {}  # and since when, in the loop's seconds
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def heard(self, message: Awaitable[_T], limit: asyncio.Timeout) -> _T:
        """What comes; else `limit`, which the caller has entered, expires."""
        loop = asyncio.get_running_loop()
        self._waiting[limit] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self.stall_s, self._look)
        if len(self._waiting) > _CROWD:
            self._end_oldest(loop.time(), _CROWD_PATIENCE * self.stall_s)
        try:
            return await message
        finally:
            self._waiting.pop(limit, None)

    def _end_oldest(self, now_s: float, patience_s: float) -> bool:
        limit, since_s = next(iter(self._waiting.items()))
        if since_s + patience_s > now_s:
            return False
        del self._waiting[limit]
        limit.reschedule(now_s)
        return True

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting and self._end_oldest(loop.time(), self.stall_s):
            pass
        for since_s in self._waiting.values():
            self._timer = loop.call_at(since_s + self.stall_s, self._look)
            return


@dataclass(frozen=True, slots=True)
class _Requests:
    """How the request of one method, a message or an iterator of them, is read."""

    parse: Callable[[bytes], Any] | None
    streaming: bool
    method: str
    silent: Silent

    async def of(self, raw: AsyncIterable[bytes], context: _Context[Any, Any], limit: asyncio.Timeout) -> Any:
        """Raises InvalidRequest for a message that cannot be read, and when a call ends without its one message."""
        if self.streaming:
            return _Messages(self, raw, limit)
        message = await self.silent.heard(context.read(), limit)
        if isinstance(message, bytes):
            return parsed(self.parse, message)
        await asyncio.sleep(_NEWS_S)
        raise InvalidRequest("message", None, "one must be sent")

    def too_late(self) -> DiptychError:
        """What a caller is told whose message has not come."""
        error = DeadlineExceeded(f"no message came within {self.silent.stall_s:g} s")
        log.info("call ended", method=self.method, reason=error)
        return error


class _Messages:
    """The messages of a stream of requests, each read when it is asked for."""

    def __init__(self, requests: _Requests, raw: AsyncIterable[bytes], limit: asyncio.Timeout) -> None:
        self._requests = requests
        self._raw = raw
        self._limit = limit
        self._each: AsyncIterator[bytes] | None = None  # made when it is used: one that never is, gRPC cannot close
        self._pauses = False

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        if self._each is None:
            self._each = aiter(self._raw)
        requests = self._requests
        message = anext(self._each)
        raw = await (message if self._pauses else requests.silent.heard(message, self._limit))
        self._pauses = requests.method.startswith(_OURS)
        return parsed(requests.parse, raw)


def guard(behaviour: Callable[..., Awaitable[_Resp]], requests: _Requests) -> Callable[..., Awaitable[_Resp]]:
    """`behaviour` of one answer, or one that writes its answers by itself, for a handler of a stream of raw requests."""

    async def call(raw: AsyncIterable[bytes], context: _Context[_Req, _Resp]) -> _Resp:
        limit = asyncio.timeout(None)
        try:
            async with limit:
                return await behaviour(await requests.of(raw, context, limit), context)
        except Exception as error:  # noqa: BLE001 - the one place where a call's errors are translated
            await _fail(context, requests.too_late() if limit.expired() else error, requests.method)

    return call


def guard_stream(
    behaviour: Callable[..., AsyncGenerator[_Resp, None]], requests: _Requests, stall_s: float
) -> Callable[..., Awaitable[None]]:
    """The same of one that yields its answers. It is closed before the call ends, in the call's own task."""

    async def call(raw: AsyncIterable[bytes], context: _Context[_Req, _Resp]) -> None:
        watch = StallWatch(stall_s)
        try:
            async with watch.limit:
                request = await requests.of(raw, context, watch.limit)
                async with aclosing(behaviour(request, context)) as stream:
                    async for message in stream:
                        watch.writing()
                        await context.write(message)
                        watch.written()
        except Exception as error:  # noqa: BLE001 - see above
            if not watch.limit.expired():
                await _fail(context, error, requests.method)
            _end_late(context, watch.unread(requests.method) if watch.stalled else requests.too_late())
        finally:
            watch.close()

    return call


class StallWatch:
    """Ends the block under `limit` when one write in it takes `stall_s`. Messages are many and stalls are few: a timer that
    looks now and then costs a message nothing, one set for each write costs more than all the rest that we do for it.
    """

    def __init__(self, stall_s: float) -> None:
        self.limit = asyncio.timeout(None)
        self.stalled = False
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._begun_s: float | None = None  # of the write that is under way
        self._timer: asyncio.TimerHandle | None = None

    def writing(self) -> None:
        """A write begins."""
        self._begun_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._stall_s, self._look)

    def written(self) -> None:
        """It is over."""
        self._begun_s = None

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def unread(self, method: str) -> DiptychError:
        """What a caller is told who does not take what it asked for."""
        error = DeadlineExceeded(f"no message was taken for {self._stall_s:g} s")
        log.info("call ended", method=method, reason=error)
        return error

    def _look(self) -> None:
        self._timer = None
        if self._begun_s is None:
            return
        due_s = self._begun_s + self._stall_s
        if due_s <= self._loop.time():
            self.stalled = True
            self.limit.reschedule(due_s)
        else:
            self._timer = self._loop.call_at(due_s, self._look)


def _end_late(context: _Context[_Req, _Resp], error: DiptychError) -> None:
    """Leave the status to be sent when the caller reads again: to abort the call would wait for that."""
    status = rpc_status.to_status(to_status(error))
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata(status.trailing_metadata)


async def _fail(context: _Context[_Req, _Resp], error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError):
        raise error  # gRPC's own business: the call was aborted or the server is being stopped
    if isinstance(error, NotImplementedError) and context.code() is grpc.StatusCode.UNIMPLEMENTED:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, context.details())  # generated code's word; no fault of ours
    if not isinstance(error, DiptychError):
        log.error("call failed", error, method=method)
        error = InternalError(f"{type(error).__name__} in {method}; see the worker's log")
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
