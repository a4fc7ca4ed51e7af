"""One life of a router or worker as the network knows it: what it serves, and how what its servicers say becomes a status."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import grpc
from grpc.aio import Metadata

from rpc.calls import ErrorInterceptor


class Process:
    """One life of a router or worker: a name, an address, and the methods it serves. Stands in for grpc.aio.Server."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.alive = True
        self._handlers: dict[str, grpc.RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers) -> None:
        """What a stub generator calls; the registered handlers are the same."""

    def add_registered_method_handlers(self, service: str, handlers) -> None:
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    async def handler(self, path: str) -> grpc.RpcMethodHandler:
        """With the interceptor that a real server has."""

        async def found(details) -> grpc.RpcMethodHandler:
            return self._handlers[path]

        handler = await ErrorInterceptor(60.0).intercept_service(found, SimpleNamespace(method=path))
        assert handler is not None
        return handler


class Aborted(Exception):
    """What a servicer's `context.abort` raises."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing) -> None:
        super().__init__(details)
        self.error = grpc.aio.AioRpcError(code, Metadata(), Metadata(*trailing), details)


class Context:
    """As much of a ServicerContext as our servicers and the interceptor use."""

    def __init__(self, write: Callable[[object], None], request: bytes | None = None) -> None:
        """`request` is the one message of a call that has one."""
        self._write = write
        self._request = request

    async def read(self) -> bytes | None:
        return self._request

    async def write(self, message) -> None:
        self._write(message)

    async def abort(self, code, details="", trailing_metadata=()) -> None:
        raise Aborted(code, details, trailing_metadata)


def unavailable(why: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), why)
