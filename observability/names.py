"""Every metric of every process, once: its name as a query says it, its kind, its labels, and which processes have it.

    diptych_*   ours, with a unit in each name
    vllm:*      the names that existing dashboards and autoscalers query, with vLLM's meaning and labels
    process_*   what the operating system says of the process; words are the client library's own

Of an alias `engine` is "0" at the router, whose numbers are those of users' requests, and the pool's name at a worker: summed
without it, a request would count in each process that it passed. docs/metrics.md is made from this. Does not know what counts.
"""

from __future__ import annotations

from observability import labels as has
from observability.labels import Label
from observability.metric import At, Kind, Metric

_R, _W, _P, _D, _A = At.ROUTER, At.WORKERS, At.PREFILL, At.DECODE, At.ALL
_H, _C, _G = Kind.HISTOGRAM, Kind.COUNTER, Kind.GAUGE
_VLLM = (has.MODEL, has.ENGINE)


def _counter(name: str, at: At, what: str, *labels: Label) -> Metric:
    return Metric(name, _C, at, what, labels)


def _gauge(name: str, at: At, what: str, *labels: Label) -> Metric:
    return Metric(name, _G, at, what, labels)


def _histogram(name: str, at: At, what: str, *labels: Label) -> Metric:
    return Metric(name, _H, at, what, labels)


def _alias(name: str, kind: Kind, at: At, what: str, *labels: Label) -> Metric:
    return Metric(f"vllm:{name}", kind, at, what, (*_VLLM, *labels))


# Users' requests, at the router.
REQUESTS = _counter(
    "diptych_requests_total", _R, "Requests, by how they ended and which way they went", has.OUTCOME, has.ROUTE
)
REQUESTS_RUNNING = _gauge("diptych_requests_running", _R, "Answers being made; a request of n counts n")
REQUESTS_WAITING = _gauge("diptych_requests_waiting", _R, "Requests in the router's queue")
TTFT = _histogram("diptych_ttft_seconds", _R, "Arrival to first token", has.MODEL)
ITL = _histogram("diptych_itl_seconds", _R, "Gap between tokens", has.MODEL)
TPOT = _histogram("diptych_tpot_seconds", _R, "(E2E - TTFT) / (tokens - 1)", has.MODEL)
E2E = _histogram("diptych_e2e_seconds", _R, "Arrival to last token", has.MODEL)
SECOND_TOKEN_GAP = _histogram(
    "diptych_second_token_gap_seconds", _R, "First token to second token, as they are written to the client", has.MODEL
)
STAGE = _histogram(
    "diptych_stage_seconds",
    _R,
    "Time of a request in one stage; what no stage explains, or stages explain too much, of TTFT and of the second token's gap",
    has.MODEL,
    has.STAGE,
)
PROMPT_TOKENS = _counter("diptych_prompt_tokens_total", _R, "Prompt tokens of finished requests")
CACHED_PROMPT_TOKENS = _counter("diptych_cached_prompt_tokens_total", _R, "Prompt tokens found in a prefix cache")
GENERATED_TOKENS = _counter("diptych_generated_tokens_total", _R, "Tokens made for clients")
GOODPUT = _counter("diptych_goodput_requests_total", _R, "Requests that missed nothing of what is promised")
SLO_ATTAINMENT = _gauge(
    "diptych_slo_attainment_ratio",
    _R,
    "Share of the last judged requests that did not miss this promise, 0 to 1; 1 before the first",
    has.SLO_SHARE,
)
SLO_LIMIT = _gauge(
    "diptych_slo_limit_seconds",
    _R,
    "The limit that requests are judged by (`--slo`); no series where there is none",
    has.SLO_LIMIT,
)
SLO_JUDGED = _counter(
    "diptych_slo_judged_requests_total",
    _R,
    "Requests that a promise was made to: all but those that their client left, or that were refused for what they asked or for "
    "their caller's own limit",
)
SLO_MISSED = _counter(
    "diptych_slo_missed_requests_total",
    _R,
    "Judged requests that were over this limit, or (errors) that failed or were sent away, which miss nothing else",
    has.SLO_PROMISE,
)

