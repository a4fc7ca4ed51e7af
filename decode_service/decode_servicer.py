"""The gRPC door for answers: one session per router, commands in, one batch of tokens per engine step out.

    attach ──▶ AnswerDesk.attach    generate ──▶ .generate    cancel ──▶ .cancel    Outbox.items ──▶ DecodeBatch …

A command that cannot be read ends the session with INVALID_ARGUMENT, unless it names its request: then only that one fails.
One that is meant for another life of this worker ends it with FAILED_PRECONDITION.
Does not know engines or hand-offs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from contracts import wire, wire_handoff
from contracts.errors import DiptychError, InternalError, InvalidRequest
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc
from contracts.request import FinishReason, TokenDelta
from contracts.worker import check_life
from decode_service.desk import AnswerDesk
from decode_service.outputs import RouterSession
from observability.log import get_logger

log = get_logger(__name__)
SERVICE_NAME: str = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name
_Context = grpc.aio.ServicerContext[AsyncIterator[decode_pb2.DecodeCommand], decode_pb2.DecodeBatch]


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves Decode on one worker."""

    def __init__(self, desk: AnswerDesk) -> None:
        self._desk = desk

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: _Context
    ) -> AsyncIterator[decode_pb2.DecodeBatch]:
        """See the service's definition. When the call ends, however it does, all that it carried is aborted."""
        del context
        session, ours = self._desk.open_session(), wire_handoff.worker_ref_to_pb(self._desk.ref)
        listening = asyncio.ensure_future(self._listen(session, request_iterator))
        try:
            async for deltas in session.items():
                yield decode_pb2.DecodeBatch(decode=ours, deltas=[wire.delta_to_pb(delta) for delta in deltas])
        finally:
            listening.cancel()
            self._desk.close_session(session)
            with suppress(asyncio.CancelledError):
                await listening

    async def _listen(self, session: RouterSession, commands: AsyncIterator[decode_pb2.DecodeCommand]) -> None:
        """Obey until the router has no more to say; what it carries then goes on to its end."""
        try:
            async for command in commands:
                self._obey(session, command)
            self._desk.finish_session(session)
        except DiptychError as error:
            session.fail(error)
        except Exception as error:  # noqa: BLE001 - a session that is not listened to must not stay open
            log.error("commands cannot be obeyed", error, session=session.name)
            session.fail(InternalError(f"{type(error).__name__} while obeying a command; see the worker's log"))

    def _obey(self, session: RouterSession, command: decode_pb2.DecodeCommand) -> None:
        check_life(self._desk.ref, wire_handoff.worker_ref_from_pb(command.decode))
        match command.WhichOneof("command"):
            case "attach":
                if not command.attach.handoff_id:
                    raise InvalidRequest("attach.handoff_id", "", "must not be empty")
                if math.isnan(command.attach.wait_s):  # it would never be over
                    raise InvalidRequest("attach.wait_s", command.attach.wait_s, "must be a number of seconds")
                self._desk.attach(session, command.attach.handoff_id, command.attach.wait_s)
            case "generate":
                self._generate(session, command.generate)
            case "cancel":
                self._desk.cancel(session, *command.cancel.request_ids)
            case other:
                raise InvalidRequest("command", other, "must be attach, generate or cancel")

    def _generate(self, session: RouterSession, message: decode_pb2.GenerateAlone) -> None:
        try:
            request = wire.request_from_pb(message.request)
        except InvalidRequest as error:
            request_id = message.request.request_id
            if not request_id:
                raise
            refusal = wire.error_info(error)
            session.put((TokenDelta(request_id, 0, finish_reason=FinishReason.ERROR, error=refusal),))
            return
        self._desk.generate(session, request)
