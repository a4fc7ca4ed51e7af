"""What a router is told when it starts: one frozen part for each of its parts, each part gets only its own.

Nothing here is read from the environment; `cli` builds it from flags. Seconds, bytes and counts carry their unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import ConfigError
from rpc.channel import ChannelConfig
from rpc.server import ServerConfig

MIB = 2**20


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP door. Port 0 takes any free one.

    A client that neither sends the rest of its request nor reads its answer for `stall_s` is cut off.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 8 * MIB
    keep_alive_s: int = 30
    stall_s: float = 60.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """How many answers are made at once (a request of `n` counts n), and how many requests may wait besides; over both a
    client gets 429.
    """

    max_running: int = 256
    max_waiting: int = 1024


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """What one request may cost in failures before its client hears of them.

    `max_failures` counts lost workers, failed hand-offs and refusals of one request together; after `max_handoff_failures`
    failed hand-offs it runs on a decode worker alone. A request may be what its workers die of: more than
    `max_worker_deaths` in a row that went away while they had it end it; a row ends where it makes eight tokens more. A
    worker that drains and gives a request up costs it nothing of all that. While no worker is there, a request that already
    ran waits up to `worker_wait_s` for one, and a new one does where the last was there no longer ago than that; so does
    every request in the router's first `first_worker_wait_s`, in which the workers of its last life find it again. A
    prefill worker's word is awaited for `handoff_verdict_s`: why it gave a hand-off up, where decode says that it did; that
    it has heard of another target, where the decode worker was lost before the commit.
    """

    max_failures: int = 6
    max_worker_deaths: int = 2
    max_handoff_failures: int = 2
    backoff_s: float = 0.05
    worker_wait_s: float = 30.0
    first_worker_wait_s: float = 10.0
    handoff_verdict_s: float = 3.0


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """How a worker of each pool is chosen; names of `router.policies`."""

    prefill: str = "least_loaded"
    decode: str = "least_loaded"


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """How long an announcement is believed, in seconds. Workers are told, and repeat theirs well within.

    A worker that was not heard for the share `quiet` of it gets nothing new until it is heard again; after `ttl_s` it counts
    as lost, and what it has is given to others.
    """

    ttl_s: float = 5.0
    quiet: float = 0.7

    @property
    def quiet_s(self) -> float:
        """For how long a worker may be silent and be offered."""
        return self.ttl_s * self.quiet


@dataclass(frozen=True, slots=True)
class CanaryConfig:
    """How the ways between the pools are proven where no user does it; seconds.

    A pair of workers without a hand-off for `interval_s` gets a canary; 0 sends none, and calls no pair bad. At most one is
    sent per `spacing_s`, and one is under way for at most `timeout_s`. A pair is bad after `canary_failures` canaries or
    `handoff_failures` users' hand-offs that failed running. One that failed is tried again after `retry_s`, doubling up to
    `max_backoff_s`.
    """

    interval_s: float = 10.0
    spacing_s: float = 1.0
    timeout_s: float = 5.0
    canary_failures: int = 2
    handoff_failures: int = 3
    retry_s: float = 1.0
    max_backoff_s: float = 30.0

    @property
    def enabled(self) -> bool:
        """Whether canaries are sent."""
        return self.interval_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything. `model_dir` is a Hugging-Face-style directory, of which only tokenizer and config files are read."""

    model_dir: Path
    model_name: str
    http: HttpConfig = field(default_factory=HttpConfig)
    grpc: ServerConfig = field(default_factory=lambda: ServerConfig(port=50051))
    channel: ChannelConfig = field(default_factory=ChannelConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    policies: PolicyConfig = field(default_factory=PolicyConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ConfigError naming the first value that cannot work."""
        positive = {
            "http.max_body_bytes": self.http.max_body_bytes,
            "http.stall_s": self.http.stall_s,
            "admission.max_running": self.admission.max_running,
            "registry.ttl_s": self.registry.ttl_s,
            "canary.spacing_s": self.canary.spacing_s,
            "canary.timeout_s": self.canary.timeout_s,
            "canary.retry_s": self.canary.retry_s,
            "request_timeout_s": self.request_timeout_s,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name}: got {value}, must be above 0")
        if not self.canary.interval_s >= 0:
            raise ConfigError(f"canary.interval_s: got {self.canary.interval_s}, must be at least 0")
        if self.grpc.port == self.http.port != 0:
            raise ConfigError(f"grpc.port: got {self.grpc.port}, which is http.port; each needs a port of its own")
        if not self.model_name:
            raise ConfigError("model_name: must not be empty")
