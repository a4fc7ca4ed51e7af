"""A worker's metrics say what its steps and its requests were, under our names and vLLM's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from observability.handoff_metrics import ReceiverMetrics, SenderMetrics
from observability.samples import EngineSample
from observability.stages import HandoffStats
from observability.worker_metrics import LOAD_GAUGES, WorkerMetrics

READ = EngineSample("length", False, 100, 64, 1, 8, queue_s=0.25, prefill_s=0.5, decode_s=None)
LABELS = {"model_name": "m", "engine": "prefill"}
LIVES = ("lifetime", "idle_before_evict", "reuse_gap")


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics("m", "prefill")


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_steps_and_gauges(metrics: WorkerMetrics) -> None:
    metrics.watch(lambda: (1, 2, 3, 0.5, 0.0), lambda: (200, 50))
    metrics.step(0.02, 0.0195, (3, 40, 2), 1)
    metrics.step(0.001, 0.0, (0, 0, 0), 2)
    assert value(metrics, "diptych_engine_step_seconds_count") == 1
    assert value(metrics, "diptych_engine_scheduled_tokens_total") == 40
    assert value(metrics, "diptych_engine_preemptions_total") == 3
    assert value(metrics, "vllm:num_preemptions_total", **LABELS) == 3
    assert value(metrics, "vllm:iteration_tokens_total_sum", **LABELS) == 40
    assert value(metrics, "vllm:generation_tokens_total", **LABELS) == 2
    assert value(metrics, "diptych_engine_kv_usage_ratio") == 0.5
    assert value(metrics, "vllm:kv_cache_usage_perc", **LABELS) == 0.5
    assert value(metrics, "vllm:num_requests_waiting", **LABELS) == 1
    assert value(metrics, "vllm:num_requests_running", **LABELS) == 2
    assert value(metrics, "vllm:prefix_cache_queries_total", **LABELS) == 200
    assert value(metrics, "vllm:prefix_cache_hits_total", **LABELS) == 50
    assert all(value(metrics, metric.name) is not None for metric in LOAD_GAUGES)


def test_a_prompt_is_counted_by_where_its_kv_came_from(metrics: WorkerMetrics) -> None:
    metrics.ended(READ)
    metrics.ended(replace(READ, external=True, num_cached_tokens=0, prefill_s=None, decode_s=1.5))
    sources = {
        source: value(metrics, "vllm:prompt_tokens_by_source_total", **LABELS, source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert sources == {"local_compute": 36, "local_cache_hit": 64, "external_kv_transfer": 100}
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_count", **LABELS) == 1
    assert value(metrics, "vllm:request_prefill_time_seconds_sum", **LABELS) == 0.5
    assert value(metrics, "vllm:request_decode_time_seconds_sum", **LABELS) == 1.5
    assert value(metrics, "vllm:request_inference_time_seconds_sum", **LABELS) == 2.0
    metrics.ended(replace(READ, reason="error"))
    reasons = {
        reason: value(metrics, "vllm:request_success_total", **LABELS, finished_reason=reason)
        for reason in ("length", "stop", "error", "abort")
    }
    assert reasons == {"length": 2, "stop": 0, "error": 1, "abort": None}, "which of these it may have, from the start"
    assert value(metrics, "vllm:request_queue_time_seconds_count", **LABELS) == 2, "an error is no latency"


def test_facts_of_the_kv_memory(metrics: WorkerMetrics) -> None:
    metrics.aliases.describe(16, 64, False, "bfloat16")
    metrics.born(7)
    facts = {"block_size": "16", "num_gpu_blocks": "64", "enable_prefix_caching": "False", "cache_dtype": "bfloat16"}
    assert value(metrics, "vllm:cache_config_info", **LABELS, **facts) == 1
    assert value(metrics, "diptych_epoch") == 7


def test_lives_of_blocks(metrics: WorkerMetrics) -> None:
    metrics.blocks.reused(2.0)
    metrics.blocks.evicted(9.0, 5.0)
    sums = [value(metrics, f"vllm:kv_block_{name}_seconds_sum", **LABELS) for name in LIVES]
    assert sums == [9.0, 5.0, 2.0]


def test_hand_offs_where_they_are_sent(metrics: WorkerMetrics) -> None:
    counts = SenderMetrics(metrics.registry, "m")
    counts.watch(lambda: (2, 1))
    counts.sent(HandoffStats("shm", 4_000_000, 3, 2, 1, 0.002, 0.001))
    counts.sent(HandoffStats("a stranger's", 0, 0, 0, 3, 0.0, 0.0))
    assert value(metrics, "diptych_kv_transfer_exposed_seconds_count") == 2
    for name in ("xfer_time_seconds", "bytes_transferred", "num_descriptors"):
        assert value(metrics, f"vllm:nixl_{name}_count", **LABELS) == 1, "what was there already is no transfer"
    counts.sent(HandoffStats("a stranger's", 1, 1, 1, 0, 0.0, 0.0))
    counts.ended("failed")
    counts.untold()
    counts.granted(0.25)
    assert value(metrics, "diptych_kv_grant_wait_seconds_sum") == 0.25
    assert value(metrics, "vllm:nixl_num_failed_notifications_total", **LABELS) == 1
    assert value(metrics, "diptych_kv_transfers_asking") == 2
    assert value(metrics, "diptych_kv_transfers_in_flight") == 1
    assert value(metrics, "diptych_kv_sent_bytes_total", connector="shm") == 4_000_000
    assert value(metrics, "diptych_kv_transfer_gb_per_second_sum", connector="shm") == 2.0
    assert value(metrics, "diptych_kv_transfer_seconds_count", connector="other") == 1
    assert value(metrics, "diptych_kv_transfers_total", outcome="failed") == 1
    assert value(metrics, "vllm:nixl_num_failed_transfers_total", **LABELS) == 1
    assert value(metrics, "vllm:nixl_num_descriptors_sum", **LABELS) == 4


def test_hand_offs_where_they_are_taken() -> None:
    metrics = WorkerMetrics("m", "decode")
    counts = ReceiverMetrics(metrics.registry, "m")
    counts.watch(lambda: {"reserved": 3})
    counts.reserved("granted")
    counts.adopted()
    counts.lost("expired")
    counts.lost("aborted")
    counts.digest_mismatch()
    assert value(metrics, "diptych_kv_leases", state="reserved") == 3
    assert value(metrics, "diptych_kv_leases", state="draining") == 0
    assert value(metrics, "diptych_kv_reservations_total", outcome="granted") == 1
    assert value(metrics, "diptych_kv_adopted_total") == 1
    assert value(metrics, "diptych_kv_lease_expired_total", reason="expired") == 1
    assert value(metrics, "vllm:nixl_num_kv_expired_reqs_total", model_name="m", engine="decode") == 1
    assert value(metrics, "diptych_kv_digest_mismatch_total") == 1
