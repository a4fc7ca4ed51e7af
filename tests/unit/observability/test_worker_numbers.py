"""Each number that a worker counts is under every name that it has, and no other: no two of them here are alike."""

from observability.handoff_metrics import SenderMetrics
from observability.samples import EngineSample
from observability.stages import HandoffStats
from observability.worker_metrics import WorkerMetrics

ENGINE = {"model_name": "m", "engine": "prefill"}


def check(metrics: WorkerMetrics, expected: dict[str, float], **labels: str) -> None:
    assert {name: metrics.registry.get_sample_value(name, labels) for name in expected} == expected


def test_a_hand_off():
    metrics = WorkerMetrics("m", "prefill")
    SenderMetrics(metrics.registry, "m").sent(HandoffStats("shm", 4_000_000, 3, 2, 1, transfer_s=0.25, exposed_s=0.125))
    check(metrics, {"diptych_kv_transfer_seconds_sum": 0.25, "diptych_kv_sent_bytes_total": 4_000_000}, connector="shm")
    check(metrics, {"diptych_kv_transfer_exposed_seconds_sum": 0.125})
    theirs = {
        "vllm:nixl_xfer_time_seconds_sum": 0.25,
        "vllm:nixl_bytes_transferred_sum": 4_000_000,
        "vllm:nixl_num_descriptors_sum": 3,
    }
    check(metrics, theirs, **ENGINE)


def test_a_request_that_has_left_the_engine():
    metrics = WorkerMetrics("m", "prefill")
    metrics.ended(EngineSample("length", False, 101, 37, 29, 43, queue_s=0.25, prefill_s=0.5, decode_s=2.0))
    expected = {
        "vllm:prompt_tokens_total": 101,
        "vllm:request_queue_time_seconds_sum": 0.25,
        "vllm:request_prefill_time_seconds_sum": 0.5,
        "vllm:request_decode_time_seconds_sum": 2.0,
        "vllm:request_inference_time_seconds_sum": 2.5,
        "vllm:request_prompt_tokens_sum": 101,
        "vllm:request_generation_tokens_sum": 29,
        "vllm:request_params_max_tokens_sum": 43,
        "vllm:request_prefill_kv_computed_tokens_sum": 64,
    }
    check(metrics, expected, **ENGINE)


def test_the_memory_for_kv():
    metrics = WorkerMetrics("m", "prefill")
    metrics.aliases.describe(16, 512, True, "bfloat16")
    facts = {"block_size": "16", "num_gpu_blocks": "512", "enable_prefix_caching": "True", "cache_dtype": "bfloat16"}
    check(metrics, {"vllm:cache_config_info": 1}, **ENGINE, **facts)
