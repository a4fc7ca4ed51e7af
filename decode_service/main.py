"""The decode pool's door to a worker's process: its services on its worker. `worker.process` does the rest."""

from __future__ import annotations

import grpc

from contracts.pb.diptych.v1 import decode_pb2_grpc, handoff_pb2_grpc
from contracts.worker import WorkerKind
from decode_service import decode_servicer, handoff_servicer
from decode_service.config import DecodeConfig
from decode_service.decode_servicer import DecodeServicer
from decode_service.handoff_servicer import HandoffServicer
from decode_service.worker import AnswerConfig, DecodeWorker
from engine.engine import Engine
from kv_transfer.links import Side
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
        worker = DecodeWorker(side, engine, self._config)
        worker.on_mismatch = metrics.digest_mismatch
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(worker.desk), server)
        handoff_pb2_grpc.add_HandoffServicer_to_server(HandoffServicer(worker.receiver), server)
        return worker


async def serve(config: DecodeConfig) -> None:
    """Run the worker until a signal; returns once it is drained. Raises ConfigError, ModelLoadError or FatalError."""
    await process.serve(config.worker, DecodeDoor(config.answers))
