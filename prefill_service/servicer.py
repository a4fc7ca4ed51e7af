"""The gRPC door of a prefill worker: messages to domain values and back, nothing else.

    PrefillCommand(run) ──▶ PrefillWorker.run ──▶ PrefillEvent …       PrefillCommand(retarget) ──▶ the run's next target

A command that is meant for another life of this worker is refused. Does not know engines or hand-offs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import grpc

from contracts import wire
from contracts.errors import HandoffError, InvalidRequest
from contracts.pb.diptych.v1 import prefill_pb2, prefill_pb2_grpc
from contracts.prefill import Target
from contracts.wire_handoff import worker_ref_from_pb, worker_ref_to_pb
from contracts.wire_prefill import event_to_pb, target_from_pb
from contracts.worker import WorkerRef, check_life
from observability.log import get_logger
from prefill_service.worker import PrefillWorker

log = get_logger(__name__)
SERVICE_NAME: str = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name
_Context = grpc.aio.ServicerContext[AsyncIterator[prefill_pb2.PrefillCommand], prefill_pb2.PrefillEvent]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Serves Prefill on one worker."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Run(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: _Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """See the service's definition. However the call ends, nothing of the request is left behind."""
        del context
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("command") != "run":
            raise InvalidRequest("command", None if first is None else first.WhichOneof("command"), "must be run first")
        check_life(self._worker.ref, worker_ref_from_pb(first.prefill))
        request = wire.request_from_pb(first.run.request)
        targets: asyncio.Queue[Target | None] = asyncio.Queue()
        listening = asyncio.ensure_future(_listen(request_iterator, targets, self._worker.ref))
        ours = worker_ref_to_pb(self._worker.ref)
        try:
            async with aclosing(self._worker.run(request, target_from_pb(first.run.target), targets)) as events:
                async for event in events:
                    yield event_to_pb(event, ours)
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening


async def _listen(
    commands: AsyncIterator[prefill_pb2.PrefillCommand], targets: asyncio.Queue[Target | None], ours: WorkerRef
) -> None:
    """Pass re-targets on until the router has no more to say, or says something else."""
    try:
        async for command in commands:
            if command.WhichOneof("command") != "retarget":
                return
            check_life(ours, worker_ref_from_pb(command.prefill))
            targets.put_nowait(target_from_pb(command.retarget))
    except (InvalidRequest, HandoffError) as error:  # no target for us: the run ends as if none came
        log.warning("a target that is none", reason=error)
    finally:
        targets.put_nowait(None)
