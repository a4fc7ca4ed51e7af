"""Flags of one worker process, the same for both pools, and the configurations they describe. Does not know the pools."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from cli.commands import flags
from cli.commands.doorflags import TLS_OPTIONS, TlsFlags, cluster_secret, tls_config
from cli.commands.registryflags import REGISTRY_OPTIONS, RegistryFlags, redis_config
from cli.options import ADDRESS, ADVERTISE, CORES, LABEL, PORT, SIZE, Decorated, option
from contracts.errors import ConfigError
from contracts.worker import WorkerKind
from engine.build import ModelRuntimeConfig
from engine.config import SchedulerConfig, SchedulingPolicy
from engine.models.store import model_name
from kv_transfer.choose import AUTO, NetworkConfig
from rpc.cores import CoreChoice
from rpc.lifecycle import LifecycleConfig
from rpc.server import ServerConfig, has_port
from worker.config import WorkerConfig
from worker.placement import Wish, settle


class WorkerFlags(TlsFlags, RegistryFlags):
    """What click hands over, checked by the options below."""

    model: Path
    served_name: str | None
    dtype: str
    quantization: str
    max_model_len: int | None
    worker_id: str | None
    router: tuple[str, ...]
    connector: str
    integrity: str
    kv_transfer_dtype: str
    threads: int | None
    cores: CoreChoice | None
    device: str
    gpu_memory_utilisation: float
    kv_staging: int
    kv_memory: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    scheduling: SchedulingPolicy
    prefix_caching: bool
    host: str
    port: int
    advertise: str
    kv_port: int
    advertise_kv: str
    metrics_port: int | None
    drain_timeout: float
    exit_with: int | None
    log_level: str
    log_prompts: bool


OPTIONS: tuple[Callable[[Decorated], Decorated], ...] = (
    flags.model_dir_option,
    flags.served_name_option,
    flags.dtype_option,
    flags.quantization_option,
    flags.max_model_len_option,
    option(
        "--router",
        section="Cluster",
        multiple=True,
        type=ADDRESS,
        metavar="HOST:PORT",
        help="gRPC address of a router to announce to; may be given several times.",
    ),
    *REGISTRY_OPTIONS,
    option(
        "--worker-id",
        section="Cluster",
        type=LABEL,
        metavar="NAME",
        help="Name of this worker, unlike any other's. [default: made of pool, host and process id]",
    ),
    flags.connector_option,
    flags.integrity_option,
    flags.kv_transfer_dtype_option,
    flags.threads_option("Compute threads. [default: one for each of its cores]"),
    option(
        "--cores",
        section="Memory and batching",
        type=CORES,
        metavar="N[,N-N…]|auto",
        help="CPUs that this process keeps to; auto takes as many whole cores as --threads that no other worker of this user has, "
        "on one memory node if it can be. [default: any]",
    ),
    flags.device_option,
    option(
        "--gpu-memory-utilization",
        "gpu_memory_utilisation",
        section="Memory and batching",
        type=click.FloatRange(0, 1, min_open=True),
        default=0.9,
        metavar="SHARE",
        help="On a GPU: share of the memory free after loading that KV and the largest step may take.",
    ),
    option(
        "--kv-staging",
        section="Memory and batching",
        type=SIZE,
        default="1GiB",
        metavar="SIZE",
        help="On a GPU, or with --kv-transfer-dtype int8 or fp8: host memory that KV passes through on its way; it bounds the "
        "longest prompt that can be handed off.",
    ),
    flags.kv_memory_option(
        None,
        "KV memory, taken at the start. [default: half of what is free then; give it when workers share a machine]",
    ),
    flags.max_num_batched_tokens_option,
    flags.max_num_seqs_option,
    flags.scheduling_option,
    flags.prefix_caching_option,
    option(
        "--host",
        section="Addresses",
        metavar="HOST",
        default="127.0.0.1",
        help="Where to listen; 0.0.0.0 is everywhere.",
    ),
    option("--port", section="Addresses", type=PORT, metavar="PORT", default=0, help="gRPC port; 0 takes a free one."),
    flags.advertise_option,
    option(
        "--kv-port",
        section="Addresses",
        type=PORT,
        metavar="PORT",
        default=0,
        help="Port at which the tcp connector takes KV; 0 takes a free one. The nixl connector is asked at the next.",
    ),
    option(
        "--advertise-kv",
        section="Addresses",
        type=ADVERTISE,
        default="",
        show_default=False,
        metavar="HOST[:PORT]",
        help="Address under which others reach the tcp connector, where a proxy or a port mapping stands before it. "
        "[default: the host of --advertise, and --kv-port]",
    ),
    option(
        "--metrics-port",
        section="Addresses",
        type=PORT,
        metavar="PORT",
        help="Serve Prometheus metrics there. [default: nowhere]",
    ),
    *TLS_OPTIONS,
    flags.drain_timeout_option,
    flags.exit_with_option,
    flags.service_log_level_option,
    flags.log_prompts_option,
)


def worker_config(given: WorkerFlags, pool: WorkerKind) -> WorkerConfig:
    """What a worker of either pool is told by these flags. Raises ConfigError for flags that contradict each other."""
    scheduler = scheduler_config(given)
    config = WorkerConfig(
        worker_id=worker_id(given, pool),
        model_name=given["served_name"] or model_name(given["model"]),
        model=runtime_config(given, scheduler),
        scheduler=scheduler,
        kv_memory_bytes=given["kv_memory"],
        kv_staging_bytes=given["kv_staging"],
        kv_transfer_dtype=given["kv_transfer_dtype"],
        connectors=connectors(given),
        network=network_config(given),
        server=ServerConfig(
            host=given["host"], port=given["port"], advertise=given["advertise"], tls=tls_config(given)
        ),
        routers=given["router"],
        redis=redis_config(given),
        lifecycle=LifecycleConfig(drain_limit_s=given["drain_timeout"]),
        metrics_host=given["host"],
        metrics_port=given["metrics_port"],
        secret=cluster_secret(given),
    )
    if not config.routers and config.redis is None:
        raise ConfigError("--router or --registry must be given: nobody would hear of this worker")
    return config


def settled(config: WorkerConfig, given: WorkerFlags) -> WorkerConfig:
    """Keep this process to its --cores, and say in its config what it got; before torch is imported, which counts them.

    Raises ConfigError.
    """
    placement = settle(Wish(given["cores"], given["threads"]), config.worker_id)
    return replace(config, placement=placement, model=replace(config.model, threads=placement.threads))


def worker_id(given: WorkerFlags, pool: WorkerKind) -> str:
    """The name given, or one that no other worker has."""
    return given["worker_id"] or f"{pool}-{socket.gethostname()}-{os.getpid()}"


def scheduler_config(given: WorkerFlags) -> SchedulerConfig:
    """What was given; limits that were not stay the engine's own, but let each request of a step have a token."""
    base = SchedulerConfig()
    max_num_seqs = given["max_num_seqs"] or base.max_num_seqs
    return SchedulerConfig(
        max_num_batched_tokens=given["max_num_batched_tokens"] or max(base.max_num_batched_tokens, max_num_seqs),
        max_num_seqs=max_num_seqs,
        policy=given["scheduling"],
        enable_prefix_caching=given["prefix_caching"],
    )


