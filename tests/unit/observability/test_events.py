"""Each thing that a process counts moves its own series, by what it says, and no other."""

import pytest
from prometheus_client import CollectorRegistry

from observability.admission_metrics import AdmissionSeries
from observability.decision_metrics import DecisionMetrics
from observability.door_metrics import DoorMetrics
from observability.handoff_metrics import ReceiverMetrics, SenderMetrics
from observability.metrics import RouterMetrics
from observability.policy_metrics import PolicyMetrics
from observability.registry_metrics import RegistryMetrics
from observability.resilience_metrics import ResilienceMetrics
from observability.samples import EngineSample, RequestSample
from observability.slo import Limits
from observability.stages import HandoffStats, StageTimes
from observability.worker_metrics import WorkerMetrics


def shown(registry):
    """Every series but buckets and what the operating system says, by its name and its labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.startswith("process_") and not sample.name.endswith("_bucket")
    }


def moved(registry, event):
    """By how much each series has moved."""
    before = shown(registry)
    event()
    return {
        key: value - before.get(key, 0.0) for key, value in shown(registry).items() if value != before.get(key, 0.0)
    }


ROUTER = [
    (lambda m: m.canary_ended("failed"), {("diptych_canary_total", "failed"): 1}),
    (lambda m: m.attempt_failed("UNAVAILABLE"), {("diptych_failed_attempts_total", "UNAVAILABLE"): 1}),
    (lambda m: m.attempt_drained(0), {("diptych_drained_attempts_total", "before_first_token"): 1}),
    (lambda m: m.attempt_drained(3), {("diptych_drained_attempts_total", "mid_answer"): 1}),
    (lambda m: m.retried(), {("diptych_retries_total",): 1}),
    (lambda m: m.migrated("drain"), {("diptych_migrations_total", "drain"): 1}),
    (
        lambda m: m.tokens_delivered(0.5, 2),
        {
            (f"{name}_seconds_{part}", *labels): value
            for name, labels in (
                ("diptych_itl", ("m",)),
                ("vllm:inter_token_latency", ("m", "0")),
                ("vllm:time_per_output_token", ("m", "0")),
            )
            for part, value in (("count", 2), ("sum", 0.5))
        },
    ),
]
OTHERS = [
    (AdmissionSeries, lambda m: m.shed("wait"), {("diptych_shed_requests_total", "wait"): 1}),
    (AdmissionSeries, lambda m: m.limited("tokens"), {("diptych_rate_limited_requests_total", "tokens"): 1}),
    (AdmissionSeries, lambda m: m.local_limits(), {("diptych_local_rate_limits_total",): 1}),
    (
        AdmissionSeries,
        lambda m: m.watch_queue(lambda: 7, lambda: 0.5),
        {("diptych_queue_tokens",): 7, ("diptych_queue_wait_seconds",): 0.5},
    ),
    (AdmissionSeries, lambda m: m.watch_places(lambda: 9), {("diptych_admission_places",): 9}),
    (
        DecisionMetrics,
        lambda m: m.decided("colocated", "cheaper"),
        {("diptych_disagg_decisions_total", "colocated", "cheaper"): 1},
    ),
    (
        DecisionMetrics,
        lambda m: m.measured("colocated", 0.75, 0.25, 0.125),
        {
            ("diptych_disagg_prediction_error_seconds_count", "colocated"): 1,
            ("diptych_disagg_prediction_error_seconds_sum", "colocated"): 0.5,
            ("diptych_disagg_predicted_seconds_total", "colocated"): 0.25,
            ("diptych_disagg_measured_seconds_total", "colocated"): 0.75,
            ("diptych_disagg_regret_seconds_count",): 1,
            ("diptych_disagg_regret_seconds_sum",): 0.125,
        },
    ),
    (DecisionMetrics, lambda m: m.measured("colocated", 0.75, None, None), {}),
    (
        lambda registry: DoorMetrics(registry, lambda: 0.0),
        lambda m: m.refused("grpc"),
        {("diptych_api_key_refusals_total", "grpc"): 1},
    ),
    (
        PolicyMetrics,
        lambda m: m.fault("decode", "mine"),
        {("diptych_policy_faults_total", "decode", "mine"): 1},
    ),
    (
        PolicyMetrics,
        lambda m: m.sent("decode", 80, 64),
        {
            (f"diptych_prefix_index_{name}_total", "decode"): value
            for name, value in (("lookups", 1), ("hits", 1), ("lookup_tokens", 80), ("hit_tokens", 64))
        },
    ),
    (
        PolicyMetrics,
        lambda m: m.sent("prefill", 80, 0),
        {(f"diptych_prefix_index_{name}_total", "prefill"): n for name, n in (("lookups", 1), ("lookup_tokens", 80))},
    ),
    (
        lambda registry: ResilienceMetrics(registry, lambda: [("d", "decode", 2)], lambda: 0),
        lambda m: m.breaker_opened("decode", "warned"),
        {("diptych_worker_breaker_openings_total", "decode", "warned"): 1},
    ),
    (
        lambda registry: ResilienceMetrics(registry, list, lambda: 0),
        lambda m: m.task_restarted("canary"),
        {("diptych_router_task_restarts_total", "canary"): 1},
    ),
    (
        lambda registry: ResilienceMetrics(registry, list, lambda: 0),
        lambda m: m.call_refused("/a/b"),
        {("diptych_refused_calls_total", "/a/b"): 1},
    ),
    (
        lambda registry: SenderMetrics(registry, "m"),
        lambda m: m.ended("aborted"),
        {("diptych_kv_transfers_total", "aborted"): 1},
    ),
    (
        lambda registry: ReceiverMetrics(registry, "m"),
        lambda m: m.lost("refused"),
        {("diptych_kv_lease_expired_total", "refused"): 1},
    ),
]


@pytest.mark.parametrize(("event", "expected"), ROUTER)
def test_events_of_a_router(event, expected):
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    assert moved(metrics.registry, lambda: event(metrics)) == expected


@pytest.mark.parametrize(("make", "event", "expected"), OTHERS)
def test_events_of_its_parts_and_of_workers(make, event, expected):
    registry = CollectorRegistry()
    metrics = make(registry)
    assert moved(registry, lambda: event(metrics)) == expected


def test_a_call_that_a_worker_refused():
    metrics = WorkerMetrics("m", "decode")
    assert moved(metrics.registry, lambda: metrics.call_refused("/a/b")) == {("diptych_refused_calls_total", "/a/b"): 1}


def test_what_is_asked_at_a_scrape_is_of_now():
    registry, now = CollectorRegistry(), {"up": True, "refused": 2, "state": 1, "expires": 5.0, "blocks": 3}
    RegistryMetrics(registry, lambda: now["up"], lambda: now["refused"])
    ResilienceMetrics(registry, lambda: [("d", "decode", now["state"])], lambda: now["refused"])
    DoorMetrics(registry, lambda: now["expires"])
    PolicyMetrics(registry).watch(lambda pool: now["blocks"] + (pool == "decode"), lambda pool: 1)
    router = RouterMetrics("m", list, lambda: (0, 0))
    router.watch_bad_pairs(lambda: now["blocks"])
    router.watch_pairs(lambda: [("d", "decode", now["expires"] / 10)])

    def asked():
        there = shown(registry) | shown(router.registry)
        return [
            there["diptych_registry_up",],
            there["diptych_registry_refused_words_total",],
            there["diptych_retries_refused_total",],
            there["diptych_worker_breaker_state", "d", "decode"],
            there["diptych_tls_certificate_expires_seconds",],
            there["diptych_prefix_index_blocks", "prefill"],
            there["diptych_prefix_index_blocks", "decode"],
            there["diptych_prefix_index_workers", "decode"],
            there["diptych_bad_pairs",],
            there["diptych_canary_success_ratio", "d", "decode"],
        ]

    assert asked() == [1, 2, 2, 1, 5.0, 3, 4, 1, 3, 0.5]
    now |= {"up": False, "refused": 4, "state": 2, "expires": 6.0, "blocks": 8}
    assert asked() == [0, 4, 4, 2, 6.0, 8, 9, 1, 8, 0.6]


def both(name, value, count=1):
    """A histogram's two series, of a worker of the prefill pool."""
    return {(f"vllm:{name}_count", "m", "prefill"): count, (f"vllm:{name}_sum", "m", "prefill"): value}


