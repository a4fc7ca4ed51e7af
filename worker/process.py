"""A worker's process: model, KV memory, connectors, engine, gRPC server, announcements, signals; the door is handed in.

    bind the port ──▶ load the model ──▶ KV region ──▶ connectors expose it ──▶ engine on it ──▶ the door opens a worker
    ──▶ serve until a signal ──▶ drain

A busy port is known before the model is loaded, and metrics are served from then on; a signal while it loads ends the process
at once. Does not know which pool the worker belongs to beyond its door's `kind`, nor how it works.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import grpc

from contracts.clock import Clock, MonotonicClock
from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import blocks_pb2_grpc
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from engine.build import load
from engine.config import EngineConfig
from engine.driver import EngineDriver
from engine.engine import Engine
from engine.execution.interface import ModelRunner
from engine.execution.memory import memory_turn
from engine.output import StepOutput
from engine.pace import Pace
from kv_transfer.choose import NetworkConfig, make_connectors
from kv_transfer.connector import Connector
from kv_transfer.digests import ThreadDigester
from kv_transfer.links import Side, staged
from observability.log import get_logger
from observability.worker_metrics import WorkerMetrics
from rpc.lifecycle import Lifecycle, ServedWorker, honest_load
from rpc.metrics_port import MetricsPort
from rpc.process import StopSignals, abandon, in_daemon_thread, settle_heap
from rpc.proof_guard import ProofGuard, say_unproven
from rpc.proving_channel import proving
from rpc.secure_channel import opener_for
from rpc.server import RpcServer, is_wildcard
from rpc.tls import say_gaps
from worker.block_feed import BlockFeed
from worker.block_servicer import SERVICE_NAME as BLOCK_EVENTS
from worker.block_servicer import BlockEventsServicer
from worker.config import WorkerConfig
from worker.kv_memory import KVMemory, make_kv_memory
from worker.placement import say_placement
from worker.registration import Registration

log = get_logger(__name__)


class DoorWorker(ServedWorker, Protocol):
    """A worker as its process sees it: served, and with an engine whose steps can be watched."""

    @property
    def driver(self) -> EngineDriver:
        """The engine and its thread."""
        ...

    @property
    def blocks(self) -> BlockFeed:
        """What its prefix cache has, for who wants to know."""
        ...

    def start(self) -> None:
        """Take work from now on."""
        ...


class Door(Protocol):
    """What makes a worker one of its pool: its services, and what it does with an engine and a side of the KV transfer."""

    @property
    def kind(self) -> WorkerKind:
        """The pool."""
        ...

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names of the gRPC services, for health and reflection."""
        ...

    def open(self, side: Side, engine: Engine, server: grpc.aio.Server, metrics: WorkerMetrics) -> DoorWorker:
        """Make the worker and put its services on the server. It counts what only its pool counts in `metrics`."""
        ...


@dataclass(frozen=True, slots=True)
class Computer:
    """A warm model on its KV memory; `layout` says how its blocks travel, too; `pace` knows what its warm-up took."""

    runner: ModelRunner
    memory: KVMemory
    layout: KVLayout
    pace: Pace


def build(config: WorkerConfig) -> Computer:
    """Load the model and make its KV memory. Slow. Raises ConfigError and ModelLoadError."""
    loaded = load(config.model)
    with memory_turn():
        num_blocks = loaded.num_blocks_for(config.kv_memory_bytes)
        memory = make_kv_memory(loaded, num_blocks, config.kv_staging_bytes, config.kv_transfer_dtype)
    layout = loaded.layout.sent_as(config.kv_transfer_dtype)
    return Computer(loaded.runner(memory.buffer, num_blocks), memory, layout, loaded.pace)


