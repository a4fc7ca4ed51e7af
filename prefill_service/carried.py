"""The runs of one router's session, each a task: what the router says reaches the run it is about, what a run says the session.

    run ──▶ PrefillWorker.run ──▶ tokens, handed_off, handoff_failed … ──▶ ended, once: in good order, or why not
    retarget ──▶ the run's next target        cancel ──▶ its task; no `ended`, the router has left it

The session ends when no more commands come, or the worker has drained, and the last run has ended. Does not know gRPC.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from contracts import wire
from contracts.errors import DiptychError, InternalError, InvalidRequest
from contracts.pb.diptych.v1 import prefill_pb2
from contracts.prefill import Target
from contracts.request import GenerationRequest
from contracts.wire_handoff import worker_ref_from_pb
from contracts.wire_prefill import event_to_pb, target_from_pb
from contracts.worker import check_life
from observability.log import get_logger
from prefill_service.worker import PrefillWorker
from worker.outbox import Outbox

log = get_logger(__name__)
EventOutbox = Outbox[prefill_pb2.PrefillEvent]


@dataclass(frozen=True, slots=True)
class _Run:
    targets: asyncio.Queue[Target | None]
    task: asyncio.Task[None]


class Carried:
    """Owns the runs' tasks until `close`. Used from one event loop."""

    def __init__(self, worker: PrefillWorker, session: EventOutbox) -> None:
        self._worker = worker
        self._session = session
        self._runs: dict[str, _Run] = {}  # that the router has not left
        self._tasks: set[asyncio.Task[None]] = set()  # of these, and of those that it has while they give back
        self._finishing = worker.drained.done()
        if not self._finishing:
            worker.drained.add_done_callback(self._finish)

    def obey(self, command: prefill_pb2.PrefillCommand) -> None:
        """Raises what ends the session: InvalidRequest for what is no command, StaleEpoch for one to another life."""
        check_life(self._worker.ref, worker_ref_from_pb(command.prefill))
        match command.WhichOneof("command"):
            case "run":
                self._begin(command.run)
            case "retarget":
                self._retarget(command.retarget)
            case "cancel":
                for request_id in command.cancel.request_ids:
                    run = self._runs.pop(request_id, None)
                    if run is not None:
                        run.task.cancel()
            case other:
                raise InvalidRequest("command", other, "must be run, retarget or cancel")

    def heard_all(self) -> None:
        """No more commands come, thus no more targets."""
        for run in self._runs.values():
            run.targets.put_nowait(None)
        self._finish()

    async def close(self) -> None:
        """Abort all that runs; returns when nothing of it is left."""
        self._worker.drained.remove_done_callback(self._finish)
        self._runs.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _begin(self, message: prefill_pb2.PrefillRun) -> None:
        request_id = message.request.request_id
        if request_id in self._runs:  # whom a refusal would end is the first
            log.warning("a request is sent twice; the second is left alone", request_id=request_id)
            return
        try:
            request, target = wire.request_from_pb(message.request), target_from_pb(message.target)
        except InvalidRequest as error:
            if not request_id:
                raise
            self._end(request_id, error)
            return
        targets: asyncio.Queue[Target | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._run(request, target, targets))
        self._runs[request_id] = _Run(targets, task)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._over(request_id, done))

    def _retarget(self, message: prefill_pb2.Retarget) -> None:
        run = self._runs.get(message.request_id)
        if run is None:
            return
        try:
            run.targets.put_nowait(target_from_pb(message.target))
        except InvalidRequest as error:  # no target for us: the run ends as if none came
            log.warning("a target that is none", request_id=message.request_id, reason=error)
            run.targets.put_nowait(None)

    async def _run(self, request: GenerationRequest, target: Target, targets: asyncio.Queue[Target | None]) -> None:
        error: DiptychError | None = None
        try:
            async with aclosing(self._worker.run(request, target, targets)) as events:
                async for event in events:
                    self._send(event_to_pb(event, request.request_id))
        except DiptychError as refused:
            error = refused
        except Exception as bug:  # noqa: BLE001 - it must not look like a run that goes on
            log.error("a run failed", bug, request_id=request.request_id)
            error = InternalError(f"{type(bug).__name__} in a prefill run; see the worker's log")
        self._end(request.request_id, error)

    def _end(self, request_id: str, error: DiptychError | None) -> None:
        ended = prefill_pb2.PrefillEnded()
        if error is not None:
            ended.error.CopyFrom(wire.error_info_to_pb(wire.error_info(error)))
        self._send(prefill_pb2.PrefillEvent(request_id=request_id, ended=ended))

    def _send(self, event: prefill_pb2.PrefillEvent) -> None:
        self._session.put(event, event.ByteSize())

    def _over(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        run = self._runs.get(request_id)
        if run is not None and run.task is task:
            del self._runs[request_id]
        if self._finishing and not self._tasks:
            self._session.end()

    def _finish(self, drained: object = None) -> None:
        del drained
        self._finishing = True
        if not self._tasks:
            self._session.end()
