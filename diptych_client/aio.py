"""The client for asyncio, with the same names as `diptych_client.sync`.

    async with AsyncClient("127.0.0.1:50051") as client:
        async for piece in client.generate("Once upon a time", max_tokens=32, timeout_s=10):
            print(piece.text, end="", flush=True)

A task that is cancelled while it reads a stream cancels the call with it, and so does a loop over it that is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc
from diptych_client.answer import Answer, join
from diptych_client.connect import Metadata, Tls, call_metadata, channel_options
from diptych_client.errors import Cancelled, as_failure
from diptych_client.options import Conversation, Options, Prompt, build_request, build_tokenize_request

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncStream:
    """One running call. Iterate it once; `call` is gRPC's own object, `request` the message that was sent.

    A stream that nobody has any more is cancelled.
    """

    def __init__(self, call: _Call, request: pb.GenerateRequest, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` is the one that the call runs in."""
        self.call = call
        self.request = request
        self._loop = loop

    def __del__(self) -> None:
        # gRPC does so itself for threads, not for asyncio. Garbage is collected in any thread.
        if not self.call.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.call.cancel)

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        """The pieces as they come. Raises RpcFailed."""
        try:
            async for piece in self.call:
                yield piece
        except grpc.aio.AioRpcError as error:
            raise as_failure(error) from error
        except asyncio.CancelledError as error:
            reader = asyncio.current_task()
            if reader is None or reader.cancelling():
                raise
            # gRPC raises this also where the call was cancelled, or its channel closed, and not the task that reads.
            raise Cancelled(grpc.StatusCode.CANCELLED, "cancelled here") from error
        finally:
            self.call.cancel()

    async def answers(self) -> list[Answer]:
        """All answers, joined from the pieces that are still to come. Raises RpcFailed."""
        return join([piece async for piece in self])

    async def answer(self) -> Answer:
        """The first answer, for requests of one. Raises RpcFailed."""
        return (await self.answers())[0]

    def cancel(self) -> None:
        """End the call, at any moment."""
        self.call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """A connection to the router at `address` (host:port). Owns `channel`, which `close` gives back.

    Made and used in one running event loop.
    """

    def __init__(self, address: str, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        """Connects when it is first used. `tls` None speaks in the clear."""
        options = channel_options(tls)
        self.channel = (
            grpc.aio.insecure_channel(address, options)
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials, options)
        )
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self.channel)
        self._api_key = api_key

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, metadata: Metadata = (), **options: Unpack[Options]
    ) -> AsyncStream:
        """Start a request; it runs already when this returns. `timeout_s` is its whole time; None: the server's limit."""
        return self.send(build_request(prompt, **options), timeout_s=timeout_s, metadata=metadata)

    def send(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> AsyncStream:
        """The same with a message of one's own. Raises RuntimeError outside of a running event loop, and sends nothing then."""
        loop = asyncio.get_running_loop()
        call = self._stub.Generate(request, timeout=timeout_s, metadata=call_metadata(self._api_key, metadata))
        return AsyncStream(call, request, loop)

    async def models(self, *, timeout_s: float | None = 10.0) -> list[pb.Model]:
        """What is served. Raises RpcFailed."""
        answer = await self._ask(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return list(answer.models)

    async def tokenize(
        self,
        prompt: str | Conversation,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = 30.0,
    ) -> pb.TokenizeResponse:
        """The tokens that an answer to this prompt would be made from. Raises RpcFailed."""
        request = build_tokenize_request(prompt, model, add_special_tokens)
        return await self._ask(self._stub.Tokenize, request, timeout_s)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = 30.0
    ) -> pb.DetokenizeResponse:
        """The text of tokens. Raises RpcFailed."""
        return await self._ask(self._stub.Detokenize, pb.DetokenizeRequest(model=model, token_ids=token_ids), timeout_s)

    async def close(self) -> None:
        """End every call and the connection. Idempotent."""
        await self.channel.close(None)

    async def _ask(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, timeout_s: float | None
    ) -> _Response:
        try:
            return await method(request, timeout=timeout_s, metadata=call_metadata(self._api_key, ()))
        except grpc.aio.AioRpcError as error:
            raise as_failure(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
