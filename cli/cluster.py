"""A whole cluster on this machine: one router, its workers, each a child process of ours.

    async with LocalCluster(config, listener) as cluster:      # children started
        await cluster.wait_ready()                             # all of them answer, the router knows the workers
        … cluster.http_url, cluster.grpc_address …
    # router drained and gone, then the workers; no process and no port left

Owns the children and the ports; `stop` gives both back, whatever state they are in. Children end with this process even
if it is killed, because they ask the kernel for that (`--exit-with`). Does not know requests or models.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self

import grpc
import httpx
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.config import ClusterConfig, DoorOptions
from cli.options import MAX_PORT
from cli.ports import KeptPort, keep_port
from cli.process import ProcessListener, ProcessSpec, ProcessState, ProcessStatus, SupervisedProcess
from contracts.clock import Clock, MonotonicClock
from contracts.errors import ConfigError, DiptychError
from dashboard.slo import SloConfig
from rpc.channel import ChannelOpener, open_channel
from rpc.cores import written
from rpc.secure_channel import opener_for
from rpc.tls import TlsConfig
from rpc.tls_context import client_context

PROBE_TIMEOUT_S = 2.0
SEEN_PAUSE_S = 0.1
MIN_STOP_S = 2.0
METRICS_PORTS_FLAG = "--worker-metrics-ports"


class ClusterFailed(DiptychError):
    """The cluster cannot serve: what it needs died and nobody tries again."""


class LocalCluster:
    """See the module's docstring."""

    def __init__(self, config: ClusterConfig, listener: ProcessListener, clock: Clock | None = None) -> None:
        self.config = config
        self._listener = listener
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._ports: list[KeptPort] = []
        self._processes: list[SupervisedProcess] = []
        self._runs: list[asyncio.Task[None]] = []
        self.http_url = ""
        self.grpc_address = ""

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def statuses(self) -> tuple[ProcessStatus, ...]:
        """The router first, then prefill workers, then decode workers."""
        return tuple(process.status for process in self._processes)

    def start(self) -> None:
        """Take the ports and start every process. ConfigError when a port cannot be had; then nothing is left behind."""
        config = self.config
        try:
            http = self._keep(config.host, config.http_port, "--http-port")
            front = self._keep(config.host, config.grpc_port, "--grpc-port")
            apart = self._keep("127.0.0.1", 0, "--worker-port") if config.security.apart else None
            names = [("prefill", f"prefill-{i}") for i in range(config.num_prefill)]
            names += [("decode", f"decode-{i}") for i in range(config.num_decode)]
            metrics_ports = in_a_row(config.metrics_ports[0], config.num_prefill)
            metrics_ports += in_a_row(config.metrics_ports[1], config.num_decode)
            workers = [
                (*named, self._keep("127.0.0.1", 0, "--host"), self._keep("127.0.0.1", port, METRICS_PORTS_FLAG))
                for named, port in zip(names, metrics_ports, strict=True)
            ]
        except ConfigError:
            self._release_ports()
            raise
        self.http_url = f"{config.security.scheme}://{http.local_address}"
        self.grpc_address = front.local_address
        secrets = {} if config.redis is None else config.redis.address.secrets
        argv = (*router_argv(config, http, front), *config.security.router_argv(apart))
        specs = [ProcessSpec("router", "router", argv, front.local_address, f"{self.http_url}/metrics", secrets)]
        announce_at = front.local_address if apart is None else apart.local_address
        for number, (kind, name, port, metrics) in enumerate(workers):
            argv = (*worker_argv(config, kind, name, port, announce_at), *config.security.process_argv())
            argv = (*argv, "--metrics-port", str(metrics.port))
            argv = (*argv, *cores_argv(config, number))
            shown = f"http://{metrics.local_address}/metrics"
            specs.append(ProcessSpec(name, kind, argv, port.local_address, shown, secrets))
        opener = opener_for(config.security.identity)
        for spec in specs:
            probe = health_probe(spec.address, opener)
            self._processes.append(SupervisedProcess(spec, probe, config.restart, self._clock, self._listener))
        self._runs = [asyncio.create_task(process.run(), name=process.spec.name) for process in self._processes]

    async def wait_ready(self) -> None:
        """Return when every process answers and the router would choose from all workers.

        Raises ConfigError with a child's own complaint when it was refused its arguments; ClusterFailed when one gave up,
        or the router does not take a worker.
        """
        for settled in asyncio.as_completed([process.wait_settled() for process in self._processes]):
            await settled
            self._check_started()
        wanted = {"prefill": self.config.num_prefill, "decode": self.config.num_decode}
        give_up_at = self._clock.now() + self.config.restart.start_timeout_s
        while not self._has_all(known := await _known_workers(self.http_url, self.config.security.identity), wanted):
            self._check_started()
            if self._clock.now() >= give_up_at:
                raise ClusterFailed(f"the router would choose from {known}, not from {wanted}; see the workers' log")
            await self._clock.sleep(SEEN_PAUSE_S)

    def _has_all(self, known: Mapping[str, int], wanted: Mapping[str, int]) -> bool:
        """In a shared registry there may be others, too."""
        if self.config.redis is None:
            return known == wanted
        return all(known.get(pool, 0) >= number for pool, number in wanted.items())

    async def wait_failed(self) -> None:
        """Does not return: raises ClusterFailed once the router, or every decode worker, is dead for good."""
        while True:
            dead = [status for status in self.statuses if status.state is ProcessState.DEAD]
            decode_dead = sum(status.kind == "decode" for status in dead)
            if decode_dead == self.config.num_decode or any(status.kind == "router" for status in dead):
                raise ClusterFailed(_name_dead(dead))
            if all(run.done() for run in self._runs):
                raise ClusterFailed("every process has ended")
            await asyncio.wait([run for run in self._runs if not run.done()], return_when=asyncio.FIRST_COMPLETED)

    async def stop(self) -> None:
        """Drain and end the router, then the workers, hurrying what takes longer than the drain timeout. Idempotent.

        Each drains within that timeout by itself; workers have nothing left to do once the router has gone.
        """
        deadline = self._clock.now() + self.config.drain_timeout_s
        routers = [process for process in self._processes if process.spec.kind == "router"]
        workers = [process for process in self._processes if process.spec.kind != "router"]
        for group in (routers, workers):
            left_s = max(deadline - self._clock.now(), MIN_STOP_S)
            await asyncio.gather(*(process.stop(left_s) for process in group))
        await self._let_go()

    async def kill(self) -> None:
        """End everything now, without draining. Idempotent."""
        await asyncio.gather(*(process.stop(0.0, 0.0) for process in self._processes))
        await self._let_go()

    def _keep(self, host: str, port: int, option: str) -> KeptPort:
        if port and port in {kept.port for kept in self._ports}:  # the system would let us have it twice
            raise ConfigError(f"{option}: {port} is another port of this cluster as well; each needs one of its own")
        kept = keep_port(host, port, option)
        self._ports.append(kept)
        return kept

    async def _let_go(self) -> None:
        await asyncio.gather(*self._runs)
        self._release_ports()

    def _release_ports(self) -> None:
        for port in self._ports:
            port.release()

    def _check_started(self) -> None:
        for process in self._processes:
            status = process.status
            if status.state is ProcessState.DEAD:
                if process.wrong_arguments:
                    raise ConfigError(status.detail)
                raise ClusterFailed(_name_dead([status]))


