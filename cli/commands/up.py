"""`diptych up`: a whole cluster on this machine, in the foreground, until Ctrl-C or SIGTERM.

    fetch the model ─▶ start ─▶ ready (addresses, ready file) ─▶ watch, restart ─▶ signal ─▶ drain ─▶ exit 0
                         │                                         └─ it cannot serve any more ─▶ exit 1
                         └─ refused arguments, busy port ─▶ exit 2

Does not know how a process is kept alive; `cli.cluster` does.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

import click

from cli.cluster import METRICS_PORTS_FLAG, LocalCluster
from cli.clustersecurity import SecurityOptions, cluster_security
from cli.commands import flags
from cli.commands.admissionflags import ADMISSION_OPTIONS, AdmissionFlags, admission_config, limits_config
from cli.commands.chatflags import CHAT_OPTIONS, ChatFlags, chat_config
from cli.commands.dashboardflags import DashboardFlags, slo_config, slo_option
from cli.commands.doorflags import KEY_OPTIONS, SECTION, KeyFlags, check_secret, secret_option
from cli.commands.policyflags import POLICY_OPTIONS, PolicyFlags, policy_config
from cli.commands.registryflags import REGISTRY_OPTIONS, RegistryFlags, redis_config
from cli.commands.tracingflags import TracingFlags, otlp_option, traces
from cli.commands.wayflags import WAY_OPTIONS, WayFlags, disaggregation_config
from cli.config import ClusterConfig, DoorOptions, RestartPolicy, WorkerOptions, default_threads
from cli.modelsource import fetch
from cli.options import PORT, POSITIVE_SECONDS, SectionedCommand, apply, option
from cli.process import ProcessStatus
from cli.readyfile import ReadyFile
from cli.status import LiveDisplay, PlainDisplay, make_display
from contracts.clock import MonotonicClock
from contracts.errors import ConfigError
from engine.models.store import model_name
from engine.placement.topology import read_topology
from observability.log import configure_logging
from rpc.announce import UNHEARD
from rpc.cores import Cores, check_usable, parse_groups
from rpc.process import StopSignals

STOP_MARGIN_S = 15.0


class UpFlags(AdmissionFlags, ChatFlags, DashboardFlags, KeyFlags, PolicyFlags, RegistryFlags, TracingFlags, WayFlags):
    """What click hands over, checked by the options below."""

    model: str
    served_name: str | None
    cache_dir: Path | None
    dtype: str
    device: str
    quantization: str
    max_model_len: int | None
    prefill: int
    decode: int
    connector: str
    integrity: str
    canary_interval: float
    threads: int | None
    worker_cores: str | None
    worker_metrics_ports: tuple[int, int]
    kv_memory: int
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    scheduling: str
    prefix_caching: bool
    host: str
    http_port: int
    grpc_port: int
    drain_timeout: float
    start_timeout: float
    tls: bool
    tls_dir: Path | None
    cluster_secret_file: Path | None
    ready_file: Path | None
    plain: bool
    log_level: str
    log_prompts: bool


OPTIONS = (
    flags.model_option,
    flags.served_name_option,
    flags.dtype_option,
    flags.device_option,
    flags.quantization_option,
    flags.max_model_len_option,
    flags.cache_dir_option,
    option(
        "--prefill",
        section="Cluster",
        type=click.IntRange(0, 64),
        metavar="WORKERS",
        default=1,
        help="Prefill workers; with 0 the decode workers read prompts themselves (colocated).",
    ),
    option(
        "--decode",
        section="Cluster",
        type=click.IntRange(1, 64),
        metavar="WORKERS",
        default=1,
        help="Decode workers.",
    ),
    flags.connector_option,
    flags.integrity_option,
    *REGISTRY_OPTIONS,
    *POLICY_OPTIONS,
    flags.canary_interval_option,
    *WAY_OPTIONS,
    flags.threads_option(
        "Compute threads of each worker. [default: its --worker-cores, else all cores divided over the workers]"
    ),
    option(
        "--worker-cores",
        section="Memory and batching",
        metavar="CORES/CORES…|auto|any",
        help="CPUs that each worker keeps to, prefill workers first: 0/1 or 0,1/2-3. auto: whole cores that no other worker has, "
        "as many as its threads, on one memory node if it can be. [default: auto where there are enough cores, else any]",
    ),
    flags.kv_memory_option("512MiB", "KV memory of each worker."),
    flags.max_num_batched_tokens_option,
    flags.max_num_seqs_option,
    flags.scheduling_option,
    flags.prefix_caching_option,
    *CHAT_OPTIONS,
    *ADMISSION_OPTIONS,
    flags.host_option("Where the router listens; 0.0.0.0 is everywhere."),
    flags.http_port_option,
    flags.grpc_port_option("gRPC API; 0 takes a free port."),
    option(
        METRICS_PORTS_FLAG,
        section="Addresses",
        type=(PORT, PORT),
        default=(0, 0),
        show_default=False,
        metavar="PREFILL DECODE",
        help="Metrics of the first prefill and the first decode worker, on 127.0.0.1; the next ones' ports follow. "
        "9101 9201 is what deploy/prometheus scrapes. [default: any free ones]",
    ),
    *KEY_OPTIONS,
    secret_option,
    option(
        "--tls",
        section=SECTION,
        is_flag=True,
        help="TLS at every port but for workers' metrics, which stay on this machine; mutual between the processes, "
        "by an authority made at each start. For "
        "real certificates start the processes by themselves.",
    ),
    option(
        "--tls-dir",
        section=SECTION,
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Where --tls puts ca.pem, by which clients know the cluster. [default: a temporary folder]",
    ),
    flags.drain_timeout_option,
    otlp_option,
    slo_option,
    option(
        "--start-timeout",
        section="Running",
        type=POSITIVE_SECONDS,
        metavar="SECONDS",
        default=600.0,
        help="How long a process may take until it is ready.",
    ),
    option(
        "--ready-file",
        section="Running",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write addresses and processes there as JSON once all are ready; removed at the end.",
    ),
    option("--plain", section="Running", is_flag=True, help="Lines instead of a table, on a terminal too."),
    flags.log_level_option,
    flags.log_prompts_option,
)


def cluster_config(given: UpFlags, model_dir: Path, security: SecurityOptions | None = None) -> ClusterConfig:
    """The cluster that these flags describe, on the model in `model_dir`."""
    if given["grpc_port"] == given["http_port"] != 0:
        raise ConfigError(f"--grpc-port: {given['grpc_port']} is --http-port as well; each needs a port of its own")
    num_workers = given["prefill"] + given["decode"]
    cores = worker_cores(given)
    by_number = isinstance(cores, tuple) and cores
    threads = given["threads"] or (None if by_number else default_threads(num_workers))
    workers = WorkerOptions(
        connector=given["connector"],
        integrity=given["integrity"],
        dtype=given["dtype"],
        device=given["device"],
        quantization=given["quantization"],
        kv_memory_bytes=given["kv_memory"],
        max_model_len=given["max_model_len"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        max_num_seqs=given["max_num_seqs"],
        scheduling=given["scheduling"],
        prefix_caching=given["prefix_caching"],
        threads=threads,
    )
    return ClusterConfig(
        model_dir=model_dir,
        model_name=given["served_name"] or model_name(model_dir),
        num_prefill=given["prefill"],
        num_decode=given["decode"],
        host=given["host"],
        http_port=given["http_port"],
        grpc_port=given["grpc_port"],
        policies=policy_config(given),
        redis=redis_config(given),
        canary_interval_s=given["canary_interval"],
        disaggregation=disaggregation_config(given),
        door=DoorOptions(
            chat=chat_config(given),
            admission=admission_config(given),
            limits=limits_config(given),
            max_body_bytes=given["max_body"],
            request_timeout_s=given["request_timeout"],
            tracing=traces(given),
            slo=slo_config(given),
        ),
        workers=workers,
        metrics_ports=given["worker_metrics_ports"],
        worker_cores=cores,
        security=security if security is not None else SecurityOptions(),
        log_level=given["log_level"],
        drain_timeout_s=given["drain_timeout"],
        restart=RestartPolicy(start_timeout_s=given["start_timeout"]),
    )


def worker_cores(given: UpFlags) -> tuple[Cores, ...] | Literal["auto"]:
    """The cores of each worker, none where they may use any. Raises ConfigError."""
    num_workers = given["prefill"] + given["decode"]
    match given["worker_cores"]:
        case "any":
            return ()
        case "auto":
            return "auto"
        case None:
            wanted = num_workers * (given["threads"] or default_threads(num_workers))
            return "auto" if wanted <= read_topology().num_threads else ()
    groups = parse_groups("--worker-cores", given["worker_cores"])
    if len(groups) != num_workers:
        raise ConfigError(
            f"--worker-cores: {given['worker_cores']!r} is for {len(groups)} workers; there are {num_workers}"
        )
    check_usable("--worker-cores", [core for group in groups for core in group])
    return groups


class Announcer:
    """Listens to the cluster's processes for the display and, once it is ready, for the ready file."""

    def __init__(self, display: PlainDisplay | LiveDisplay, ready_file: ReadyFile | None) -> None:
        self._display = display
        self._ready_file = ready_file
        self._cluster: LocalCluster | None = None
        self._stopping = False

    def changed(self, status: ProcessStatus) -> None:
        """See ProcessListener."""
        self._display.changed(status)
        if self._cluster is not None and self._ready_file is not None:
            self._ready_file.write(self._cluster)

    def line(self, name: str, text: str) -> None:
        """See ProcessListener. Workers outlive the router, which is no news once we have stopped it ourselves."""
        if not (self._stopping and UNHEARD in text):
            self._display.line(name, text)

    def ready(self, cluster: LocalCluster) -> None:
        """The cluster answers: say where, and keep the ready file true from now on."""
        config = cluster.config
        pools = f"{config.num_prefill} prefill + {config.num_decode} decode" if config.num_prefill else "colocated"
        threads = "as many as its cores" if config.workers.threads is None else config.workers.threads
        self._display.say(f"ready: {config.model_name} ({pools}, threads per worker: {threads})")
        self._display.say(f"  OpenAI API  {cluster.http_url}/v1")
        self._display.say(f"  gRPC        {cluster.grpc_address}  diptych.v1.Inference")
        self._display.say(f"  dashboard   {cluster.http_url}/dashboard")
        for status in cluster.statuses:
            self._display.say(f"  metrics     {status.metrics}  {status.name}")
        for line in config.security.lines():
            self._display.say(line)
        patience = f"{config.drain_timeout_s:g} s"
        self._display.say(f"Ctrl-C lets running answers finish, for at most {patience}, and stops everything.")
        self._cluster = cluster
        if self._ready_file is not None:
            self._ready_file.write(cluster)

    def stopping(self) -> None:
        """No longer ready: the ready file goes first."""
        self._cluster = None
        self._stopping = True
        if self._ready_file is not None:
            self._ready_file.remove()


