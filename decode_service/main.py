"""The decode pool's door to a worker's process: its services on its worker. `worker.process` does the rest."""

from __future__ import annotations

from dataclasses import replace

import grpc

from contracts.pb.diptych.v1 import decode_pb2_grpc, handoff_pb2_grpc
from contracts.worker import WorkerKind
from decode_service import decode_servicer, handoff_servicer
from decode_service.config import DecodeConfig
from decode_service.decode_servicer import DecodeServicer
from decode_service.handoff_servicer import HandoffServicer
from decode_service.worker import AnswerConfig, DecodeWorker
from engine.engine import Engine
from kv_transfer.handoff import Observer, SourceStep, TargetState, TargetStep
from kv_transfer.links import Side
from observability.handoff_metrics import ReceiverMetrics
from observability.labels import LOSSES
from observability.worker_metrics import WorkerMetrics
from worker import process


class DecodeDoor:
    """See worker.process.Door."""

    kind = WorkerKind.DECODE
    service_names = (decode_servicer.SERVICE_NAME, handoff_servicer.SERVICE_NAME)

    def __init__(self, config: AnswerConfig) -> None:
        self._config = config

    def open(self, side: Side, engine: Engine, server: grpc.aio.Server, metrics: WorkerMetrics) -> DecodeWorker:
        """See worker.process.Door."""
        counts = ReceiverMetrics(metrics.registry, metrics.model_name)
        worker = DecodeWorker(replace(side, observer=_endings(counts)), engine, self._config)
        worker.on_mismatch = counts.digest_mismatch
        worker.count_reservations(counts.reserved)
        counts.watch(lambda: {state.value: num for state, num in worker.receiver.counts().items()})
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(worker.desk), server)
        handoff_pb2_grpc.add_HandoffServicer_to_server(HandoffServicer(worker.receiver), server)
        return worker


def _endings(counts: ReceiverMetrics) -> Observer:
    """Counts how each lease ends, once: what happens to one that drains already is no other ending."""

    def hear(taken: SourceStep | TargetStep) -> None:
        if isinstance(taken, TargetStep) and taken.before in (TargetState.RESERVED, TargetState.RECEIVING):
            if taken.after is TargetState.ADOPTED:
                counts.adopted()
            elif taken.after is TargetState.DRAINING and taken.event.value in LOSSES:
                counts.lost(taken.event.value)

    return hear


async def serve(config: DecodeConfig) -> None:
    """Run the worker until a signal; returns once it is drained. Raises ConfigError, ModelLoadError or FatalError."""
    await process.serve(config.worker, DecodeDoor(config.answers))
