"""The client for threads. One `Client` may be used by any number of them; a `Stream` by one.

    with Client("127.0.0.1:50051") as client:
        for piece in client.generate("Once upon a time", max_tokens=32, timeout_s=10):
            print(piece.text, end="", flush=True)

A stream that is left, by its loop or its `with` block, is cancelled: all that the request holds on the server is freed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc
from diptych_client.answer import Answer, join
from diptych_client.connect import Metadata, Tls, call_metadata, channel_options
from diptych_client.errors import EndedCall, as_failure
from diptych_client.options import Conversation, Options, Prompt, build_request, build_tokenize_request

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class RunningCall(EndedCall, Protocol):
    """Of gRPC's call object, what is used here."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        """The messages as they come."""
        ...

    def cancel(self) -> object:
        """End it."""
        ...


class Stream:
    """One running call. Iterate it once; `call` is gRPC's own object, `request` the message that was sent."""

    def __init__(self, call: RunningCall, request: pb.GenerateRequest) -> None:
        self.call = call
        self.request = request

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        """The pieces as they come. Raises RpcFailed."""
        try:
            yield from self.call
        except grpc.RpcError as error:
            raise as_failure(self.call) from error
        finally:
            self.call.cancel()

    def answers(self) -> list[Answer]:
        """All answers, joined from the pieces that are still to come. Raises RpcFailed."""
        return join(self)

    def answer(self) -> Answer:
        """The first answer, for requests of one. Raises RpcFailed."""
        return self.answers()[0]

    def cancel(self) -> None:
        """End the call, at any moment, from any thread."""
        self.call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """A connection to the router at `address` (host:port). Owns `channel`, which `close` gives back."""

    def __init__(self, address: str, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        """Connects when it is first used. `tls` None speaks in the clear."""
        options = channel_options(tls)
        self.channel = (
            grpc.insecure_channel(address, options)
            if tls is None
            else grpc.secure_channel(address, tls.credentials, options)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self.channel)
        self._api_key = api_key

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, metadata: Metadata = (), **options: Unpack[Options]
    ) -> Stream:
        """Start a request; it runs already when this returns. `timeout_s` is its whole time; None: the server's limit."""
        return self.send(build_request(prompt, **options), timeout_s=timeout_s, metadata=metadata)

    def send(self, request: pb.GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()) -> Stream:
        """The same with a message of one's own."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=call_metadata(self._api_key, metadata))
        return Stream(call, request)

    def models(self, *, timeout_s: float | None = 10.0) -> list[pb.Model]:
        """What is served. Raises RpcFailed."""
        answer = self._ask(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return list(answer.models)

    def tokenize(
        self,
        prompt: str | Conversation,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout_s: float | None = 30.0,
    ) -> pb.TokenizeResponse:
        """The tokens that an answer to this prompt would be made from. Raises RpcFailed."""
        request = build_tokenize_request(prompt, model, add_special_tokens)
        return self._ask(self._stub.Tokenize, request, timeout_s)

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = 30.0
    ) -> pb.DetokenizeResponse:
        """The text of tokens. Raises RpcFailed."""
        return self._ask(self._stub.Detokenize, pb.DetokenizeRequest(model=model, token_ids=token_ids), timeout_s)

    def close(self) -> None:
        """End every call and the connection. Idempotent."""
        self.channel.close()

    def _ask(
        self, method: grpc.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, timeout_s: float | None
    ) -> _Response:
        try:
            return method(request, timeout=timeout_s, metadata=call_metadata(self._api_key, ()))
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)  # gRPC's errors are the calls that they ended
            raise as_failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