async def run_cluster(config: ClusterConfig, announcer: Announcer) -> None:
    """Run until a signal; returns when everything has ended. Raises what `LocalCluster` raises."""
    async with StopSignals() as signals:
        cluster = LocalCluster(config, announcer)
        asked = asyncio.create_task(signals.wait())
        serving = asyncio.create_task(_serve(cluster, announcer))
        try:
            await asyncio.wait((asked, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            announcer.stopping()
            for task in (asked, serving):
                task.cancel()
            await asyncio.wait((asked, serving))
            limit_s = config.drain_timeout_s + STOP_MARGIN_S
            if not await signals.bounded(cluster.stop(), limit_s, "stopping the cluster"):
                await cluster.kill()


async def _serve(cluster: LocalCluster, announcer: Announcer) -> None:
    cluster.start()
    certificates = cluster.config.security.renewed
    work = [asyncio.ensure_future(_until_failed(cluster, announcer))]
    if certificates is not None:
        work.append(asyncio.ensure_future(certificates.keep(MonotonicClock())))
    try:
        ended, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in work:
            task.cancel()
        await asyncio.wait(work)


async def _until_failed(cluster: LocalCluster, announcer: Announcer) -> None:
    await cluster.wait_ready()
    announcer.ready(cluster)
    await cluster.wait_failed()


@click.command("up", cls=SectionedCommand)
def up(**given: Unpack[UpFlags]) -> None:
    """Run a whole cluster on this machine: a router, prefill workers and decode workers, in the foreground.

    The router answers OpenAI and gRPC clients. A worker that dies is started again. Ctrl-C or SIGTERM lets running
    answers finish, then stops everything; a second one stops at once.

    \b
    Examples:
      diptych up --model smollm2-135m-instruct
      diptych up --model ./my-model --prefill 2 --decode 1 --kv-memory 2GiB
    """
    ready_file = ReadyFile(given["ready_file"]) if given["ready_file"] is not None else None
    given_secret = check_secret(given["cluster_secret_file"])
    wanted = cluster_security(
        given["host"],
        given["api_keys"],
        protect_metrics=given["protect_metrics"],
        tls=given["tls"],
        tls_dir=given["tls_dir"],
    )
    with wanted as security:  # files that cannot be used are told before a model is fetched
        model_dir = fetch(given["model"], given["cache_dir"])
        secret = given_secret or security.secret
        config = cluster_config(given, model_dir, replace(security, log_prompts=given["log_prompts"], secret=secret))
        configure_logging("up", config.log_level)
        with make_display(plain=given["plain"]) as display:
            asyncio.run(run_cluster(config, Announcer(display, ready_file)))


apply(OPTIONS, up)