def runtime_config(given: WorkerFlags, scheduler: SchedulerConfig) -> ModelRuntimeConfig:
    """How the model is run, for the largest step of `scheduler`."""
    return ModelRuntimeConfig(
        model_dir=given["model"],
        dtype=given["dtype"],
        quantization=given["quantization"],
        device=given["device"],
        gpu_memory_utilisation=given["gpu_memory_utilisation"],
        max_model_len=given["max_model_len"],
        threads=given["threads"],
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
    )


def connectors(given: WorkerFlags) -> tuple[str, ...]:
    """Kinds of connectors, as `kv_transfer.choose` wants them."""
    return (AUTO,) if given["connector"] == "auto" else (given["connector"],)


def network_config(given: WorkerFlags) -> NetworkConfig:
    """The tcp connector listens and is advertised where the gRPC server is, on a port of its own, unless told otherwise."""
    own, own_port = _split(given["advertise_kv"])
    host = own or _split(given["advertise"])[0]
    return NetworkConfig(given["host"], given["kv_port"], host or None, own_port)


def _split(address: str) -> tuple[str, int | None]:
    """Host without brackets, and port if there is one."""
    host, _, port = address.rpartition(":") if has_port(address) else (address, "", "")
    return host.strip("[]"), int(port) if port else None