def _name_dead(dead: list[ProcessStatus]) -> str:
    return "; ".join(f"{status.name}: {status.detail}" for status in dead)


def _command(name: str) -> list[str]:
    """`diptych NAME` in a child: -P keeps the caller's folder from hiding our packages."""
    return [sys.executable, "-P", "-m", "cli", name, "--exit-with", str(os.getpid())]


def router_argv(config: ClusterConfig, http: KeptPort, front: KeptPort) -> tuple[str, ...]:
    """The router's command line."""
    argv = [*_command("router"), "--model", str(config.model_dir), "--served-name", config.model_name]
    argv += ["--host", config.host, "--http-port", str(http.port), "--grpc-port", str(front.port)]
    argv += ["--log-level", config.log_level, "--drain-timeout", str(config.drain_timeout_s)]
    if config.redis is not None:
        argv += ["--registry", config.redis.address.url]
    argv += ["--prefill-policy", config.policies.prefill, "--decode-policy", config.policies.decode]
    ways = config.disaggregation
    argv += ["--disaggregate", ways.mode.value, "--stall-weight", str(ways.stall_weight)]
    if ways.above_tokens is not None:
        argv += ["--disaggregate-above", str(ways.above_tokens)]
    if config.canary_interval_s is not None:
        argv += ["--canary-interval", str(config.canary_interval_s)]
    return (*argv, *_door_argv(config.door))