def test_a_step_of_an_engine():
    metrics = WorkerMetrics("m", "prefill")
    steps = {"step_seconds": 0.5, "overhead_seconds": 0.125, "batch_requests": 3}
    assert moved(metrics.registry, lambda: metrics.step(0.5, 0.375, (3, 40, 2), 1)) == {
        **{(f"diptych_engine_{name}_sum",): value for name, value in steps.items()},
        **{(f"diptych_engine_{name}_count",): 1 for name in steps},
        ("diptych_engine_scheduled_tokens_total",): 40,
        ("diptych_engine_preemptions_total",): 1,
        ("vllm:num_preemptions_total", "m", "prefill"): 1,
        ("vllm:generation_tokens_total", "m", "prefill"): 2,
        **both("iteration_tokens_total", 40),
    }


def test_a_request_that_leaves_an_engine():
    metrics = WorkerMetrics("m", "prefill")
    sample = EngineSample("stop", False, 100, 64, 7, 8, queue_s=0.25, prefill_s=0.5, decode_s=2.0)
    assert moved(metrics.registry, lambda: metrics.ended(sample)) == {
        ("vllm:request_success_total", "m", "prefill", "stop"): 1,
        ("vllm:prompt_tokens_total", "m", "prefill"): 100,
        ("vllm:prompt_tokens_by_source_total", "m", "prefill", "local_compute"): 36,
        ("vllm:prompt_tokens_by_source_total", "m", "prefill", "local_cache_hit"): 64,
        **both("request_queue_time_seconds", 0.25),
        **both("request_prefill_time_seconds", 0.5),
        **both("request_decode_time_seconds", 2.0),
        **both("request_inference_time_seconds", 2.5),
        **both("request_prompt_tokens", 100),
        **both("request_generation_tokens", 7),
        **both("request_prefill_kv_computed_tokens", 36),
        **both("request_params_max_tokens", 8),
    }