# What went wrong and went on.
FAILED_ATTEMPTS = _counter(
    "diptych_failed_attempts_total", _R, "Attempts that failed and were retried or given up", has.CODE
)
DRAINED_ATTEMPTS = _counter(
    "diptych_drained_attempts_total",
    _R,
    "Attempts that went on elsewhere because their worker is about to stop",
    has.WHEN,
)
RETRIES = _counter("diptych_retries_total", _R, "Attempts that were begun because one before had failed")
RETRIES_REFUSED = _counter("diptych_retries_refused_total", _R, "Retries that were over the router's budget")
MIGRATIONS = _counter(
    "diptych_migrations_total",
    _R,
    "Answers with tokens already given that went on at another worker, by what drove them there",
    has.MIGRATION_CAUSE,
)
BREAKER_OPENINGS = _counter(
    "diptych_worker_breaker_openings_total",
    _R,
    "Breakers that opened because a worker failed requests, or that another router warned of",
    has.POOL,
    has.BREAKER_CAUSE,
)
BREAKER_STATE = _gauge(
    "diptych_worker_breaker_state",
    _R,
    "0 closed, 1 half open (one request at a time), 2 open (none while there is another worker)",
    has.WORKER,
    has.POOL,
)
TASK_RESTARTS = _counter(
    "diptych_router_task_restarts_total", _R, "Tasks of this router that died and were started again", has.TASK
)

# Who is let in.
SHED_REQUESTS = _counter(
    "diptych_shed_requests_total", _R, "Requests refused because of the queue, by why", has.SHED_REASON
)
RATE_LIMITED = _counter(
    "diptych_rate_limited_requests_total", _R, "Requests over their caller's limit, by what was short", has.KIND
)
LOCAL_LIMITS = _counter(
    "diptych_local_rate_limits_total", _R, "Times that a limit was this router's own because Redis was away"
)
QUEUE_TOKENS = _gauge("diptych_queue_tokens", _R, "About how many tokens the waiting requests take")
QUEUE_WAIT = _gauge("diptych_queue_wait_seconds", _R, "About how long the queue needs to empty")
ADMISSION_PLACES = _gauge("diptych_admission_places", _R, "Answers that may be made at once; more wait")
KEY_REFUSALS = _counter("diptych_api_key_refusals_total", _R, "Requests without an API key that is known", has.DOOR)
CERTIFICATE_EXPIRES = _gauge(
    "diptych_tls_certificate_expires_seconds",
    _R,
    "When the certificate that users are shown expires, Unix time; 0 without TLS",
)
REFUSED_CALLS = _counter(
    "diptych_refused_calls_total",
    _A,
    "Calls of other processes that did not prove that they are of this cluster",
    has.METHOD,
)

# Workers, as the router knows them.
WORKERS = _gauge("diptych_workers", _R, "Known workers, by pool and state", has.POOL, has.WORKER_STATE)
WORKER_RUNNING = _gauge("diptych_worker_running_requests", _R, "Requests in the worker's batch", has.WORKER, has.POOL)
WORKER_WAITING = _gauge("diptych_worker_waiting_requests", _R, "Requests in the worker's queue", has.WORKER, has.POOL)
WORKER_QUEUED_TOKENS = _gauge("diptych_worker_queued_tokens", _R, "Tokens not computed yet", has.WORKER, has.POOL)
WORKER_KV_USAGE = _gauge("diptych_worker_kv_usage_ratio", _R, "Share of KV blocks in use, 0 to 1", has.WORKER, has.POOL)
WORKER_EPOCH = _gauge("diptych_worker_epoch", _R, "The worker's life: milliseconds of its start", has.WORKER, has.POOL)
CANARIES = _counter(
    "diptych_canary_total", _R, "Requests of the router's own, to prove a pair of workers", has.CANARY_OUTCOME
)
CANARY_SUCCESS = _gauge(
    "diptych_canary_success_ratio",
    _R,
    "Of the pairs of this worker that were tried, by users' hand-offs or canaries, the share that works, 0 to 1",
    has.WORKER,
    has.POOL,
)
BAD_PAIRS = _gauge("diptych_bad_pairs", _R, "Pairs of workers that get no hand-offs because theirs fail")
REGISTRY_UP = _gauge(
    "diptych_registry_up",
    _R,
    "1 while workers can be heard; 0 while the registry is away and the last known workers are used",
)
REGISTRY_REFUSED_WORDS = _counter(
    "diptych_registry_refused_words_total", _R, "Words of workers in a shared registry that are damaged or do not fit"
)

