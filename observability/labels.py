"""The labels of metrics, and what bounds their values: a closed set that is written here, or a reason.

Two metrics may have a label of one name and other values; each says which is its. A value that comes from outside and is not in a
closed set must be made one that is, as a connector that is not known is "other". Does not know metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from observability.stages import GAP_STAGES, TTFT_STAGES


@dataclass(frozen=True, slots=True)
class Label:
    """One. `values` are all that it may have; where there are none it is open, and `why` says what bounds it.

    `whole`: counters have a series for each from the start, since rate() does not see what brings a series with it.
    """

    name: str
    values: tuple[str, ...] = ()
    why: str = ""
    whole: bool = False


CONNECTORS = ("shm", "tcp", "local", "nixl", "other")
POOLS = ("prefill", "decode")
SHED_REASONS = ("full", "full_tokens", "pushed_out", "wait", "deadline")
ENDINGS = ("committed", "failed", "aborted")
LOSSES = ("expired", "aborted", "refused", "peer_restarted")
RESERVATIONS = ("granted", "no_room", "refused")
LEASE_STATES = ("reserved", "receiving", "draining")
ERROR_CODES = (
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "FAILED_PRECONDITION",
    "INTERNAL",
)
STAGES = (
    *TTFT_STAGES,
    "ttft_unexplained",
    "ttft_overexplained",
    *GAP_STAGES,
    "gap_unexplained",
    "gap_overexplained",
)

MODEL = Label("model_name", why="one for each process")
ENGINE = Label("engine", ("0", *POOLS))
WORKER = Label("worker_id", why="workers that the router knows; one that has gone leaves no series")
POOL = Label("pool", POOLS, whole=True)
ROUTE = Label("route", ("disaggregated", "colocated", "none"))
PATH = Label("path", ("disaggregated", "colocated"))
CONNECTOR = Label("connector", CONNECTORS)
CODE = Label("code", ERROR_CODES, whole=True)
STAGE = Label("stage", STAGES)
DOOR = Label("door", ("http", "grpc"), whole=True)
KIND = Label("kind", ("requests", "tokens"), whole=True)
TASK = Label("task", ("housekeeping", "canary", "dashboard", "breaker news"), whole=True)
METHOD = Label("method", why="methods that a service has; what is none is not counted")
POLICY = Label("policy", why="the policies that are installed")
WHEN = Label("when", ("before_first_token", "mid_answer"), whole=True)
SOURCE = Label("source", ("local_compute", "local_cache_hit", "external_kv_transfer"))
FINISHED_REASON = Label("finished_reason", ("stop", "length", "abort", "error"))

OUTCOME = Label("outcome", ("stop", "length", *ERROR_CODES))
CANARY_OUTCOME = Label("outcome", ("ok", "failed", "undecided"), whole=True)
TRANSFER_OUTCOME = Label("outcome", ENDINGS, whole=True)
RESERVATION_OUTCOME = Label("outcome", RESERVATIONS, whole=True)
WORKER_STATE = Label("state", ("starting", "ready", "stalled", "draining", "gone"))
BLOCK_STATE = Label("state", ("sent", "cached"), whole=True)
LEASE_STATE = Label("state", LEASE_STATES)
SHED_REASON = Label("reason", SHED_REASONS, whole=True)
LOSS = Label("reason", LOSSES, whole=True)
DECISION_REASON = Label(
    "reason",
    ("request", "no_pair", "handoffs_failed", "always", "never", "above", "below", "cheaper", "explore"),
)
MIGRATION_CAUSE = Label("cause", ("failure", "drain"), whole=True)
BREAKER_CAUSE = Label("cause", ("failures", "warned"), whole=True)
SLO_LIMIT = Label("slo", ("ttft", "itl", "e2e"))
SLO_PROMISE = Label("slo", ("ttft", "itl", "e2e", "errors"))
SLO_SHARE = Label("slo", ("ttft", "itl", "e2e", "errors", "all"))

BLOCK_SIZE = Label("block_size", why=MODEL.why)
NUM_BLOCKS = Label("num_gpu_blocks", why=MODEL.why)
CACHING = Label("enable_prefix_caching", ("True", "False"))
CACHE_DTYPE = Label("cache_dtype", why=MODEL.why)
