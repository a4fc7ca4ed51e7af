"""A channel that proves itself: one challenge for many calls, and what becomes of calls when there is none to be had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from contracts.errors import NotOfThisCluster, WorkerLost
from contracts.pb.diptych.v1 import cluster_pb2, cluster_pb2_grpc, registry_pb2, registry_pb2_grpc
from contracts.secret import ClusterSecret
from rpc.call_proof import CallProver
from rpc.channel import open_channel
from rpc.errors import from_rpc_error
from rpc.proof_guard import ProofGuard
from rpc.proving_channel import ProvingChannel, proving
from rpc.server import RpcServer, ServerConfig

SECRET = ClusterSecret(b"the secret of one cluster")


class Counting(CallProver):
    """Counts challenges; `hold` keeps them from being answered. Forgets its life when `lives` changes."""

    def __init__(self) -> None:
        super().__init__(SECRET)
        self.num_begun = 0

    def begin(self, nonce: bytes):  # type: ignore[no-untyped-def]
        self.num_begun += 1
        return super().begin(nonce)


class Echo(registry_pb2_grpc.RegistryServicer):
    async def Leave(self, request: registry_pb2.LeaveRequest, context: object) -> registry_pb2.LeaveResponse:
        del request, context
        return registry_pb2.LeaveResponse(num_others=7)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, ProofGuard]]:
    guard = ProofGuard(SECRET)
    guard._prover = Counting()
    server = RpcServer(ServerConfig(), (), (guard,))
    registry_pb2_grpc.add_RegistryServicer_to_server(Echo(), server.grpc_server)
    guard.serve(server.grpc_server)
    yield f"127.0.0.1:{await server.start()}", guard
    await server.stop(0)


def begun(guard: ProofGuard) -> int:
    assert isinstance(guard._prover, Counting)
    return guard._prover.num_begun


async def leave(channel: grpc.aio.Channel) -> int:
    answer = await registry_pb2_grpc.RegistryStub(channel).Leave(registry_pb2.LeaveRequest(), timeout=5)
    return int(answer.num_others)


async def test_many_calls_at_once_share_one_challenge() -> None:
    async with served() as (address, guard), proving(open_channel, SECRET)(address, None) as channel:
        assert await asyncio.gather(*(leave(channel) for _ in range(50))) == [7] * 50
        assert begun(guard) == 1
        guard._prover = Counting()  # another life
        assert await asyncio.gather(*(leave(channel) for _ in range(50))) == [7] * 50
        assert begun(guard) <= 50


async def test_what_a_caller_says_beside_its_message_goes_along_with_the_proof() -> None:
    heard: list[tuple[str, object]] = []

    class Ear(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            async def one(body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
                heard.extend(context.invocation_metadata() or ())
                return body

            async def many(body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
                yield await one(body, context)

            async def both(
                bodies: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
            ) -> AsyncIterator[bytes]:
                async for body in bodies:
                    yield await one(body, context)

            match str(details.method).rpartition("/")[2]:
                case "one":
                    return grpc.unary_unary_rpc_method_handler(one)  # type: ignore[arg-type]
                case "many":
                    return grpc.unary_stream_rpc_method_handler(many)  # type: ignore[arg-type]
                case _:
                    return grpc.stream_stream_rpc_method_handler(both)  # type: ignore[arg-type]

    guard = ProofGuard(SECRET)
    server = RpcServer(ServerConfig(), (), (guard,))
    guard.serve(server.grpc_server)
    server.grpc_server.add_generic_rpc_handlers((Ear(),))
    async with proving(open_channel, SECRET)(f"127.0.0.1:{await server.start()}", None) as channel:
        await channel.unary_unary("/diptych.v1.X/one")(b"a", metadata=(("traceparent", "1"),))
        async for _ in channel.unary_stream("/diptych.v1.X/many")(
            b"a", metadata=grpc.aio.Metadata(("traceparent", "2"))
        ):
            pass
        async for _ in channel.stream_stream("/diptych.v1.X/both")(iter([b"a"]), metadata=[("traceparent", "3")]):
            pass
        await channel.unary_unary("/diptych.v1.X/one")(b"a")
    assert [value for key, value in heard if key == "traceparent"] == ["1", "2", "3"]
    await server.stop(0)


async def test_without_a_secret_the_channel_is_as_it_was() -> None:
    assert proving(open_channel, None) is open_channel


async def test_nobody_there_is_the_connections_word_and_is_tried_again() -> None:
    channel = proving(open_channel, SECRET)("127.0.0.1:1", None)
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await leave(channel)
        assert isinstance(from_rpc_error(caught.value, "it"), WorkerLost)
    assert channel.get_state() is not grpc.ChannelConnectivity.READY
    await channel.close()


class Mute(cluster_pb2_grpc.ClusterServicer):
    """Never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def Challenge(self, request: cluster_pb2.ChallengeRequest, context: object) -> cluster_pb2.ChallengeResponse:
        del request, context
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_close_while_it_begins_ends_the_calls_and_leaves_nothing() -> None:
    server, mute = RpcServer(ServerConfig(), ()), Mute()
    cluster_pb2_grpc.add_ClusterServicer_to_server(mute, server.grpc_server)
    address = f"127.0.0.1:{await server.start()}"
    channel = ProvingChannel(open_channel(address), SECRET, address)
    calls: Sequence[asyncio.Task[int]] = [asyncio.ensure_future(leave(channel)) for _ in range(3)]
    await mute.asked.wait()
    calls[0].cancel()  # whose client left; the others go on
    await asyncio.wait(calls[:1])
    assert not calls[1].done()
    await channel.close()
    await asyncio.wait(calls)
    assert all(call.cancelled() or isinstance(call.exception(), grpc.RpcError) for call in calls)
    await server.stop(0)


class Lying(cluster_pb2_grpc.ClusterServicer):
    """Takes the call and proves nothing."""

    async def Challenge(self, request: cluster_pb2.ChallengeRequest, context: object) -> cluster_pb2.ChallengeResponse:
        del request, context
        return cluster_pb2.ChallengeResponse(session=1, challenge=bytes(16), proof=bytes(32))


async def test_nothing_but_the_challenge_is_sent_to_who_does_not_prove_himself() -> None:
    server, heard = RpcServer(ServerConfig(), ()), []

    class Ear(Echo):
        async def Leave(self, request: registry_pb2.LeaveRequest, context: object) -> registry_pb2.LeaveResponse:
            heard.append(request)
            return await super().Leave(request, context)

    cluster_pb2_grpc.add_ClusterServicer_to_server(Lying(), server.grpc_server)
    registry_pb2_grpc.add_RegistryServicer_to_server(Ear(), server.grpc_server)
    async with proving(open_channel, SECRET)(f"127.0.0.1:{await server.start()}", None) as channel:
        with pytest.raises(NotOfThisCluster, match=r"127\.0\.0\.1:.*another cluster secret"):
            await leave(channel)
        stream = channel.stream_stream("/diptych.v1.Decode/Session")(iter([b"a prompt"]))
        with pytest.raises(NotOfThisCluster):
            await stream.read()
        assert heard == []
    await server.stop(0)