# Hand-offs, as the router was told.
HANDOFFS = _counter("diptych_handoffs_total", _R, "Hand-offs that were committed", has.CONNECTOR)
FAILED_HANDOFFS = _counter(
    "diptych_failed_handoffs_total", _R, "Hand-offs that failed, or were given up with their decode worker"
)
HANDOFF_BYTES = _counter("diptych_handoff_kv_bytes_total", _R, "KV bytes pushed between pools", has.CONNECTOR)
HANDOFF_BLOCKS = _counter(
    "diptych_handoff_blocks_total", _R, "KV blocks of hand-offs: sent, or cached", has.BLOCK_STATE
)
HANDOFF_TRANSFER = _histogram(
    "diptych_handoff_transfer_seconds", _R, "Busy time of one transfer", has.MODEL, has.CONNECTOR
)
HANDOFF_EXPOSED = _histogram("diptych_handoff_exposed_seconds", _R, "Transfer time a client can feel", has.MODEL)
HANDOFF_SPEED = _histogram(
    "diptych_handoff_gb_per_second",
    _R,
    "Bytes of one transfer over its busy time, in 10^9 bytes per second",
    has.MODEL,
    has.CONNECTOR,
)

# The choice of workers, and of one pool or two.
DECISIONS = _counter(
    "diptych_disagg_decisions_total", _R, "Attempts by their way and why", has.PATH, has.DECISION_REASON
)
REGRET = _histogram(
    "diptych_disagg_regret_seconds",
    _R,
    "Measured cost of the way taken, what streams were seen to lose to it with it, above the predicted cost of the other, "
    "at least 0",
)
PREDICTION_ERROR = _histogram(
    "diptych_disagg_prediction_error_seconds",
    _R,
    "Distance between the measured and the predicted cost of the way taken",
    has.PATH,
)
PREDICTED = _counter(
    "diptych_disagg_predicted_seconds_total",
    _R,
    "Predicted costs of the ways taken, of those that were measured",
    has.PATH,
)
MEASURED = _counter(
    "diptych_disagg_measured_seconds_total",
    _R,
    "Measured costs of the ways taken, of those that were predicted; where the two grow apart, predictions are off to one side",
    has.PATH,
)
POLICY_FAULTS = _counter(
    "diptych_policy_faults_total",
    _R,
    "Requests for which a policy failed, so that the least loaded worker was taken",
    has.POOL,
    has.POLICY,
)
INDEX_LOOKUPS = _counter("diptych_prefix_index_lookups_total", _R, "Requests sent whose prompt was looked up", has.POOL)
INDEX_HITS = _counter(
    "diptych_prefix_index_hits_total",
    _R,
    "Of these, those sent where some of the prompt was known to be cached",
    has.POOL,
)
INDEX_LOOKUP_TOKENS = _counter(
    "diptych_prefix_index_lookup_tokens_total", _R, "Prompt tokens that were looked up", has.POOL
)
INDEX_HIT_TOKENS = _counter(
    "diptych_prefix_index_hit_tokens_total",
    _R,
    "Of these, those known to be cached at the worker that the request was sent to",
    has.POOL,
)
INDEX_BLOCKS = _gauge("diptych_prefix_index_blocks", _R, "Blocks that the workers have told of", has.POOL)
INDEX_WORKERS = _gauge("diptych_prefix_index_workers", _R, "Workers whose block events are followed", has.POOL)

