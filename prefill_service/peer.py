"""The decode side of hand-offs as a prefill worker reaches it: `HandoffPeer` over the gRPC service Handoff.

    PeerPool.peer(ref, address) ──▶ GrpcPeer      one channel per life of a decode worker

A decode worker's new epoch gets a new peer; the old one is closed when its calls have had time to end. Sets no time limits:
the sender bounds every call. Does not know what a hand-off is for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import grpc

from contracts import wire_handoff
from contracts.errors import InternalError, NoRoom
from contracts.pb.diptych.v1 import handoff_pb2, handoff_pb2_grpc
from contracts.ticket import (
    AbortRequest,
    ConnectRequest,
    ConnectResponse,
    Grant,
    RenewRequest,
    RenewResponse,
    ReserveRequest,
    Ticket,
)
from contracts.worker import WorkerRef
from kv_transfer.peer import HandoffPeer
from rpc.channel import ChannelConfig, open_channel
from rpc.errors import from_rpc_error


class PeerSource(Protocol):
    """Where a prefill worker gets its peers from."""

    def peer(self, decode: WorkerRef, address: str) -> HandoffPeer:
        """The decode worker in this life, at host:port; connects with its first call."""
        ...

    async def close(self) -> None:
        """Let go of all of them. Idempotent."""
        ...


class GrpcPeer:
    """One life of one decode worker. Owns its channel."""

    def __init__(self, decode: WorkerRef, address: str, channel_config: ChannelConfig | None = None) -> None:
        self.decode = decode
        self._name = f"decode worker {decode.worker_id}"
        self._channel = open_channel(address, channel_config)
        self._stub = handoff_pb2_grpc.HandoffStub(self._channel)

    async def connect(self, request: ConnectRequest) -> ConnectResponse:
        """See HandoffPeer."""
        try:
            return wire_handoff.connected_from_pb(await self._stub.Connect(wire_handoff.connect_to_pb(request)))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._name) from error

    async def reserve(self, request: ReserveRequest) -> Grant:
        """See HandoffPeer."""
        try:
            answer = await self._stub.Reserve(wire_handoff.reserve_to_pb(request))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._name) from error
        match answer.WhichOneof("answer"):
            case "grant":
                return wire_handoff.grant_from_pb(answer.grant)
            case "no_room":
                raise NoRoom(f"{self._name}: no free blocks", answer.no_room.retry_after_s)
            case _:
                raise InternalError(f"{self._name}: an answer to Reserve that is neither grant nor no_room")

    async def commit(self, ticket: Ticket) -> int:
        """See HandoffPeer."""
        message = handoff_pb2.CommitRequest(ticket=wire_handoff.ticket_to_pb(ticket))
        try:
            return (await self._stub.Commit(message)).num_blocks
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._name) from error

    async def abort(self, request: AbortRequest) -> None:
        """See HandoffPeer."""
        try:
            await self._stub.Abort(wire_handoff.abort_to_pb(request))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._name) from error

    async def renew(self, request: RenewRequest) -> RenewResponse:
        """See HandoffPeer."""
        try:
            return wire_handoff.renewed_from_pb(await self._stub.Renew(wire_handoff.renew_to_pb(request)))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._name) from error

    async def close(self, grace_s: float | None) -> None:
        """Close the channel, letting running calls end within `grace_s` (None: at once)."""
        await self._channel.close(grace_s)


class PeerPool:
    """The decode workers that this worker knows, at most `max_peers`; the least recently used is let go. Owns them."""

    def __init__(
        self,
        make: Callable[[WorkerRef, str], GrpcPeer] = GrpcPeer,
        max_peers: int = 256,
        grace_s: float = 30.0,
    ) -> None:
        self._make = make
        self._max_peers = max_peers
        self._grace_s = grace_s
        self._peers: OrderedDict[tuple[str, str], GrpcPeer] = OrderedDict()  # (worker id, address)
        self._closing: dict[asyncio.Task[None], GrpcPeer] = {}

    def peer(self, decode: WorkerRef, address: str) -> GrpcPeer:
        """See PeerSource. An older life than the known one gets a peer of its own, which the other side will refuse."""
        place = (decode.worker_id, address)
        known = self._peers.get(place)
        if known is None or known.decode != decode:
            if known is not None:
                self._retire(known)
            known = self._peers[place] = self._make(decode, address)
        self._peers.move_to_end(place)
        while len(self._peers) > self._max_peers:
            self._retire(self._peers.popitem(last=False)[1])
        return known

    async def close(self) -> None:
        """See PeerSource."""
        peers = [*self._peers.values(), *self._closing.values()]
        self._peers.clear()
        for closing in list(self._closing):
            closing.cancel()
        await asyncio.gather(*(peer.close(None) for peer in peers))

    def _retire(self, peer: GrpcPeer) -> None:
        closing = asyncio.ensure_future(peer.close(self._grace_s))
        self._closing[closing] = peer
        closing.add_done_callback(self._closing.pop)
