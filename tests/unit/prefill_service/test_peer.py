"""A decode worker over gRPC is the same HandoffPeer as in one process; peers are kept per life and let go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from contracts import wire_handoff
from contracts.clock import VirtualClock
from contracts.errors import DiptychError, LayoutMismatch, NoRoom, StaleEpoch, UnknownHandoff, WorkerLost
from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import handoff_pb2, handoff_pb2_grpc
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.ticket import (
    AbortRequest,
    AbortResponse,
    CommitResponse,
    ConnectRequest,
    ConnectResponse,
    Full,
    Grant,
    RenewRequest,
    RenewResponse,
    ReserveRequest,
    Ticket,
)
from contracts.worker import ConnectorAddress, WorkerRef
from decode_service.handoff_servicer import HandoffServicer
from prefill_service.peer import GrpcPeer, PeerPool
from rpc.server import RpcServer, ServerConfig

P, D = WorkerRef("p", 1), WorkerRef("d", 2)
LAYOUT = KVLayout("m", "float32", 2, 1, 4, 4)
CONNECT = ConnectRequest(P, D, LAYOUT)
RESERVE = ReserveRequest("h", P, D, 9, (b"a", b"b"))
TICKET = Ticket("h", P, D, LAYOUT, GenerationRequest("h", (1, 2), SamplingParams(), (3,)), 2, 0, 1)
GRANT = Grant("h", P, D, (4, 5), 4, 2.5, ((ConnectorAddress("tcp", "h:1"), 2**63 + 5),))


class Peer:
    """Answers, or raises what it is told to."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.error: DiptychError | None = None

    def _hear(self, message: object) -> None:
        self.heard.append(message)
        if self.error is not None:
            raise self.error

    async def connect(self, request: ConnectRequest) -> ConnectResponse:
        self._hear(request)
        return ConnectResponse(P, D, (ConnectorAddress("shm", "x"),))

    async def reserve(self, request: ReserveRequest) -> Grant:
        self._hear(request)
        return GRANT

    async def commit(self, ticket: Ticket) -> CommitResponse:
        self._hear(ticket)
        return CommitResponse("h", P, D, 7)

    async def abort(self, request: AbortRequest) -> AbortResponse:
        self._hear(request)
        return AbortResponse("h", P, D)

    async def renew(self, request: RenewRequest) -> RenewResponse:
        self._hear(request)
        return RenewResponse(P, D, ("h2",), 3.5)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Peer, GrpcPeer, RpcServer]]:
    peer, server = Peer(), RpcServer(ServerConfig(), ())
    handoff_pb2_grpc.add_HandoffServicer_to_server(HandoffServicer(peer), server.grpc_server)
    remote = GrpcPeer(D, f"127.0.0.1:{await server.start()}")
    yield peer, remote, server
    await remote.close()
    await server.stop(0)


async def test_every_message_and_answer_arrives_whole() -> None:
    async with served() as (peer, remote, _):
        abort, renew = AbortRequest("h", P, D, "left"), RenewRequest(P, D, ("h", "h2"))
        assert await remote.connect(CONNECT) == ConnectResponse(P, D, (ConnectorAddress("shm", "x"),))
        assert await remote.reserve(RESERVE) == GRANT
        assert await remote.commit(TICKET) == CommitResponse("h", P, D, 7)
        assert await remote.abort(abort) == AbortResponse("h", P, D)
        assert await remote.renew(renew) == RenewResponse(P, D, ("h2",), 3.5)
        assert peer.heard == [CONNECT, RESERVE, TICKET, abort, renew]


@pytest.mark.parametrize(
    "error",
    [LayoutMismatch("dtype", "a", "b"), StaleEpoch("d", 2, 1), UnknownHandoff("h has ended"), NoRoom("full", 0.25)],
    ids=lambda error: type(error).__name__,
)
async def test_errors_arrive_as_themselves(error: DiptychError) -> None:
    async with served() as (peer, remote, _):
        peer.error = error
        for call in (remote.connect(CONNECT), remote.commit(TICKET), remote.abort(AbortRequest("h", P, D, ""))):
            with pytest.raises(type(error)) as caught:
                await call
            assert caught.value.message == error.message


async def test_no_room_says_when_to_ask_again() -> None:
    async with served() as (peer, remote, _):
        peer.error = NoRoom("full", 0.25)
        with pytest.raises(NoRoom) as caught:
            await remote.reserve(RESERVE)
        assert caught.value.retry_after_s == 0.25


