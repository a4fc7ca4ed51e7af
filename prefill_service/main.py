"""The prefill worker's process: model, KV memory, connectors, engine, gRPC server, announcements, signals.

    bind the port ──▶ load the model ──▶ KV region ──▶ connectors expose it ──▶ engine on it ──▶ serve until a signal ──▶ drain

A busy port is known before the model is loaded; a signal while it loads ends the process at once. Does not know how the
worker works.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from contracts.clock import MonotonicClock
from contracts.pb.diptych.v1 import prefill_pb2_grpc
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef, new_epoch
from engine.build import load
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.interface import ModelRunner
from engine.execution.memory import memory_turn
from engine.output import StepOutput
from kv_transfer.choose import make_connectors
from kv_transfer.digests import ThreadDigester
from kv_transfer.links import Side
from kv_transfer.region import SharedRegion
from observability.log import get_logger
from observability.worker_metrics import WorkerMetrics
from prefill_service.config import PrefillConfig
from prefill_service.peer import PeerPool
from prefill_service.servicer import SERVICE_NAME, PrefillServicer
from prefill_service.worker import PrefillWorker
from rpc.announce import Announcer, GrpcRegistryClient
from rpc.lifecycle import Lifecycle, honest_load
from rpc.process import MetricsPort, StopSignals, in_daemon_thread
from rpc.server import RpcServer

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Computer:
    """A warm model on its KV memory."""

    runner: ModelRunner
    region: SharedRegion


def build(config: PrefillConfig) -> Computer:
    """Load the model and make its KV memory. Slow. Raises ConfigError and ModelLoadError."""
    loaded = load(config.model)
    with memory_turn():
        num_blocks = loaded.num_blocks_for(config.kv_memory_bytes)
        region = SharedRegion(num_blocks * loaded.layout.block_bytes)
        region.populate()  # else the first request on each block pays for it, twenty times slower than a copy
    return Computer(loaded.runner(region.buffer, num_blocks), region)


async def serve(config: PrefillConfig) -> None:
    """Run the worker until a signal; returns once it is drained. Raises ConfigError, ModelLoadError or FatalError."""
    server = RpcServer(config.server, (SERVICE_NAME,))
    async with StopSignals() as signals, AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        server.bind()
        computer = await signals.unless_asked(in_daemon_thread(lambda: build(config), "load"))
        if computer is None:
            log.info("stopped while loading")
            return
        stack.callback(computer.region.close)
        await _serve(config, computer, server, (signals, stack))


async def _serve(
    config: PrefillConfig, computer: Computer, server: RpcServer, life: tuple[StopSignals, AsyncExitStack]
) -> None:
    signals, stack = life
    clock, runner = MonotonicClock(), computer.runner
    connectors = make_connectors(config.connectors, config.network)
    for connector in connectors:
        stack.push_async_callback(connector.close)
        connector.expose(computer.region)
    digester = ThreadDigester(computer.region)
    stack.callback(digester.close)
    ref = WorkerRef(config.worker_id, new_epoch())
    engine = Engine(runner, EngineConfig(config.scheduler), clock)
    side = Side(ref, runner.layout, connectors, clock, digester=digester)
    worker = PrefillWorker(side, engine, PeerPool(clock), config.run)
    stack.push_async_callback(worker.stop)
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(worker), server.grpc_server)
    _serve_metrics(config, worker, stack)
    worker.start()
    info = WorkerInfo(
        ref=ref,
        kind=WorkerKind.PREFILL,
        address=server.advertised_address(config.routers[0] if config.routers else ""),
        model_name=config.model_name,
        layout=runner.layout,
        connectors=tuple(connector.capabilities.kind for connector in connectors),
        max_model_len=runner.max_model_len,
        num_blocks=runner.num_blocks,
    )
    announcers = [
        Announcer(
            GrpcRegistryClient(router), info, lambda: honest_load(worker, config.lifecycle), clock, config.announce
        )
        for router in config.routers
    ]
    log.info("serving", address=info.address, blocks=info.num_blocks, connectors=",".join(info.connectors))
    await Lifecycle(worker, server, announcers, clock, config.lifecycle).run(signals)


def _serve_metrics(config: PrefillConfig, worker: PrefillWorker, stack: AsyncExitStack) -> None:
    if config.metrics_port is None:
        return

    def gauges() -> tuple[float, float, float, float, float]:
        load = worker.load()
        return load.num_waiting, load.num_running, load.num_queued_tokens, load.kv_usage, worker.stalled_s()

    metrics = WorkerMetrics(gauges)

    def on_step(output: StepOutput) -> None:
        batch = (output.num_scheduled_requests, output.num_scheduled_tokens)
        metrics.step(output.step_s, output.runner_s, batch, output.num_preempted)

    worker.driver.on_step = on_step
    port = MetricsPort(config.metrics_host, config.metrics_port, metrics.registry)
    stack.callback(port.close)
    log.info("metrics", host=config.metrics_host, port=port.port)
