"""The gRPC server that each of our services stands in.

    build ──▶ bind ──▶ add servicers ──▶ start (NOT_SERVING) ──▶ set_serving(True) ⇄ set_serving(False) ──▶ stop(grace)

It brings health checking (for each service and for ""), reflection, keep-alives, message limits, and one place where
errors become statuses. An answer stream is always closed in the task of its call, so a servicer's `finally` runs before the
call is over, also when the client leaves while a message is being sent. Does not know what the services do.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import socket
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from contracts.errors import ConfigError, DeadlineExceeded, DiptychError, InternalError, InvalidRequest
from observability.log import get_logger
from rpc.channel import MAX_MESSAGE_BYTES
from rpc.errors import to_status
from rpc.tls import TlsConfig, TlsFiles, server_credentials

log = get_logger(__name__)
_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")
_Context = grpc.aio.ServicerContext[_Req, _Resp]
_Unary = Callable[[_Req, _Context[_Req, _Resp]], Awaitable[_Resp]]
_Stream = Callable[[_Req, _Context[_Req, _Resp]], AsyncGenerator[_Resp, None]]
_Sink = Callable[[_Req, _Context[_Req, _Resp]], Awaitable[None]]
_PENDING_CALLS = 20_000
_HANDLERS = 64  # that are kept ready; more than the services of one server have
_WILDCARDS = ("0.0.0.0", "::", "[::]", "")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen and how others reach it. Port 0 takes any free port; `advertise` is "", host or host:port.

    A caller that takes no message of its stream for `stall_s` loses the call. More connections than `max_connections` are
    closed at once, more streams than `max_streams` on one are refused, and a caller must say hello within `hello_s`. A message
    of a caller has at most `max_request_bytes`, or, if that is None, as many as any message.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 5.0
    stall_s: float = 60.0
    max_connections: int = 4096
    max_streams: int = 4096
    max_request_bytes: int | None = None
    hello_s: float = 20.0
    tls: TlsConfig | None = None

    @property
    def options(self) -> list[tuple[str, int]]:
        """As gRPC's server arguments."""
        return [
            ("grpc.so_reuseport", 0),  # else a second server on a busy port takes half of its calls, silently
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            # Without it gRPC's own patience with a ping counts, not the line above: a minute.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            # Ours ping every few seconds and are never struck; a thousand strikes are a flood.
            ("grpc.http2.max_ping_strikes", 1000),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams),
            # From a thousand calls that wait to be accepted on, gRPC cancels some of them at random, whoever's they are: one
            # caller's flood ended the calls of others. They wait now, a moment; who may be served is decided behind it.
            ("grpc.server.max_pending_requests", _PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", 2 * _PENDING_CALLS),
            ("grpc.server_handshake_timeout_ms", round(self.hello_s * 1e3)),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_request_bytes or self.max_message_bytes),
        ]


class RpcServer:
    """One listening gRPC server. Owns the port and the health table; `stop` gives both back."""

    def __init__(
        self,
        config: ServerConfig,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`interceptors` see each call before its service does; the DiptychErrors of their handlers become statuses."""
        self._config = config
        self._names = ("", *service_names)
        chain = [ErrorInterceptor(config.stall_s), *interceptors]
        self.grpc_server = grpc.aio.server(interceptors=chain, options=config.options)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        reflected = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self.grpc_server)
        self._port = 0
        self._serving: bool | None = None
        self._told: bool | None = None  # to every service
        self._telling = asyncio.Lock()

    def bind(self) -> int:
        """Take the port, so that a busy one is known before a model is loaded; return it. ConfigError when it cannot be."""
        where = join_address(self._config.host, self._config.port)
        _check_free(self._config.host, self._config.port)
        try:
            self._port = self._add_port(where)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {where}: {error}") from error
        return self._port

    def _add_port(self, where: str) -> int:
        tls = self._config.tls
        if tls is None or not tls.listens:
            return self.grpc_server.add_insecure_port(where)
        return self.grpc_server.add_secure_port(where, server_credentials(TlsFiles(tls)))

    async def start(self) -> int:
        """Answer calls (binding first if need be); return the port. Health says NOT_SERVING until told otherwise."""
        if not self._port:
            self.bind()
        await self.set_serving(False)
        await self.grpc_server.start()
        return self._port

    @property
    def port(self) -> int:
        """The bound port; 0 before it is bound."""
        return self._port

    @property
    def serving(self) -> bool:
        """What health checks say."""
        return self._serving is True

    def advertised_address(self, toward: str = "") -> str:
        """host:port under which others reach this server.

        `--advertise` if given (its port may be left out); else the host it listens on; else, when that is a wildcard, the
        address of the interface that leads to `toward` (host:port of the router), or the machine's name.
        """
        given = self._config.advertise
        if given:
            return given if has_port(given) else join_address(given, self._port)
        if self._config.host not in _WILDCARDS:
            return join_address(self._config.host, self._port)
        return join_address(_outward_host(toward), self._port)

    async def set_serving(self, serving: bool) -> None:
        """What health checks say from now on, for every service. Of two callers at once the later has the last word."""
        self._serving = serving
        async with self._telling:
            if self._serving != serving or self._told == serving:
                return
            self._told = None
            states = health_pb2.HealthCheckResponse
            for name in self._names:
                await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)
            self._told = serving

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let running ones end within `grace_s`, cancel the rest, give the port back. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self.grpc_server.stop(grace_s)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a servicer raises into a status: ours by its class, anything else into INTERNAL, logged in full.

    A stream whose caller does not read for `stall_s` is ended: else it would hold its request, and what that holds, for ever.
    """

    def __init__(self, stall_s: float) -> None:
        # A service's handlers are the same at each call; those that refuse a call are made for it, so there is a bound.
        self._wrapped = lru_cache(maxsize=_HANDLERS)(partial(_wrapped, stall_s=stall_s))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Req, _Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Req, _Resp] | None:
        """gRPC's hook: wraps the handler that will serve this call; None is gRPC's way of saying UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self._wrapped(handler, handler_call_details.method)


def _wrapped(
    handler: grpc.RpcMethodHandler[_Req, _Resp], method: str, stall_s: float
) -> grpc.RpcMethodHandler[_Req, _Resp]:
    behaviours: tuple[Callable[..., Any] | None, ...] = (  # the stubs know only the synchronous kinds
        handler.unary_unary,
        handler.unary_stream,
        handler.stream_unary,
        handler.stream_stream,
    )
    makers: tuple[Callable[..., grpc.RpcMethodHandler[_Req, _Resp]], ...] = (
        grpc.unary_unary_rpc_method_handler,
        grpc.unary_stream_rpc_method_handler,
        grpc.stream_unary_rpc_method_handler,
        grpc.stream_stream_rpc_method_handler,
    )
    for behaviour, make in zip(behaviours, makers, strict=True):
        if behaviour is not None:
            read, streams = _reader(handler), inspect.isasyncgenfunction(behaviour)
            guarded = _guard_stream(behaviour, method, read, stall_s) if streams else _guard(behaviour, method, read)
            # Bytes are read inside the guard: gRPC itself answers unreadable ones with UNKNOWN and logs a fault of ours.
            return make(guarded, None, handler.response_serializer)
    return handler


def _reader(handler: grpc.RpcMethodHandler[_Req, _Resp]) -> Callable[[Any], Any]:
    """What makes the servicer's request, one message or an iterator of them, of raw bytes. Raises InvalidRequest."""
    parse = handler.request_deserializer

    def read(raw: bytes) -> object:
        try:
            return raw if parse is None else parse(raw)
        except DecodeError as error:
            raise InvalidRequest("message", f"{len(raw)} bytes", f"cannot be read: {error}") from error

    return (lambda raw: _Messages(raw, read)) if handler.request_streaming else read