def _door_argv(door: DoorOptions) -> list[str]:
    admission, limits = door.admission, door.limits
    argv = ["--max-waiting", str(admission.max_waiting)]
    argv += ["--max-body", str(door.max_body_bytes), "--request-timeout", str(door.request_timeout_s)]
    argv += ["--tool-call-parser", door.chat.tool_call_parser]
    argv += [] if door.tracing is None else ["--otlp-endpoint", door.tracing.endpoint]
    argv += _slo_argv(door.slo)
    argv += ["--trust-request-chat-template"] if door.chat.trust_request_chat_template else []
    for flag, value in (
        ("--max-running", admission.max_running),
        ("--max-waiting-tokens", admission.max_waiting_tokens),
        ("--max-wait", admission.max_wait_s),
        ("--requests-per-minute", limits.requests_per_minute),
        ("--tokens-per-minute", limits.tokens_per_minute),
    ):
        if value is not None:
            argv += [flag, str(value)]
    return argv


def _slo_argv(slo: SloConfig) -> list[str]:
    argv: list[str] = []
    for name, limit_s in (("ttft", slo.ttft_s), ("itl", slo.itl_s), ("e2e", slo.e2e_s)):
        argv += ["--slo", f"{name}:off" if limit_s is None else f"{name}:{limit_s * 1e3:.12g}"]
    return argv


def worker_argv(config: ClusterConfig, kind: str, name: str, port: KeptPort, router: str) -> tuple[str, ...]:
    """The command line of one worker; `kind` is prefill or decode."""
    workers = config.workers
    argv = [*_command(kind), "--model", str(config.model_dir), "--served-name", config.model_name]
    argv += ["--host", port.host, "--port", str(port.port)]
    if config.redis is None:
        argv += ["--worker-id", name, "--router", router]
    else:  # in a shared registry there may be workers of other clusters, and no two can go by one name
        argv += ["--worker-id", f"{name}-{socket.gethostname()}-{os.getpid()}", "--registry", config.redis.address.url]
    argv += ["--connector", workers.connector, "--dtype", workers.dtype]
    argv += ["--quantization", workers.quantization, "--device", workers.device]
    argv += ["--log-level", config.log_level, "--drain-timeout", str(config.drain_timeout_s)]
    argv += ["--scheduling", workers.scheduling, "--integrity", workers.integrity]
    argv += ["--prefix-caching" if workers.prefix_caching else "--no-prefix-caching"]
    for flag, value in (
        ("--kv-memory", workers.kv_memory_bytes),
        ("--max-model-len", workers.max_model_len),
        ("--max-num-batched-tokens", workers.max_num_batched_tokens),
        ("--max-num-seqs", workers.max_num_seqs),
        ("--threads", workers.threads),
    ):
        if value is not None:
            argv += [flag, str(value)]
    return tuple(argv)


def cores_argv(config: ClusterConfig, number: int) -> tuple[str, ...]:
    """The n-th worker's cores, where they are given, and as many threads where nobody says how many."""
    if not config.worker_cores:
        return ()
    if config.worker_cores == "auto":
        return ("--cores", "auto")
    cores = config.worker_cores[number]
    threads = () if config.workers.threads is not None else ("--threads", str(len(cores)))
    return ("--cores", written(cores), *threads)


def health_probe(address: str, opener: ChannelOpener = open_channel) -> Callable[[], Awaitable[bool]]:
    """A question to gRPC health checking at `address`: does the whole server say SERVING?"""

    async def probe() -> bool:
        async with opener(address, None) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return False  # not listening yet, or no longer: the answer to the question
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return probe


class _Health(msgspec.Struct):
    """What the router's /health says of the workers that it knows: how many of each pool are ready."""

    ready: dict[str, int]


def in_a_row(first: int, count: int) -> list[int]:
    """Ports, 0 for any. Raises ConfigError where the numbers end before the workers do."""
    if first + count - 1 > MAX_PORT:
        raise ConfigError(f"{METRICS_PORTS_FLAG}: {count} workers from {first} on need ports above {MAX_PORT}")
    return [first + number if first else 0 for number in range(count)]


async def _known_workers(http_url: str, identity: TlsConfig | None) -> dict[str, int]:
    """How many workers of each pool the router would choose from; none while it does not answer."""
    verify = True if identity is None else client_context(identity)
    async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False, verify=verify) as client:
        try:
            response = await client.get(f"{http_url}/health")
            return msgspec.json.decode(response.content, type=_Health).ready
        except (httpx.TransportError, msgspec.DecodeError):
            return {}  # the router was restarted a moment ago, or is not ready
