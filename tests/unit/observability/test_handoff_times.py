"""Of a hand-off its busy time is one number and what of it is felt another, wherever a worker shows them."""

from observability.handoff_metrics import SenderMetrics
from observability.stages import HandoffStats
from observability.worker_metrics import WorkerMetrics


def test_busy_and_exposed_are_not_mixed_up():
    metrics = WorkerMetrics("m", "prefill")
    SenderMetrics(metrics.registry, "m").sent(HandoffStats("shm", 4_000_000, 3, 2, 1, transfer_s=0.25, exposed_s=0.125))
    engine = {"model_name": "m", "engine": "prefill"}
    expected = {
        ("diptych_kv_transfer_seconds_sum", ("connector", "shm")): 0.25,
        ("diptych_kv_transfer_exposed_seconds_sum",): 0.125,
        ("vllm:nixl_xfer_time_seconds_sum", *engine.items()): 0.25,
        ("vllm:nixl_bytes_transferred_sum", *engine.items()): 4_000_000,
        ("vllm:nixl_num_descriptors_sum", *engine.items()): 3,
    }
    assert {
        (name, *labels): metrics.registry.get_sample_value(name, dict(labels)) for name, *labels in expected
    } == expected