# The engine of a worker.
ENGINE_STEP = _histogram("diptych_engine_step_seconds", _W, "One engine step")
ENGINE_OVERHEAD = _histogram("diptych_engine_overhead_seconds", _W, "The part of a step outside the model runner")
ENGINE_BATCH = _histogram("diptych_engine_batch_requests", _W, "Requests in one step")
ENGINE_TOKENS = _counter("diptych_engine_scheduled_tokens_total", _W, "Tokens computed")
ENGINE_PREEMPTIONS = _counter("diptych_engine_preemptions_total", _W, "Requests preempted")
ENGINE_WAITING = _gauge("diptych_engine_waiting_requests", _W, "Requests that wait to be scheduled")
ENGINE_RUNNING = _gauge("diptych_engine_running_requests", _W, "Requests in the running batch")
ENGINE_QUEUED_TOKENS = _gauge(
    "diptych_engine_queued_tokens", _W, "Tokens not computed yet, of waiting and running requests"
)
ENGINE_KV_USAGE = _gauge("diptych_engine_kv_usage_ratio", _W, "Share of KV blocks in use, 0 to 1")
ENGINE_STALLED = _gauge(
    "diptych_engine_stalled_seconds", _W, "Time with work and no progress, once that is too long; else 0"
)
EPOCH = _gauge("diptych_epoch", _W, "This worker's life: milliseconds of its start")
COMPUTE_THREADS = _gauge("diptych_compute_threads", _W, "Threads that compute")
KEPT_CPUS = _gauge("diptych_kept_cpus", _W, "CPUs that the process keeps to; 0: any")

# Hand-offs, at the worker that sends them.
TRANSFERS_IN_FLIGHT = _gauge(
    "diptych_kv_transfers_in_flight", _P, "Hand-offs that have room at their decode worker and are not over"
)
TRANSFERS_ASKING = _gauge("diptych_kv_transfers_asking", _P, "Hand-offs that ask for room at their decode worker")
GRANT_WAIT = _histogram("diptych_kv_grant_wait_seconds", _P, "From asking a decode worker for room to having it")
TRANSFERS = _counter("diptych_kv_transfers_total", _P, "Hand-offs by how they ended", has.TRANSFER_OUTCOME)
SENT_BYTES = _counter("diptych_kv_sent_bytes_total", _P, "KV bytes of committed hand-offs", has.CONNECTOR)
TRANSFER_BUSY = _histogram(
    "diptych_kv_transfer_seconds", _P, "Time in which a write of a hand-off was under way", has.CONNECTOR
)
TRANSFER_EXPOSED = _histogram(
    "diptych_kv_transfer_exposed_seconds", _P, "The part of it after the last chunk was computed"
)
TRANSFER_SPEED = _histogram(
    "diptych_kv_transfer_gb_per_second",
    _P,
    "Bytes of a hand-off over that time, in 10^9 bytes per second",
    has.CONNECTOR,
)

# Hand-offs, at the worker that takes them.
KV_LEASES = _gauge("diptych_kv_leases", _D, "Hand-offs that hold blocks here and are not adopted", has.LEASE_STATE)
RESERVATIONS = _counter(
    "diptych_kv_reservations_total", _D, "Requests for room, by what came of them", has.RESERVATION_OUTCOME
)
ADOPTED = _counter("diptych_kv_adopted_total", _D, "Hand-offs that the engine went on with")
LEASES_EXPIRED = _counter("diptych_kv_lease_expired_total", _D, "Leases that ended without that, by why", has.LOSS)
DIGEST_MISMATCHES = _counter(
    "diptych_kv_digest_mismatch_total", _D, "Hand-offs whose bytes were not those that were sent"
)

# What the operating system says of a process, under the names that Prometheus's clients give it.
PROCESS_START = _gauge("process_start_time_seconds", _A, "When the process was started, Unix time")
PROCESS_CPU = _counter("process_cpu_seconds_total", _A, "CPU time that it took")
PROCESS_MEMORY = _gauge("process_resident_memory_bytes", _A, "Its memory that is in the machine's")
PROCESS_ADDRESSES = _gauge("process_virtual_memory_bytes", _A, "Its memory, mapped or not")
PROCESS_FILES = _gauge("process_open_fds", _A, "Files and sockets that it has open")
PROCESS_MAX_FILES = _gauge("process_max_fds", _A, "How many it may have")