class Another(handoff_pb2_grpc.HandoffServicer):
    """Another life, at the same address, that has no room."""

    async def Reserve(self, request: handoff_pb2.ReserveRequest, context: object) -> handoff_pb2.ReserveResponse:
        full = wire_handoff.full_to_pb(Full(P, WorkerRef("d", 3), 0.25))
        return handoff_pb2.ReserveResponse(no_room=full)


async def test_no_room_in_another_life_is_no_answer_of_this_one() -> None:
    server = RpcServer(ServerConfig(), ())
    handoff_pb2_grpc.add_HandoffServicer_to_server(Another(), server.grpc_server)
    remote = GrpcPeer(D, f"127.0.0.1:{await server.start()}")
    with pytest.raises(StaleEpoch, match="epoch of d: expected 2, got 3"):
        await remote.reserve(RESERVE)
    await remote.close()
    await server.stop(0)


async def test_nobody_there_means_no_answer() -> None:
    async with served() as (_, remote, server):
        await server.stop(0)
        for call in (remote.connect(CONNECT), remote.reserve(RESERVE), remote.commit(TICKET)):
            with pytest.raises(WorkerLost):
                await call


async def test_a_peer_that_was_let_go_is_lost_to_whoever_still_asks() -> None:
    async with served() as (_, remote, _server):
        await remote.close()
        abort, renew = AbortRequest("h", P, D, "left"), RenewRequest(P, D, ("h",))
        for call in (
            remote.connect(CONNECT), remote.reserve(RESERVE), remote.commit(TICKET), remote.abort(abort), remote.renew(renew),
        ):  # fmt: skip
            with pytest.raises(WorkerLost):
                await call


class Kept(GrpcPeer):
    """Notes whether it was closed."""

    closed = False

    async def close(self) -> None:
        self.closed = True
        await super().close()


async def test_a_peer_is_kept_for_one_life() -> None:
    pool = PeerPool(VirtualClock(), Kept)
    first = pool.peer(D, "h:1")
    assert pool.peer(D, "h:1") is first
    assert pool.peer(WorkerRef("e", 1), "h:1") is not first
    assert pool.peer(WorkerRef("d", 3), "h:1") is not first
    await pool.close()


async def test_hand_offs_of_the_old_life_may_still_hear_that_it_is_old() -> None:
    clock = VirtualClock()
    pool = PeerPool(clock, Kept, grace_s=9.0)
    first, second = pool.peer(D, "h:1"), pool.peer(WorkerRef("d", 3), "h:1")
    assert isinstance(first, Kept)
    assert isinstance(second, Kept)
    await clock.advance(8.9)
    assert not first.closed
    await clock.advance(0.2)
    assert first.closed
    assert not second.closed
    await pool.close()
    assert second.closed


async def test_a_late_word_of_an_old_life_does_not_take_the_peer_of_the_new_one() -> None:
    clock = VirtualClock()
    pool = PeerPool(clock, Kept, grace_s=9.0)
    new = pool.peer(WorkerRef("d", 3), "h:1")
    old = pool.peer(D, "h:1")
    await clock.advance(20.0)
    assert isinstance(new, Kept)
    assert old is not new
    assert not new.closed
    assert pool.peer(WorkerRef("d", 3), "h:1") is new
    await pool.close()


async def test_all_are_closed_with_the_pool_whatever_they_wait_for() -> None:
    pool = PeerPool(VirtualClock(), Kept)
    peers = [pool.peer(WorkerRef("d", epoch), "h:1") for epoch in (1, 2, 3)]
    await pool.close()
    assert all(isinstance(peer, Kept) and peer.closed for peer in peers)


async def test_the_least_recently_used_is_let_go() -> None:
    pool = PeerPool(VirtualClock(), Kept, max_peers=2)
    a, b = pool.peer(WorkerRef("a", 1), "h:1"), pool.peer(WorkerRef("b", 1), "h:2")
    assert pool.peer(WorkerRef("a", 1), "h:1") is a
    pool.peer(WorkerRef("c", 1), "h:3")
    assert pool.peer(WorkerRef("a", 1), "h:1") is a
    assert pool.peer(WorkerRef("b", 1), "h:2") is not b
    await pool.close()
