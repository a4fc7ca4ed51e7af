"""The lock at both doors: nothing behind it is reached without a key that a doorkeeper knows.

    HTTP  ──Lock──▶ application         401 {"error": …, "code": "invalid_api_key"}     open: OPEN_PATHS [/metrics]
    gRPC  ──KeyInterceptor──▶ services  UNAUTHENTICATED                                 open: health, what the router names

What is not named open is closed, so a route that is added later is. Does not know keys or what is behind the doors.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
from grpc_health.v1 import health
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.errors import Unauthenticated
from dashboard.files import PAGE_PATHS
from router.caller import ANYBODY, Caller
from router.http.answer import error_response
from router.http.request_name import named
from router.keys import Doorkeeper

OPEN_PATHS = frozenset({"/health", "/ping", "/version"}) | PAGE_PATHS  # its events need a key
METRICS_PATH = "/metrics"
AUTHORIZATION = "authorization"
_SCOPE_KEY = "diptych.caller"
_DRAIN_BYTES = 2**20
_DRAIN_S = 5.0
_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")


class Lock:
    """An ASGI application that lets those requests through to `app` whose caller is known, or whose path is open."""

    def __init__(
        self, app: ASGIApp, doorkeeper: Doorkeeper, open_paths: frozenset[str], on_refused: Callable[[str], object]
    ) -> None:
        """`on_refused` hears of each that is not let in, by the name of the door."""
        self._app = app
        self._on_refused = on_refused
        self._doorkeeper = doorkeeper
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            given = [value for name, value in scope["headers"] if name == AUTHORIZATION.encode()]
            try:
                scope[_SCOPE_KEY] = self._doorkeeper.caller(given[0].decode("latin-1") if given else "")
            except Unauthenticated as error:
                self._on_refused("http")
                await _read_on(receive)
                response = named(error_response(error), Headers(scope=scope), lambda: uuid.uuid4().hex)
                response.headers["Connection"] = "close"  # its body may not have been read to the end
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def caller_of(scope: Scope) -> Caller:
    """Whose request it is; ANYBODY where no lock is before the application, and on open paths."""
    caller = scope.get(_SCOPE_KEY, ANYBODY)
    assert isinstance(caller, Caller)
    return caller


async def _read_on(receive: Receive) -> None:
    """Drop the body, within bounds: a client that still writes does not hear an answer."""
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while size <= _DRAIN_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through whose caller is known, and those to health checking and to services in `open_services`."""

    def __init__(
        self, doorkeeper: Doorkeeper, open_services: Sequence[str], on_refused: Callable[[str], object]
    ) -> None:
        """`on_refused` hears of each that is not let in, by the name of the door."""
        self._doorkeeper = doorkeeper
        self._on_refused = on_refused
        self._open_services = frozenset((*open_services, health.SERVICE_NAME))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Req, _Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Req, _Resp] | None:
        """gRPC's hook. Who is not known gets the answer at once, whatever they wanted and before they send it."""
        service = str(handler_call_details.method).strip("/").partition("/")[0]
        if service not in self._open_services:
            try:
                self._doorkeeper.caller(authorization(handler_call_details.invocation_metadata))
            except Unauthenticated as error:
                self._on_refused("grpc")
                return _refusal(error)
        return await continuation(handler_call_details)


def authorization(metadata: Sequence[tuple[str, str | bytes]] | None) -> str:
    """The first `authorization` of a call's metadata, "" without one."""
    return next((str(value) for key, value in metadata or () if key == AUTHORIZATION), "")


def _refusal(error: Unauthenticated) -> grpc.RpcMethodHandler[_Req, _Resp]:
    async def refuse(requests: AsyncIterator[_Req], context: object) -> AsyncIterator[_Resp]:
        del requests, context
        raise error
        yield  # what makes it a stream, so that no message is waited for

    return grpc.stream_stream_rpc_method_handler(refuse)
