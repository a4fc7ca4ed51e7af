"""A worker's metrics say what its steps were."""

from __future__ import annotations

from prometheus_client import generate_latest

from observability.worker_metrics import LOAD_GAUGES, WorkerMetrics


def test_steps_and_gauges() -> None:
    metrics = WorkerMetrics()
    metrics.watch(lambda: (1, 2, 3, 0.5, 0.0))
    metrics.step(0.02, 0.0195, (3, 40), 1)
    metrics.step(0.001, 0.0, (0, 0), 2)
    metrics.digest_mismatch()
    text = generate_latest(metrics.registry).decode()
    assert "diptych_engine_step_seconds_count 1.0" in text
    assert "diptych_engine_scheduled_tokens_total 40.0" in text
    assert "diptych_engine_preemptions_total 3.0" in text
    assert "diptych_engine_kv_usage_ratio 0.5" in text
    assert "diptych_kv_digest_mismatch_total 1.0" in text
    assert all(name in text for name in LOAD_GAUGES)