def test_a_hand_off_that_was_sent():
    registry = CollectorRegistry()
    metrics = SenderMetrics(registry, "m")
    stats = HandoffStats("tcp", 4_000_000, 5, 7, 3, 0.016, 0.008)
    ours = {
        ("transfer_seconds", "tcp"): 0.016,
        ("transfer_exposed_seconds",): 0.008,
        ("transfer_gb_per_second", "tcp"): 0.25,
    }
    assert moved(registry, lambda: metrics.sent(stats)) == {
        ("diptych_kv_sent_bytes_total", "tcp"): 4_000_000,
        **{(f"diptych_kv_{name}_sum", *labels): value for (name, *labels), value in ours.items()},
        **{(f"diptych_kv_{name}_count", *labels): 1 for name, *labels in ours},
        **both("nixl_xfer_time_seconds", 0.016),
        **both("nixl_bytes_transferred", 4_000_000),
        **both("nixl_num_descriptors", 5),
    }


def test_a_request_of_a_router():
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    metrics.measure_by(Limits(ttft_s=1.0, itl_s=0.25))
    sample = RequestSample(
        outcome="length",
        succeeded=True,
        route="disaggregated",
        e2e_s=2.0,
        ttft_s=0.5,
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_output_tokens=7,
        num_longest_tokens=4,
        max_tokens=5,
        stages=StageTimes(admission_s=0.125, prefill_queue_s=0.0625, prefill_compute_s=0.25, first_step_s=0.5),
        handoffs=(HandoffStats("shm", 4096, 1, 2, 1, 0.25, 0.125),),
        num_failed_handoffs=2,
        gap_s=0.75,
        num_answers=2,
    )
    ours = {"ttft": 0.5, "e2e": 2.0, "tpot": 0.5, "second_token_gap": 0.75, "handoff_exposed": 0.125}
    stages = {"admission": 0.125, "prefill_queue": 0.0625, "prefill_compute": 0.25, "first_step": 0.5}
    stages |= {"ttft_unexplained": 0.0625, "gap_unexplained": 0.25}
    theirs = {
        "time_to_first_token_seconds": 0.5,
        "e2e_request_latency_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.5,
        "request_queue_time_seconds": 0.1875,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 1.5,
        "request_inference_time_seconds": 1.75,
        "request_prompt_tokens": 10,
        "request_generation_tokens": 7,
        "request_max_num_generation_tokens": 4,
        "request_prefill_kv_computed_tokens": 6,
        "request_params_n": 2,
        "request_params_max_tokens": 5,
    }
    counters = {"prompt_tokens": 10, "generation_tokens": 7, "prefix_cache_queries": 10, "prefix_cache_hits": 4}
    speed = sample.handoffs[0].gb_per_s
    assert moved(metrics.registry, lambda: metrics.request_finished(sample)) == {
        ("diptych_requests_total", "length", "disaggregated"): 1,
        ("diptych_prompt_tokens_total",): 10,
        ("diptych_cached_prompt_tokens_total",): 4,
        ("diptych_generated_tokens_total",): 7,
        ("diptych_slo_judged_requests_total",): 1,
        ("diptych_slo_missed_requests_total", "itl"): 1,
        ("diptych_slo_attainment_ratio", "itl"): -1,
        ("diptych_slo_attainment_ratio", "all"): -1,
        ("diptych_failed_handoffs_total",): 2,
        ("diptych_handoffs_total", "shm"): 1,
        ("diptych_handoff_kv_bytes_total", "shm"): 4096,
        ("diptych_handoff_blocks_total", "sent"): 2,
        ("diptych_handoff_blocks_total", "cached"): 1,
        **{(f"diptych_{name}_seconds_sum", "m"): value for name, value in ours.items()},
        **{(f"diptych_{name}_seconds_count", "m"): 1 for name in ours},
        ("diptych_handoff_transfer_seconds_sum", "m", "shm"): 0.25,
        ("diptych_handoff_transfer_seconds_count", "m", "shm"): 1,
        ("diptych_handoff_gb_per_second_sum", "m", "shm"): speed,
        ("diptych_handoff_gb_per_second_count", "m", "shm"): 1,
        **{("diptych_stage_seconds_sum", "m", stage): value for stage, value in stages.items()},
        **{
            ("diptych_stage_seconds_count", "m", stage): 1
            for stage in (*stages, "ttft_overexplained", "gap_overexplained")
        },
        **{(f"vllm:{name}_total", "m", "0"): value for name, value in counters.items()},
        ("vllm:prompt_tokens_by_source_total", "m", "0", "local_compute"): 6,
        ("vllm:prompt_tokens_by_source_total", "m", "0", "local_cache_hit"): 4,
        ("vllm:request_success_total", "m", "0", "length"): 1,
        **{(f"vllm:{name}_sum", "m", "0"): value for name, value in theirs.items()},
        **{(f"vllm:{name}_count", "m", "0"): 1 for name in theirs},
    }
