"""What a local cluster is made of and how its processes are looked after; the only place of `cli` that reads the environment.

Does not know how anything is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cli.clustersecurity import SecurityOptions
from dashboard.slo import SloConfig
from engine.execution.config import ENVIRONMENT as EXECUTION_ENVIRONMENT
from engine.models.store.config import ENVIRONMENT as STORE_ENVIRONMENT
from engine.placement.topology import read_topology
from kernels.cpu.config import ENVIRONMENT as KERNELS_ENVIRONMENT
from kv_transfer.config import ENVIRONMENT as TRANSFER_ENVIRONMENT
from observability.tracing.config import ENVIRONMENT as TRACING_ENVIRONMENT
from observability.tracing.config import TracingConfig
from registry.config import ENVIRONMENT as REGISTRY_ENVIRONMENT
from registry.config import SECRETS, RedisConfig
from router.config import AdmissionConfig, ChatConfig, DisaggregationConfig, LimitsConfig, PolicyConfig
from rpc.cores import Cores

MIB, GIB = 2**20, 2**30

# What each variable does, for `diptych doctor`: names that change how Diptych, torch or the hub client behave.
ENVIRONMENT = (
    STORE_ENVIRONMENT
    | EXECUTION_ENVIRONMENT
    | KERNELS_ENVIRONMENT
    | TRANSFER_ENVIRONMENT
    | REGISTRY_ENVIRONMENT
    | TRACING_ENVIRONMENT
    | {
        "OMP_NUM_THREADS": "threads of OpenMP loops in torch; the engine goes by --threads, else by its cores",
        "MKL_NUM_THREADS": "threads of MKL; the engine goes by --threads, else by its cores",
        "OMP_WAIT_POLICY": "ACTIVE makes idle OpenMP threads spin, which starves the other workers of a small machine",
        "PYTHONPATH": "folders that are searched before the installed packages; may hide our `kernels` or `router`",
        "HF_HOME": "where huggingface_hub keeps its downloads",
        "HF_TOKEN": "the hub's token, for models whose terms have to be accepted",
        "HF_ENDPOINT": "another hub, such as a mirror",
        "PIP_INDEX_URL": "where pip gets the built-in model's package",
        "HF_HUB_OFFLINE": "1 forbids huggingface_hub to use the network",
        "HTTP_PROXY": "proxy for HTTP clients; must not catch 127.0.0.1",
        "HTTPS_PROXY": "proxy for HTTPS clients",
        "NO_PROXY": "hosts that are reached without a proxy",
    }
)
_SECRETS = SECRETS | {"HF_TOKEN"}


def environment() -> dict[str, str]:
    """The variables of `ENVIRONMENT` that are set, with their values; of secrets only that they are."""
    found = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}  # noqa: TID251
    return {name: "***" if name in _SECRETS else value for name, value in found.items()}


def child_environment(secrets: Mapping[str, str]) -> dict[str, str]:
    """What a child process inherits, and besides what is on nobody's command line."""
    return {**os.environ, **secrets}  # noqa: TID251


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a process that died is started again.

    The n-th death in a row is followed by a pause of `backoff_s` doubled n - 1 times, at most `max_backoff_s`. A process
    that was ready for `stable_s` starts a new row. After `max_deaths` in a row nobody tries again. One that is not ready
    within `start_timeout_s` is killed, which counts as a death.
    """

    backoff_s: float = 0.5
    max_backoff_s: float = 10.0
    stable_s: float = 10.0
    max_deaths: int = 5
    start_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What every worker of the cluster is started with. None leaves the choice to the worker."""

    connector: str = "auto"
    integrity: str = "sampled"
    dtype: str = "auto"
    quantization: str = "auto"
    device: str = "auto"
    kv_memory_bytes: int | None = 512 * MIB
    max_model_len: int | None = None  # tokens
    max_num_batched_tokens: int | None = None  # tokens a step
    max_num_seqs: int | None = None  # requests a step
    scheduling: str = "fcfs"
    prefix_caching: bool = True
    threads: int | None = 1  # None: one for each of the worker's cores


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """How the router of the cluster treats its clients."""

    chat: ChatConfig = field(default_factory=ChatConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    max_body_bytes: int = 8 * MIB
    request_timeout_s: float = 600.0
    tracing: TracingConfig | None = None
    slo: SloConfig = field(default_factory=SloConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A router and its workers on one machine. Port 0 takes a free one."""

    model_dir: Path
    model_name: str
    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50051
    policies: PolicyConfig = field(default_factory=PolicyConfig)
    redis: RedisConfig | None = None  # the registry, shared with others; None: the router's own
    canary_interval_s: float | None = None
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    door: DoorOptions = field(default_factory=DoorOptions)
    security: SecurityOptions = field(default_factory=SecurityOptions)
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    metrics_ports: tuple[int, int] = (0, 0)  # of the first prefill and decode worker, the next ones follow; 0: any
    worker_cores: tuple[Cores, ...] | Literal["auto"] = ()  # of each worker, prefill workers first; empty: any
    log_level: str = "warning"
    drain_timeout_s: float = 10.0
    restart: RestartPolicy = field(default_factory=RestartPolicy)


def default_threads(num_workers: int) -> int:
    """The cores of this machine divided over the workers, at least one each."""
    return max(1, read_topology().num_threads // max(1, num_workers))
