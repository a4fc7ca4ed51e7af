"""A gRPC channel whose calls prove that this process knows the cluster's secret: any channel, with a proof on every call.

    first call ──▶ Challenge ──▶ a session, and the server's own proof ──▶ every call: a number and a proof of its own
    a call is refused as not of this cluster ──▶ (the server may have started again) a new session, and, if its requests do
    not stream, once more; refused again ──▶ the caller hears it

Nothing but the challenge is sent to a server that has not proven itself. Does not know services, TLS or what is proven.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from contracts.errors import NotOfThisCluster
from contracts.pb.diptych.v1 import cluster_pb2, cluster_pb2_grpc
from contracts.secret import ClusterSecret, new_nonce
from rpc.call_proof import CallSession, Challenge
from rpc.channel import ChannelConfig, ChannelOpener
from rpc.errors import from_rpc_error

_CHALLENGE_TIMEOUT_S = 5.0
_Metadata = Sequence[tuple[str, str | bytes]] | grpc.aio.Metadata | None


def proving(opener: ChannelOpener, secret: ClusterSecret | None) -> ChannelOpener:
    """The same opener, its channels' calls with proofs; as it is where there is no secret."""
    if secret is None:
        return opener

    def open_proving(address: str, config: ChannelConfig | None = None) -> grpc.aio.Channel:
        return ProvingChannel(opener(address, config), secret, address)

    return open_proving


class ProvingChannel(grpc.aio.Channel):
    """Owns `inner`. Calls raise NotOfThisCluster where the server does not prove itself. Must be used in one event loop."""

    def __init__(self, inner: grpc.aio.Channel, secret: ClusterSecret, address: str) -> None:
        self._inner = inner
        self._secret = secret
        self._address = address
        self._beginning: asyncio.Future[CallSession] | None = None

    async def session(self) -> CallSession:
        """The session with the server, begun if need be. Raises NotOfThisCluster, or what the connection came to."""
        if self._beginning is None or (self._beginning.done() and _failed(self._beginning)):
            self._beginning = asyncio.ensure_future(self._begin())
            self._beginning.add_done_callback(_failed)
        return await asyncio.shield(self._beginning)

    def forget(self, session: CallSession) -> None:
        """The server does not know it any more."""
        beginning = self._beginning
        if beginning is not None and beginning.done() and not _failed(beginning) and beginning.result() is session:
            self._beginning = None

    async def _begin(self) -> CallSession:
        nonce = new_nonce()
        request = cluster_pb2.ChallengeRequest(nonce=nonce)
        try:
            answer = await cluster_pb2_grpc.ClusterStub(self._inner).Challenge(request, timeout=_CHALLENGE_TIMEOUT_S)
            return CallSession(self._secret, nonce, Challenge(answer.session, answer.challenge, answer.proof))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                said = "it has no cluster secret: both must be started with the same --cluster-secret-file"
                raise NotOfThisCluster(f"{self._address}: {said}") from error
            raise
        except NotOfThisCluster as error:
            raise NotOfThisCluster(f"{self._address}: {error.message}") from error

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait((self._beginning,))
            _failed(self._beginning)
        await self._inner.close(grace)

    async def __aenter__(self) -> Self:
        """See grpc.aio.Channel."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See grpc.aio.Channel."""
        await self.close(None)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._inner.channel_ready()

    def unary_unary(self, method: str, request_serializer: Any = None, *args: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        inner: Any = self._inner.unary_unary(method, None, *args, **named)
        serialise = _serialiser(request_serializer)

        async def call(request: Any, *, metadata: _Metadata = None, **options: Any) -> Any:
            body = serialise(request)
            session = await self.session()
            try:
                return await inner(body, metadata=_with(session.token(method, body), metadata), **options)
            except grpc.aio.AioRpcError as error:
                if not isinstance(from_rpc_error(error, self._address), NotOfThisCluster):
                    raise
                self.forget(session)
            session = await self.session()
            return await inner(body, metadata=_with(session.token(method, body), metadata), **options)

        return call

    def unary_stream(self, method: str, request_serializer: Any = None, *args: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        inner: Any = self._inner.unary_stream(method, None, *args, **named)
        serialise = _serialiser(request_serializer)

        def call(request: Any, *, metadata: _Metadata = None, **options: Any) -> ProvingStream:
            body = serialise(request)

            def begin(session: CallSession) -> Any:
                return inner(body, metadata=_with(session.token(method, body), metadata), **options)

            return ProvingStream(self, begin)

        return call

    def stream_unary(self, method: str, request_serializer: Any = None, *args: Any, **named: Any) -> Any:
        """No service between our processes has such a call."""
        raise NotImplementedError(method)

    def stream_stream(self, method: str, request_serializer: Any = None, *args: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        inner: Any = self._inner.stream_stream(method, request_serializer, *args, **named)

        def call(requests: Any = None, *, metadata: _Metadata = None, **options: Any) -> ProvingStream:
            def begin(session: CallSession) -> Any:
                return inner(requests, metadata=_with(session.token(method, b""), metadata), **options)

            return ProvingStream(self, begin)

        return call


class ProvingStream:
    """A call that begins when it is first read or written. Has what we use of grpc.aio's calls."""

    def __init__(self, channel: ProvingChannel, begin: Callable[[CallSession], Any]) -> None:
        self._channel = channel
        self._begin = begin
        self._call: Any = None
        self._session: CallSession | None = None
        self._cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        """The answers."""
        return self._messages()

    async def read(self) -> Any:
        """See grpc.aio.StreamStreamCall."""
        call = await self._begun()
        return await self._judged(call.read())

    async def write(self, request: Any) -> None:
        """See grpc.aio.StreamStreamCall."""
        call = await self._begun()
        await self._judged(call.write(request))

    def cancel(self) -> bool:
        """See grpc.aio.Call. One that has not begun never does."""
        self._cancelled = True
        return self._call is not None and bool(self._call.cancel())

    async def _messages(self) -> AsyncIterator[Any]:
        call = await self._begun()
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            self._look(error)
            raise

    async def _begun(self) -> Any:
        if self._call is None:
            session = await self._channel.session()
            if self._cancelled:
                raise asyncio.CancelledError
            if self._call is None:
                self._session, self._call = session, self._begin(session)
        return self._call

    async def _judged(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except grpc.aio.AioRpcError as error:
            self._look(error)
            raise

    def _look(self, error: grpc.aio.AioRpcError) -> None:
        if self._session is not None and isinstance(from_rpc_error(error, "it"), NotOfThisCluster):
            self._channel.forget(self._session)


def _with(token: tuple[str, str | bytes], metadata: _Metadata) -> list[tuple[str, str | bytes]]:
    """What the caller says beside its message, and the proof."""
    return [*(metadata or ()), token]


def _serialiser(given: Any) -> Callable[[Any], bytes]:
    return given if given is not None else bytes


def _failed(beginning: asyncio.Future[CallSession]) -> bool:
    """Whether it has come to nothing; its error, seen here, is an answer to whoever waited for it."""
    return beginning.cancelled() or beginning.exception() is not None