# vLLM's names.
V_RUNNING = _alias("num_requests_running", _G, _A, "Requests being worked on")
V_WAITING = _alias(
    "num_requests_waiting", _G, _A, "Requests waiting: at the router, there or at a worker; at a worker, there"
)
V_KV_USAGE = _alias("kv_cache_usage_perc", _G, _A, "KV usage, 0 to 1; at the router that of the fullest decode worker")
V_CACHE_CONFIG = _alias(
    "cache_config_info",
    _G,
    _W,
    "1, with the KV memory's facts as labels",
    has.BLOCK_SIZE,
    has.NUM_BLOCKS,
    has.CACHING,
    has.CACHE_DTYPE,
)
V_PROMPT_TOKENS = _alias("prompt_tokens_total", _C, _A, "Prompt tokens")
V_GENERATION_TOKENS = _alias("generation_tokens_total", _C, _A, "Generated tokens")
V_PROMPT_SOURCES = _alias(
    "prompt_tokens_by_source_total", _C, _A, "Prompt tokens by where their KV came from", has.SOURCE
)
V_CACHE_QUERIES = _alias("prefix_cache_queries_total", _C, _A, "Prompt tokens looked up in prefix caches")
V_CACHE_HITS = _alias("prefix_cache_hits_total", _C, _A, "Prompt tokens found in prefix caches")
V_SUCCESS = _alias(
    "request_success_total",
    _C,
    _A,
    "Requests that were begun and are over; only a router knows of abort",
    has.FINISHED_REASON,
)
V_PREEMPTIONS = _alias("num_preemptions_total", _C, _W, "Requests preempted")
V_TTFT = _alias("time_to_first_token_seconds", _H, _R, "Arrival to first token")
V_ITL = _alias("inter_token_latency_seconds", _H, _R, "Gap between tokens")
V_OLD_ITL = _alias("time_per_output_token_seconds", _H, _R, "The same, under its older name")
V_TPOT = _alias("request_time_per_output_token_seconds", _H, _R, "(E2E - TTFT) / (tokens - 1)")
V_E2E = _alias("e2e_request_latency_seconds", _H, _R, "Arrival to last token")
V_QUEUE_TIME = _alias("request_queue_time_seconds", _H, _A, "Time in the WAITING phase")
V_PREFILL_TIME = _alias("request_prefill_time_seconds", _H, _A, "Time in the PREFILL phase")
V_DECODE_TIME = _alias("request_decode_time_seconds", _H, _A, "Time in the DECODE phase")
V_INFERENCE_TIME = _alias("request_inference_time_seconds", _H, _A, "Time in the RUNNING phase")
V_PROMPT_SIZE = _alias("request_prompt_tokens", _H, _A, "Prompt tokens per request")
V_OUTPUT_SIZE = _alias("request_generation_tokens", _H, _A, "Generated tokens per request")
V_MAX_OUTPUT = _alias(
    "request_max_num_generation_tokens", _H, _R, "Generated tokens of the longest answer of a request"
)
V_PARAM_N = _alias("request_params_n", _H, _R, "n of requests")
V_PARAM_MAX_TOKENS = _alias("request_params_max_tokens", _H, _A, "max_tokens of requests")
V_ITERATION_TOKENS = _alias("iteration_tokens_total", _H, _W, "Tokens computed in one step")
V_COMPUTED = _alias(
    "request_prefill_kv_computed_tokens",
    _H,
    _A,
    "Prompt tokens of a request whose KV was computed, not found in a cache",
)
V_BLOCK_LIFE = _alias(
    "kv_block_lifetime_seconds", _H, _W, "Life of a cached block, from when it was taken until it was evicted"
)
V_BLOCK_IDLE = _alias(
    "kv_block_idle_before_evict_seconds", _H, _W, "The part of it after a request had taken or found it last"
)
V_BLOCK_REUSE = _alias(
    "kv_block_reuse_gap_seconds", _H, _W, "Time between two uses of a block that was found in the prefix cache"
)
V_NIXL_TIME = _alias("nixl_xfer_time_seconds", _H, _P, "Time of one transfer of KV, over whichever connector")
V_NIXL_BYTES = _alias("nixl_bytes_transferred", _H, _P, "Bytes of one transfer of KV")
V_NIXL_DESCRIPTORS = _alias("nixl_num_descriptors", _H, _P, "Writes of one transfer of KV")
V_NIXL_FAILED = _alias("nixl_num_failed_transfers_total", _C, _P, "Transfers of KV that failed")
V_NIXL_UNTOLD = _alias(
    "nixl_num_failed_notifications_total",
    _C,
    _P,
    "Hand-offs that were given up without the decode worker's hearing of it: it keeps their blocks until their lease ends",
)
V_NIXL_EXPIRED = _alias(
    "nixl_num_kv_expired_reqs_total", _C, _D, "Requests whose KV was given up because its lease ran out"
)

ALL: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
