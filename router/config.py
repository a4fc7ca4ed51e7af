"""What a router is told when it starts: one frozen part for each of its parts, each part gets only its own.

Nothing here is read from the environment, and one thing is written there; `cli` builds it from flags. Seconds, bytes and
counts carry their unit.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from contracts.errors import ConfigError
from contracts.secret import ClusterSecret
from dashboard.slo import SloConfig
from observability.tracing.config import TracingConfig
from registry.config import RedisConfig
from rpc.channel import ChannelConfig
from rpc.server import ServerConfig
from rpc.tls import TlsConfig

MIB = 2**20


def tokenize_in_own_threads() -> None:
    """Have the tokenizers library work in the thread that calls it: it takes only this word for it, and when it is told.

    A batch of one text has nothing to share out, and a pool of the library's own would not have our threads' low priority.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # noqa: TID251


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP door. Port 0 takes any free one.

    A client that does not send the rest of its request for `stall_s`, or reads less than 64 KiB/s of its answer for as long while
    that waits in memory, is cut off. Of more connections than `max_connections` those are cut that ask nothing.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 8 * MIB
    keep_alive_s: int = 30
    stall_s: float = 60.0
    max_connections: int = 4096
    tls: TlsConfig | None = None


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How conversations are read and answered. `tool_call_parser` is how the model writes calls of tools: a name of
    `router.toolcalls.dialects`, "auto" for what its chat template tells, "none" for no tools.
    """

    tool_call_parser: str = "auto"
    trust_request_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Who may come in, and how the router shows itself to workers.

    `api_keys` is a key file (`router.keys`); None lets everybody in. `workers` is where workers announce themselves; None is
    the gRPC port. `tls` is what the router reaches workers with. With keys, /metrics asks for one only if `protect_metrics`.
    `secret` is what processes of the cluster prove to each other that they know; None believes whoever reaches a port.
    `log_prompts` writes what users ask and are answered to the log.
    """

    api_keys: Path | None = None
    protect_metrics: bool = False
    workers: ServerConfig | None = None
    tls: TlsConfig | None = None
    secret: ClusterSecret | None = None
    log_prompts: bool = False


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """How many answers are made at once (a request of `n` counts n), and how many requests may wait besides; over both a
    client gets 429.

    `max_running` None follows what the ready decode workers say that they run at once (`router.admission.capacity`).
    `max_waiting_tokens` bounds those that wait by about what prompts and answers take together, `max_wait_s` by how long
    they wait or would; None bounds neither. Who is sent away is told to come back after at most `max_retry_after_s`. One
    turn in `ageing_turn` goes to a worse priority that has waited for more than `ageing_s`.
    """

    max_running: int | None = None
    max_waiting: int = 1024
    max_waiting_tokens: int | None = None
    max_wait_s: float | None = 30.0
    max_retry_after_s: float = 60.0
    ageing_s: float = 10.0
    ageing_turn: int = 8


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What one caller may use per minute where its key does not say otherwise; None is no limit.

    Who has used nothing for `burst_s` may use at once what that time allows.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    burst_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RetryBudgetConfig:
    """What all requests together may retry within `window_s` seconds: `ratio` of the requests begun, and `min_per_s`."""

    ratio: float = 0.2
    min_per_s: float = 10.0
    window_s: float = 10.0


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When a worker's breaker opens (`router.workers.breakers`); seconds, counts and shares.

    After `failures_in_a_row`, or when of at least `min_requests` that ended within `window_s` the share `failure_share`
    failed. It rests for `open_s`, twice as long each time up to `max_open_s`, each give or take the share `jitter`.
    A probe that has said nothing for `probe_timeout_s` makes way for another.
    """

    window_s: float = 10.0
    min_requests: int = 10
    failure_share: float = 0.5
    failures_in_a_row: int = 5
    open_s: float = 1.0
    max_open_s: float = 30.0
    jitter: float = 0.2
    probe_timeout_s: float = 5.0


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
    budget: RetryBudgetConfig = field(default_factory=RetryBudgetConfig)  # of the whole router, not of one request


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """How a worker of each pool is chosen; names of `router.policies`.

    A prompt that was sent to a worker counts as cached there for `expect_s`, until the worker itself tells.
    """

    prefill: str = "prefix_aware"
    decode: str = "prefix_aware"
    expect_s: float = 5.0


class DisaggregationMode(StrEnum):
    """Which requests go over both pools: the cheaper way for each (auto), all that can, none."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class DisaggregationConfig:
    """How the way through the pools is chosen where the request does not say it; see `router.choosing.decision`.

    `above_tokens` takes the place of the cost model: prompts with more tokens that decode has not cached go over both pools.
    `stall_weight` is what a second that a running stream waits counts against one that a new request waits: 0 where every
    stream is far inside its limit. Exploring may add the share `explore_share` to the predicted delay, and goes a way that
    nobody went for `explore_every_s`.
    """

    mode: DisaggregationMode = DisaggregationMode.AUTO
    above_tokens: int | None = None
    stall_weight: float = 1.0
    explore_share: float = 0.02
    explore_every_s: float = 10.0

    def __post_init__(self) -> None:
        """Raise ConfigError naming the first value that cannot work."""
        for name, value in (("stall_weight", self.stall_weight), ("explore_every_s", self.explore_every_s)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"disaggregation.{name}: got {value}, must be at least 0 and finite")
        if not 0 <= self.explore_share <= 1:
            raise ConfigError(f"disaggregation.explore_share: got {self.explore_share}, must be from 0 to 1")
        if self.above_tokens is not None and self.above_tokens < 0:
            raise ConfigError(f"disaggregation.above_tokens: got {self.above_tokens}, must be at least 0")
        if self.above_tokens is not None and self.mode is not DisaggregationMode.AUTO:
            raise ConfigError(
                f"disaggregation.above_tokens: got {self.above_tokens} with mode {self.mode}; only auto asks"
            )


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
    """Everything. `model_dir` is a Hugging-Face-style directory, of which only tokenizer and config files are read.

    `redis` is the registry shared with other routers; None: workers announce themselves to this router. `slo` is what the
    dashboard and the metrics of goodput measure requests by.
    """

    model_dir: Path
    model_name: str
    http: HttpConfig = field(default_factory=HttpConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    grpc: ServerConfig = field(default_factory=lambda: ServerConfig(port=50051, max_request_bytes=8 * MIB))
    channel: ChannelConfig = field(default_factory=ChannelConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    policies: PolicyConfig = field(default_factory=PolicyConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    redis: RedisConfig | None = None
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    tracing: TracingConfig | None = None
    slo: SloConfig = field(default_factory=SloConfig)
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ConfigError naming the first value that cannot work."""
        positive = {
            "http.max_body_bytes": self.http.max_body_bytes,
            "http.stall_s": self.http.stall_s,
            "http.max_connections": self.http.max_connections,
            "admission.max_running": 1 if self.admission.max_running is None else self.admission.max_running,
            "admission.ageing_turn": self.admission.ageing_turn,
            "limits.burst_s": self.limits.burst_s,
            "registry.ttl_s": self.registry.ttl_s,
            "breaker.window_s": self.breaker.window_s,
            "breaker.failures_in_a_row": self.breaker.failures_in_a_row,
            "breaker.failure_share": self.breaker.failure_share,
            "breaker.open_s": self.breaker.open_s,
            "retry.budget.window_s": self.retry.budget.window_s,
            "canary.spacing_s": self.canary.spacing_s,
            "canary.timeout_s": self.canary.timeout_s,
            "canary.retry_s": self.canary.retry_s,
            "request_timeout_s": self.request_timeout_s,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name}: got {value}, must be above 0")
        if not self.policies.expect_s >= 0:
            raise ConfigError(f"policies.expect_s: got {self.policies.expect_s}, must be at least 0")
        if not self.canary.interval_s >= 0:
            raise ConfigError(f"canary.interval_s: got {self.canary.interval_s}, must be at least 0")
        if self.grpc.port == self.http.port != 0:
            raise ConfigError(f"grpc.port: got {self.grpc.port}, which is http.port; each needs a port of its own")
        if not self.model_name:
            raise ConfigError("model_name: must not be empty")