async def serve(config: WorkerConfig, door: Door) -> None:
    """Run the worker until a signal; returns once it is drained. Raises ConfigError, ModelLoadError or FatalError."""
    guard = None if config.secret is None else ProofGuard(config.secret)
    say_placement(config.placement)
    caching = config.scheduler.enable_prefix_caching  # without it no router need hear, or expect, anything
    names = (*door.service_names, BLOCK_EVENTS) if caching else door.service_names
    server = RpcServer(config.server, names, () if guard is None else (guard,))
    # Before the model is loaded: a file that cannot be used ends it here.
    opener = proving(opener_for(config.server.tls), config.secret)
    say_gaps(config.server.tls, config.secret is not None)
    if config.secret is None:
        say_unproven(config.server.host)
    async with StopSignals() as signals, AsyncExitStack() as stack:
        clock = MonotonicClock()
        registration = Registration(config, clock, opener)
        stack.push_async_callback(registration.close)
        stack.push_async_callback(server.stop, 0)
        await registration.check()
        server.bind()
        metrics = WorkerMetrics(config.model_name, door.kind.value)
        if config.placement is not None:
            metrics.placed(config.placement.threads, len(config.placement.cpus))
        port = _serve_metrics(config, metrics, stack)  # from now on: who loads for minutes is not down
        computer = await signals.unless_asked(in_daemon_thread(lambda: build(config), "load"))
        if computer is None:
            log.info("stopped while loading")
            await server.stop(0)
            abandon(0)
        stack.callback(computer.memory.close)
        ref = await signals.unless_asked(registration.begin_life())
        if ref is None:
            log.info("stopped while waiting for the registry")
            return
        address = server.advertised_address(registration.toward)
        network = replace(reached_with(address, config.network), secret=config.secret)
        side = _side(make_connectors(config.connectors, network), computer, (ref, clock), door.kind, stack)
        metrics.born(ref.epoch)
        layout = computer.runner.layout
        metrics.aliases.describe(layout.block_size, computer.runner.num_blocks, caching, layout.dtype)
        if guard is not None:
            guard.on_refused = metrics.call_refused
            guard.serve(server.grpc_server)
        engine = Engine(computer.runner, EngineConfig(config.scheduler), clock, computer.pace)
        worker = door.open(side, engine, server.grpc_server, metrics)
        if caching:
            events = BlockEventsServicer(ref, worker.blocks)
            blocks_pb2_grpc.add_BlockEventsServicer_to_server(events, server.grpc_server)
        stack.push_async_callback(worker.stop)
        if port is not None:
            measure(worker, engine, metrics)
            stack.callback(port.close)  # before the worker stops, who is asked at each scrape
        worker.start()
        info = _info(config, (door.kind, address), side, computer.runner)
        log.info("serving", address=info.address, blocks=info.num_blocks, connectors=",".join(info.connectors))
        announcers = registration.announcers(info, lambda: honest_load(worker))
        settle_heap()
        await Lifecycle(worker, server, announcers, clock, config.lifecycle).run(signals)


def reached_with(address: str, network: NetworkConfig) -> NetworkConfig:
    """Where `network` takes KV everywhere and has no word for others, it is reached at the host of our gRPC `address`: the
    wildcard itself would lead whoever reads it to himself.
    """
    if network.advertise_host is not None or not is_wildcard(network.bind_host):
        return network
    return replace(network, advertise_host=address.rpartition(":")[0].strip("[]"))


def _side(
    connectors: tuple[Connector, ...],
    computer: Computer,
    life: tuple[WorkerRef, Clock],
    kind: WorkerKind,
    stack: AsyncExitStack,
) -> Side:
    ref, clock = life
    for connector in connectors:
        stack.push_async_callback(connector.close)
        connector.expose(computer.memory.region)
    digester = ThreadDigester(computer.memory.region)
    stack.callback(digester.close)
    side = Side(ref, computer.layout, connectors, clock, digester=digester)
    area = computer.memory.staging
    return side if area is None else staged(side, area, sends=kind is WorkerKind.PREFILL)


def _info(config: WorkerConfig, where: tuple[WorkerKind, str], side: Side, runner: ModelRunner) -> WorkerInfo:
    kind, address = where
    return WorkerInfo(
        ref=side.ref,
        kind=kind,
        address=address,
        model_name=config.model_name,
        layout=side.layout,
        connectors=tuple(connector.capabilities.kind for connector in side.connectors),
        max_model_len=runner.max_model_len,
        num_blocks=runner.num_blocks,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
    )


def measure(worker: DoorWorker, engine: Engine, metrics: WorkerMetrics) -> None:
    """Count what the worker's engine does. Called once, before the worker is started."""

    def gauges() -> tuple[float, float, float, float, float]:
        load = worker.load()
        return load.num_waiting, load.num_running, load.num_queued_tokens, load.kv_usage, worker.stalled_s()

    def on_step(output: StepOutput) -> None:
        batch = (output.num_scheduled_requests, output.num_scheduled_tokens, output.num_made)
        metrics.step(output.step_s, output.runner_s, batch, output.num_preempted)
        for sample in output.ended:
            metrics.ended(sample)

    def prefix_cache() -> tuple[int, int]:
        stats = worker.driver.stats()
        return stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens

    metrics.watch(gauges, prefix_cache)
    engine.watch_blocks(metrics.blocks)
    worker.driver.on_step = on_step


def _serve_metrics(config: WorkerConfig, metrics: WorkerMetrics, stack: AsyncExitStack) -> MetricsPort | None:
    if config.metrics_port is None:
        return None
    port = MetricsPort(config.metrics_host, config.metrics_port, metrics.registry)
    stack.callback(port.close)
    log.info("metrics", host=config.metrics_host, port=port.port)
    return port
