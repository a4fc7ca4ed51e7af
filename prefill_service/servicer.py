"""The gRPC door of a prefill worker: one session per router, commands in, one batch of events per turn out.

A command that cannot be read ends the session with INVALID_ARGUMENT, unless it names its request: then only that one fails.
One that is meant for another life of this worker ends it with FAILED_PRECONDITION. Does not know engines or hand-offs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from contracts.errors import DiptychError, InternalError
from contracts.pb.diptych.v1 import prefill_pb2, prefill_pb2_grpc
from contracts.wire_handoff import worker_ref_to_pb
from observability.log import get_logger
from prefill_service.carried import Carried, EventOutbox
from prefill_service.worker import PrefillWorker
from worker.outbox import Outbox

log = get_logger(__name__)
SERVICE_NAME: str = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
_MAX_UNREAD, _MAX_UNREAD_BYTES = (
    16_384,
    256 * 1024 * 1024,
)  # events of one session: a router that leaves so many loses it
_MAX_BATCH_BYTES = 8 * 1024 * 1024  # far below what a message may have, but for a single event that is larger
_Context = grpc.aio.ServicerContext[AsyncIterator[prefill_pb2.PrefillCommand], prefill_pb2.PrefillBatch]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves Prefill on one worker."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Session(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: _Context
    ) -> AsyncIterator[prefill_pb2.PrefillBatch]:
        """See the service's definition. When the call ends, however it does, nothing of what it carried is left behind."""
        del context
        session: EventOutbox = Outbox("session", _MAX_UNREAD, _MAX_UNREAD_BYTES)
        ours = worker_ref_to_pb(self._worker.ref)
        carried = Carried(self._worker, session)
        listening = asyncio.ensure_future(_listen(session, carried, request_iterator))
        try:
            async for events in session.batches(_MAX_BATCH_BYTES):
                yield prefill_pb2.PrefillBatch(prefill=ours, events=events)
        finally:
            listening.cancel()
            await carried.close()
            with suppress(asyncio.CancelledError):
                await listening


async def _listen(session: EventOutbox, carried: Carried, commands: AsyncIterator[prefill_pb2.PrefillCommand]) -> None:
    """Obey until the router has no more to say; what it carries then goes on to its end."""
    try:
        async for command in commands:
            carried.obey(command)
        carried.heard_all()
    except DiptychError as error:
        session.fail(error)
    except Exception as error:  # noqa: BLE001 - a session that is not listened to must not stay open
        log.error("commands cannot be obeyed", error)
        session.fail(InternalError(f"{type(error).__name__} while obeying a command; see the worker's log"))