class _Messages:
    """The messages of a stream of requests, each read when it is asked for."""

    def __init__(self, raw: AsyncIterable[bytes], read: Callable[[bytes], object]) -> None:
        self._raw = raw
        self._read = read
        self._each: AsyncIterator[bytes] | None = None  # made when it is used: one that never is, gRPC cannot close

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        if self._each is None:
            self._each = aiter(self._raw)
        return self._read(await anext(self._each))


def _guard(behaviour: _Unary[_Req, _Resp], method: str, read: Callable[[Any], _Req]) -> _Unary[Any, _Resp]:
    async def call(raw: object, context: _Context[_Req, _Resp]) -> _Resp:
        try:
            return await behaviour(read(raw), context)
        except Exception as error:  # noqa: BLE001 - the one place where a call's errors are translated
            await _fail(context, error, method)

    return call


def _guard_stream(
    behaviour: _Stream[_Req, _Resp], method: str, read: Callable[[Any], _Req], stall_s: float
) -> _Sink[Any, _Resp]:
    async def call(raw: object, context: _Context[_Req, _Resp]) -> None:
        watch = _StallWatch(stall_s)
        try:
            async with watch.limit, aclosing(behaviour(read(raw), context)) as stream:
                async for message in stream:
                    watch.writing()
                    await context.write(message)
                    watch.written()
        except Exception as error:  # noqa: BLE001 - see above
            if not watch.limit.expired():
                await _fail(context, error, method)
            unread = _Unread(f"no message was taken for {stall_s:g} s")
            log.info("call ended", method=method, reason=unread)
            _end_unread(context, unread)
        finally:
            watch.close()

    return call


class _Unread(DeadlineExceeded):
    """The caller does not take what it asked for."""


class _StallWatch:
    """Ends the block under `limit` when one write in it takes `stall_s`. Messages are many and stalls are few: a timer that
    looks now and then costs a message nothing, one set for each write costs more than all the rest that we do for it.
    """

    def __init__(self, stall_s: float) -> None:
        self.limit = asyncio.timeout(None)
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

    def _look(self) -> None:
        self._timer = None
        if self._begun_s is None:
            return
        due_s = self._begun_s + self._stall_s
        if due_s <= self._loop.time():
            self.limit.reschedule(due_s)
        else:
            self._timer = self._loop.call_at(due_s, self._look)


def _end_unread(context: _Context[_Req, _Resp], error: _Unread) -> None:
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


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    bare = host.strip("[]") or "0.0.0.0"
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


def has_port(address: str) -> bool:
    """Whether an address ends with a port: "h:1" and "[::1]:1" do, "h" and "::1" do not."""
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdigit() and (":" not in host or host.endswith("]"))


def _check_free(host: str, port: int) -> None:
    """gRPC says only "failed to bind"; a bind of our own has the system's reason. Raises ConfigError."""
    where = join_address(host, port)
    bare = host.strip("[]") or "0.0.0.0"
    try:
        family, kind, proto, _, place = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error


def _outward_host(toward: str) -> str:
    """The local address from which `toward` would be reached; connecting a UDP socket sends nothing."""
    host, _, port = toward.rpartition(":")
    if not host or not port.isdigit():
        return socket.gethostname()
    try:
        family, kind, proto, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        log.warning("no route to the router yet; announcing the machine's name", router=toward, reason=error)
        return socket.gethostname()
