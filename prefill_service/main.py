"""The prefill pool's door to a worker's process: its service on its worker. `worker.process` does the rest."""

from __future__ import annotations

from dataclasses import replace

import grpc

from contracts.pb.diptych.v1 import prefill_pb2_grpc
from contracts.worker import WorkerKind
from engine.engine import Engine
from kv_transfer.handoff import Observer, SourceState, SourceStep, TargetStep
from kv_transfer.links import Side
from observability.handoff_metrics import SenderMetrics
from observability.labels import ENDINGS
from observability.worker_metrics import WorkerMetrics
from prefill_service.config import PrefillConfig
from prefill_service.peer import GrpcPeer, PeerPool
from prefill_service.run import RunConfig
from prefill_service.servicer import SERVICE_NAME, PrefillServicer
from prefill_service.worker import PrefillWorker
from rpc.channel import ChannelOpener, open_channel
from rpc.proving_channel import proving
from rpc.secure_channel import opener_for
from worker import process


class PrefillDoor:
    """See worker.process.Door."""

    kind = WorkerKind.PREFILL
    service_names = (SERVICE_NAME,)

    def __init__(self, config: RunConfig, opener: ChannelOpener = open_channel) -> None:
        """`opener` makes the channel to each decode worker."""
        self._config = config
        self._opener = opener

    def open(self, side: Side, engine: Engine, server: grpc.aio.Server, metrics: WorkerMetrics) -> PrefillWorker:
        """See worker.process.Door."""
        counts = SenderMetrics(metrics.registry, metrics.model_name)
        peers = PeerPool(engine.clock, lambda decode, address: GrpcPeer(decode, address, self._opener))
        worker = PrefillWorker(replace(side, observer=_endings(counts)), engine, peers, self._config)
        worker.on_sent = counts.sent
        worker.links.listener = counts
        counts.watch(worker.num_sending)
        prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(worker), server)
        return worker


def _endings(counts: SenderMetrics) -> Observer:
    """Counts how each hand-off ends, once: what happens to one that is being cleaned up is no other ending."""

    def hear(taken: SourceStep | TargetStep) -> None:
        open_still = isinstance(taken, SourceStep) and taken.before in (SourceState.COMPUTING, SourceState.SENDING)
        if open_still and taken.event.value in ENDINGS:
            counts.ended(taken.event.value)

    return hear


async def serve(config: PrefillConfig) -> None:
    """Run the worker until a signal; returns once it is drained. Raises ConfigError, ModelLoadError or FatalError."""
    opener = proving(opener_for(config.worker.server.tls), config.worker.secret)
    await process.serve(config.worker, PrefillDoor(config.run, opener))
