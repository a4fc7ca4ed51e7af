"""The gRPC door for hand-offs: each message to the receiver and its answer back. Does not know states or blocks."""

from __future__ import annotations

import grpc

from contracts import wire_commit, wire_handoff
from contracts.errors import NoRoom
from contracts.pb.diptych.v1 import handoff_pb2, handoff_pb2_grpc
from contracts.ticket import Full
from kv_transfer.peer import HandoffPeer

SERVICE_NAME: str = handoff_pb2.DESCRIPTOR.services_by_name["Handoff"].full_name


class HandoffServicer(handoff_pb2_grpc.HandoffServicer):
    """Serves Handoff with a receiver. The errors it raises cross the wire as themselves."""

    def __init__(self, receiver: HandoffPeer) -> None:
        self._receiver = receiver

    async def Connect(
        self,
        request: handoff_pb2.ConnectRequest,
        context: grpc.aio.ServicerContext[handoff_pb2.ConnectRequest, handoff_pb2.ConnectResponse],
    ) -> handoff_pb2.ConnectResponse:
        """See the service's definition."""
        del context
        return wire_handoff.connected_to_pb(await self._receiver.connect(wire_handoff.connect_from_pb(request)))

    async def Reserve(
        self,
        request: handoff_pb2.ReserveRequest,
        context: grpc.aio.ServicerContext[handoff_pb2.ReserveRequest, handoff_pb2.ReserveResponse],
    ) -> handoff_pb2.ReserveResponse:
        """See the service's definition. No room is an answer, not an error."""
        del context
        asked = wire_handoff.reserve_from_pb(request)
        try:
            grant = await self._receiver.reserve(asked)
        except NoRoom as error:
            full = Full(asked.prefill, asked.decode, error.retry_after_s)  # both are current, or it would have said so
            return handoff_pb2.ReserveResponse(no_room=wire_handoff.full_to_pb(full))
        return handoff_pb2.ReserveResponse(grant=wire_handoff.grant_to_pb(grant))

    async def Commit(
        self,
        request: handoff_pb2.CommitRequest,
        context: grpc.aio.ServicerContext[handoff_pb2.CommitRequest, handoff_pb2.CommitResponse],
    ) -> handoff_pb2.CommitResponse:
        """See the service's definition."""
        del context
        return wire_commit.committed_to_pb(await self._receiver.commit(wire_commit.ticket_from_pb(request.ticket)))

    async def Abort(
        self,
        request: handoff_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[handoff_pb2.AbortRequest, handoff_pb2.AbortResponse],
    ) -> handoff_pb2.AbortResponse:
        """See the service's definition."""
        del context
        return wire_handoff.aborted_to_pb(await self._receiver.abort(wire_handoff.abort_from_pb(request)))

    async def Renew(
        self,
        request: handoff_pb2.RenewRequest,
        context: grpc.aio.ServicerContext[handoff_pb2.RenewRequest, handoff_pb2.RenewResponse],
    ) -> handoff_pb2.RenewResponse:
        """See the service's definition."""
        del context
        return wire_handoff.renewed_to_pb(await self._receiver.renew(wire_handoff.renew_from_pb(request)))
