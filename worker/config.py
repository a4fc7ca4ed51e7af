"""What a worker of either pool is told at its start. Frozen; reads no environment. Does not know how it got its values."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.errors import ConfigError
from contracts.kv_layout import AS_IT_IS, TRANSFER_DTYPES
from contracts.secret import ClusterSecret
from engine.build import ModelRuntimeConfig
from engine.config import SchedulerConfig
from engine.placement.choice import Placement
from kv_transfer.choose import AUTO, NetworkConfig
from registry.config import RedisConfig
from rpc.announce import AnnounceConfig
from rpc.lifecycle import LifecycleConfig
from rpc.server import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process.

    `kv_memory_bytes` None sizes the KV pool by measurement; beside one on a GPU, or whose blocks travel in a narrow form (as
    `kv_transfer_dtype` says), lie `kv_staging_bytes` of the host.
    `connectors` are kinds, or ("auto",). `routers` are host:port of routers' gRPC ports to announce to, `redis` the registry
    that routers share. `metrics_port` None serves no metrics; 0 takes a free port. `secret` is what processes of the cluster
    prove to each other that they know; None believes whoever reaches a port. `placement` is what the process already has,
    for it to say.
    """

    worker_id: str
    model_name: str
    model: ModelRuntimeConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_memory_bytes: int | None = None
    kv_staging_bytes: int = 1 << 30
    kv_transfer_dtype: str = AS_IT_IS
    connectors: tuple[str, ...] = (AUTO,)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    routers: tuple[str, ...] = ()
    redis: RedisConfig | None = None
    announce: AnnounceConfig = field(default_factory=AnnounceConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    secret: ClusterSecret | None = None
    placement: Placement | None = None

    def __post_init__(self) -> None:
        if self.kv_staging_bytes < 1:
            raise ConfigError(f"kv_staging_bytes: got {self.kv_staging_bytes}, must be at least 1")
        if self.kv_transfer_dtype not in TRANSFER_DTYPES:
            known = ", ".join(TRANSFER_DTYPES)
            raise ConfigError(f"kv_transfer_dtype: got {self.kv_transfer_dtype!r}, must be one of {known}")
        if not self.worker_id:
            raise ConfigError("worker_id: got '', must not be empty")
