"""The server's side of calls that prove that their caller knows the cluster's secret: before a service sees anything of them.

    call ──▶ open service (users', health) ──▶ through
         └─▶ any other: proof of method and body ──▶ right ──▶ through        wrong, none, said again ──▶ NotOfThisCluster

A refused call is counted and logged, and has cost no service anything. Does not know what the services do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from contracts.errors import NotOfThisCluster
from contracts.pb.diptych.v1 import cluster_pb2, cluster_pb2_grpc
from contracts.secret import ClusterSecret
from observability.log import get_logger
from observability.seldom import Seldom
from rpc.call_proof import CallProver, Challenge, Metadata
from rpc.calls import parsed
from rpc.server import is_loopback

log = get_logger(__name__)
_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")
_OURS = "diptych.v1."
CLUSTER_SERVICE: str = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name
_OPEN = frozenset({CLUSTER_SERVICE, "diptych.v1.Inference"})


def say_unproven(host: str) -> None:
    """Say plainly that this process, which listens at `host`, has no secret: louder where other machines may reach it."""
    say = log.info if is_loopback(host) else log.warning
    say(
        "no cluster secret (--cluster-secret-file): hand-offs and calls between processes are not authenticated",
        host=host,
    )


class ProofGuard(grpc.aio.ServerInterceptor):
    """For one process's servers. `on_refused` hears the method of each call that is refused."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._prover = CallProver(secret)
        self.on_refused: Callable[[str], object] | None = None
        self._seldom = Seldom()

    def serve(self, server: grpc.aio.Server) -> None:
        """Answer those who ask what to prove themselves with."""
        cluster_pb2_grpc.add_ClusterServicer_to_server(
            _ClusterServicer(lambda nonce: self._prover.begin(nonce)), server
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Req, _Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Req, _Resp] | None:
        """gRPC's hook. A call whose requests stream is judged here, any other when its body is there."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        service = method.strip("/").partition("/")[0]
        if handler is None or not service.startswith(_OURS) or service in _OPEN:
            return handler
        metadata = tuple(handler_call_details.invocation_metadata or ())
        if handler.request_streaming:
            try:
                self._check(metadata, method, b"")
            except NotOfThisCluster as error:
                return _refusal(error)
            return handler
        return self._with_body(handler, metadata, method)

    def _with_body(
        self, handler: grpc.RpcMethodHandler[_Req, _Resp], metadata: Metadata, method: str
    ) -> grpc.RpcMethodHandler[_Req, _Resp]:
        parse: Callable[[bytes], Any] | None = handler.request_deserializer
        one: Callable[..., Any] | None = handler.unary_unary
        many: Callable[..., Any] | None = handler.unary_stream

        def read(raw: bytes) -> object:
            self._check(metadata, method, raw)
            return parsed(parse, raw)

        async def answer(raw: bytes, context: object) -> object:
            assert one is not None
            return await one(read(raw), context)

        async def stream(raw: bytes, context: object) -> AsyncIterator[object]:
            assert many is not None
            async with aclosing(many(read(raw), context)) as messages:
                async for message in messages:
                    yield message

        make: Callable[..., grpc.RpcMethodHandler[_Req, _Resp]]
        if one is not None:
            make = grpc.unary_unary_rpc_method_handler
            return make(answer, None, handler.response_serializer)
        make = grpc.unary_stream_rpc_method_handler
        return make(stream, None, handler.response_serializer)

    def _check(self, metadata: Metadata, method: str, body: bytes) -> None:
        try:
            self._prover.check(metadata, method, body)
        except NotOfThisCluster as error:
            self._say(method, error)
            if self.on_refused is not None:
                self.on_refused(method)
            raise

    def _say(self, method: str, error: NotOfThisCluster) -> None:
        more = self._seldom.due()
        if more is not None:
            log.warning("a call was refused", method=method, reason=error, more_before=more)


class _ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, begin: Callable[[bytes], Challenge]) -> None:
        self._begin = begin

    async def Challenge(
        self,
        request: cluster_pb2.ChallengeRequest,
        context: grpc.aio.ServicerContext[cluster_pb2.ChallengeRequest, cluster_pb2.ChallengeResponse],
    ) -> cluster_pb2.ChallengeResponse:
        """See the service's definition."""
        del context
        made = self._begin(request.nonce)
        return cluster_pb2.ChallengeResponse(session=made.session, challenge=made.challenge, proof=made.proof)


def _refusal(error: NotOfThisCluster) -> grpc.RpcMethodHandler[_Req, _Resp]:
    async def refuse(requests: AsyncIterator[_Req], context: object) -> AsyncIterator[_Resp]:
        del requests, context
        raise error
        yield  # what makes it a stream, so that no message is waited for

    return grpc.stream_stream_rpc_method_handler(refuse)
