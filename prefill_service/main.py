"""The prefill pool's door to a worker's process: its service on its worker. `worker.process` does the rest."""

from __future__ import annotations

import grpc

from contracts.pb.diptych.v1 import prefill_pb2_grpc
from contracts.worker import WorkerKind
from engine.engine import Engine
from kv_transfer.links import Side
from observability.worker_metrics import WorkerMetrics
from prefill_service.config import PrefillConfig
from prefill_service.peer import PeerPool
from prefill_service.run import RunConfig
from prefill_service.servicer import SERVICE_NAME, PrefillServicer
from prefill_service.worker import PrefillWorker
from worker import process


class PrefillDoor:
    """See worker.process.Door."""

    kind = WorkerKind.PREFILL
    service_names = (SERVICE_NAME,)

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def open(self, side: Side, engine: Engine, server: grpc.aio.Server, metrics: WorkerMetrics) -> PrefillWorker:
        """See worker.process.Door."""
        del metrics  # it counts nothing but steps
        worker = PrefillWorker(side, engine, PeerPool(engine.clock), self._config)
        prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(worker), server)
        return worker


async def serve(config: PrefillConfig) -> None:
    """Run the worker until a signal; returns once it is drained. Raises ConfigError, ModelLoadError or FatalError."""
    await process.serve(config.worker, PrefillDoor(config.run))
