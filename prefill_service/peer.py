"""The decode side of hand-offs as a prefill worker reaches it: `HandoffPeer` over the gRPC service Handoff.

    PeerPool.peer(ref, address) ──▶ GrpcPeer      one channel per life of a decode worker

A decode worker's new epoch gets a new peer. Hand-offs that began with the old one still talk through it, and are refused by
the new life at once; so it is closed only after `grace_s`. Sets no time limits: the sender bounds every call. Does not know
what a hand-off is for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import grpc

from contracts import wire_commit, wire_handoff
from contracts.clock import Clock
from contracts.errors import InternalError, NoRoom, WorkerLost
from contracts.pb.diptych.v1 import handoff_pb2, handoff_pb2_grpc
from contracts.ticket import (
    AbortRequest,
    AbortResponse,
    CommitResponse,
    ConnectRequest,
    ConnectResponse,
    Grant,
    RenewRequest,
    RenewResponse,
    ReserveRequest,
    Ticket,
    check_answer,
)
from contracts.worker import WorkerRef
from kv_transfer.peer import HandoffPeer
from rpc.channel import ChannelOpener, open_channel
from rpc.errors import from_rpc_error

T = TypeVar("T")


class PeerSource(Protocol):
    """Where a prefill worker gets its peers from."""

    def peer(self, decode: WorkerRef, address: str) -> HandoffPeer:
        """The decode worker in this life, at host:port; connects with its first call."""
        ...

    async def close(self) -> None:
        """Let go of all of them. Idempotent."""
        ...


class GrpcPeer:
    """One life of one decode worker. Owns its channel, which `opener` makes."""

    def __init__(self, decode: WorkerRef, address: str, opener: ChannelOpener = open_channel) -> None:
        self.decode = decode
        self._name = f"decode worker {decode.worker_id}"
        self._channel = opener(address, None)
        self._stub = handoff_pb2_grpc.HandoffStub(self._channel)

    async def connect(self, request: ConnectRequest) -> ConnectResponse:
        """See HandoffPeer."""
        message = wire_handoff.connect_to_pb(request)
        return wire_handoff.connected_from_pb(await self._answer(lambda: self._stub.Connect(message)))

    async def reserve(self, request: ReserveRequest) -> Grant:
        """See HandoffPeer."""
        message = wire_handoff.reserve_to_pb(request)
        answer = await self._answer(lambda: self._stub.Reserve(message))
        match answer.WhichOneof("answer"):
            case "grant":
                return wire_handoff.grant_from_pb(answer.grant)
            case "no_room":
                check_answer(wire_handoff.full_from_pb(answer.no_room), request.prefill, request.decode)
                raise NoRoom(f"{self._name}: no free blocks", answer.no_room.retry_after_s)
            case _:
                raise InternalError(f"{self._name}: an answer to Reserve that is neither grant nor no_room")

    async def commit(self, ticket: Ticket) -> CommitResponse:
        """See HandoffPeer."""
        message = handoff_pb2.CommitRequest(ticket=wire_commit.ticket_to_pb(ticket))
        return wire_commit.committed_from_pb(await self._answer(lambda: self._stub.Commit(message)))

    async def abort(self, request: AbortRequest) -> AbortResponse:
        """See HandoffPeer."""
        message = wire_handoff.abort_to_pb(request)
        return wire_handoff.aborted_from_pb(await self._answer(lambda: self._stub.Abort(message)))

    async def renew(self, request: RenewRequest) -> RenewResponse:
        """See HandoffPeer."""
        message = wire_handoff.renew_to_pb(request)
        return wire_handoff.renewed_from_pb(await self._answer(lambda: self._stub.Renew(message)))

    async def close(self) -> None:
        """Close the channel at once. Whoever calls afterwards gets WorkerLost."""
        await self._channel.close(None)

    async def _answer(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._name) from error
        except grpc.aio.UsageError as error:  # gRPC's word for a call on a channel that was closed
            raise WorkerLost(f"{self._name}: its connection was let go") from error


class PeerPool:
    """The decode workers that this worker knows, at most `max_peers`; the least recently used is let go. Owns them."""

    def __init__(
        self,
        clock: Clock,
        make: Callable[[WorkerRef, str], GrpcPeer] = GrpcPeer,
        max_peers: int = 256,
        grace_s: float = 30.0,
    ) -> None:
        self._clock = clock
        self._make = make
        self._max_peers = max_peers
        self._grace_s = grace_s
        self._peers: OrderedDict[tuple[WorkerRef, str], GrpcPeer] = OrderedDict()  # (life, address)
        self._closing: dict[asyncio.Task[None], GrpcPeer] = {}

    def peer(self, decode: WorkerRef, address: str) -> GrpcPeer:
        """See PeerSource. A life that is older than another that is known is refused by the other side, not here."""
        known = self._peers.get((decode, address))
        if known is None:
            known = self._peers[decode, address] = self._make(decode, address)
            self._retire_older(decode)
        self._peers.move_to_end((decode, address))
        while len(self._peers) > self._max_peers:
            self._retire(next(iter(self._peers)))
        return known

    async def close(self) -> None:
        """See PeerSource."""
        peers = [*self._peers.values(), *self._closing.values()]
        self._peers.clear()
        for closing in list(self._closing):
            closing.cancel()
        await asyncio.gather(*(peer.close() for peer in peers))

    def _retire_older(self, decode: WorkerRef) -> None:
        lives = [place for place in self._peers if place[0].worker_id == decode.worker_id]
        newest = max(ref.epoch for ref, _ in lives)
        for place in lives:
            if place[0].epoch < newest and place[0] != decode:
                self._retire(place)

    def _retire(self, place: tuple[WorkerRef, str]) -> None:
        peer = self._peers.pop(place)
        closing = asyncio.ensure_future(self._let_go(peer))
        self._closing[closing] = peer
        closing.add_done_callback(self._closing.pop)

    async def _let_go(self, peer: GrpcPeer) -> None:
        await self._clock.sleep(self._grace_s)
        await peer.close()
