"""Router metrics: each name once, with its unit; series of workers that have gone are gone."""

from dataclasses import asdict, fields, replace

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from observability.decision_metrics import DecisionMetrics
from observability.handoff_metrics import SenderMetrics
from observability.labels import FINISHED_REASON, SLO_SHARE
from observability.metrics import RequestSample, RouterMetrics, WorkerSample
from observability.slo import Limits
from observability.slo_metrics import LAST
from observability.stages import GAP_STAGES, TTFT_STAGES, HandoffStats, Spent, StageTimes
from observability.worker_metrics import WorkerMetrics

WORKER = WorkerSample("d0", "decode", "ready", 7, 2, 1, 30, 0.5)
SAMPLE = RequestSample(
    outcome="length",
    succeeded=True,
    route="disaggregated",
    e2e_s=2.0,
    ttft_s=0.5,
    num_prompt_tokens=10,
    num_cached_tokens=4,
    num_output_tokens=4,
    num_longest_tokens=4,
    max_tokens=4,
    stages=StageTimes(admission_s=0.1, prefill_compute_s=0.3, first_step_s=9.0),
    handoffs=(HandoffStats("shm", 4096, 1, 2, 1, 0.01, 0.001),),
)


def families(metrics):
    return list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))


def value(metrics, name, **labels):
    return picked([s for f in families(metrics) for s in f.samples], name, **labels)


def picked(samples, name, **labels):
    found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
    assert len(found) == 1, (name, found)
    return found[0]


def test_names_are_ours_or_vllms_and_there_once():
    names = [f.name for f in families(RouterMetrics("m", lambda: [WORKER], lambda: (3, 1)))]
    assert len(names) == len(set(names))
    assert all(name.startswith(("diptych_", "vllm:", "process_")) for name in names)


def test_a_request_in_numbers():
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    metrics.request_finished(SAMPLE)
    metrics.tokens_delivered(0.6, 3)
    samples = [s for f in families(metrics) for s in f.samples]
    assert picked(samples, "diptych_requests_total", outcome="length", route="disaggregated") == 1
    assert picked(samples, "diptych_tpot_seconds_sum") == 0.5
    assert picked(samples, "vllm:request_time_per_output_token_seconds_sum") == 0.5
    assert picked(samples, "diptych_itl_seconds_count") == 3
    for name in ("diptych_itl", "vllm:inter_token_latency", "vllm:time_per_output_token"):
        assert abs(picked(samples, f"{name}_seconds_sum") - 0.6) < 1e-9
    assert picked(samples, "vllm:prefix_cache_hits_total") == 4
    assert picked(samples, "diptych_handoff_kv_bytes_total", connector="shm") == 4096
    assert abs(picked(samples, "diptych_stage_seconds_sum", stage="ttft_unexplained") - 0.1) < 1e-9
    assert abs(picked(samples, "diptych_handoff_gb_per_second_sum", connector="shm") - 4096e-9 / 0.01) < 1e-12


def test_every_number_of_a_request_is_under_every_name_that_it_has():
    """No two of them are alike, so that one in another's place is seen."""
    handoff = HandoffStats("tcp", 4_000_000, 5, 7, 3, 0.016, 0.008)
    sample = replace(
        SAMPLE,
        e2e_s=2.5,
        num_prompt_tokens=101,
        num_cached_tokens=37,
        num_output_tokens=29,
        num_longest_tokens=17,
        max_tokens=23,
        num_answers=2,
        stages=StageTimes(*(2.0**-place for place in range(4, 19))),
        gap_s=0.25,
        handoffs=(handoff,),
        num_failed_handoffs=11,
    )
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    metrics.request_finished(sample)
    samples = [s for f in families(metrics) for s in f.samples]
    stages = sample.stages
    queue_s, compute_s, decode_s = stages.admission_s + stages.prefill_queue_s, stages.prefill_compute_s, 2.0
    of_one_engine = {
        "vllm:prompt_tokens_total": 101,
        "vllm:generation_tokens_total": 29,
        "vllm:prefix_cache_queries_total": 101,
        "vllm:prefix_cache_hits_total": 37,
        "vllm:request_queue_time_seconds_sum": queue_s,
        "vllm:request_prefill_time_seconds_sum": compute_s,
        "vllm:request_decode_time_seconds_sum": decode_s,
        "vllm:request_inference_time_seconds_sum": compute_s + decode_s,
        "vllm:request_prompt_tokens_sum": 101,
        "vllm:request_generation_tokens_sum": 29,
        "vllm:request_max_num_generation_tokens_sum": 17,
        "vllm:request_prefill_kv_computed_tokens_sum": 64,
        "vllm:request_params_n_sum": 2,
        "vllm:request_params_max_tokens_sum": 23,
        "vllm:time_to_first_token_seconds_sum": 0.5,
        "vllm:e2e_request_latency_seconds_sum": 2.5,
        "vllm:request_time_per_output_token_seconds_sum": 0.125,
    }
    ours = {
        "diptych_prompt_tokens_total": 101,
        "diptych_cached_prompt_tokens_total": 37,
        "diptych_generated_tokens_total": 29,
        "diptych_ttft_seconds_sum": 0.5,
        "diptych_e2e_seconds_sum": 2.5,
        "diptych_tpot_seconds_sum": 0.125,
        "diptych_second_token_gap_seconds_sum": 0.25,
        "diptych_failed_handoffs_total": 11,
        "diptych_handoff_exposed_seconds_sum": 0.008,
    }
    assert {name: picked(samples, name, model_name="m", engine="0") for name in of_one_engine} == of_one_engine
    assert {name: picked(samples, name) for name in ours} == ours
    assert picked(samples, "vllm:prompt_tokens_by_source_total", source="local_compute") == 64
    assert picked(samples, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 37
    assert picked(samples, "vllm:request_success_total", finished_reason="length") == 1
    by_connector = {
        "diptych_handoffs_total": 1,
        "diptych_handoff_kv_bytes_total": 4_000_000,
        "diptych_handoff_transfer_seconds_sum": 0.016,
        "diptych_handoff_gb_per_second_sum": 0.25,
    }
    assert {name: picked(samples, name, connector="tcp") for name in by_connector} == by_connector
    assert picked(samples, "diptych_handoff_blocks_total", state="sent") == 7
    assert picked(samples, "diptych_handoff_blocks_total", state="cached") == 3
    staged = {name: picked(samples, "diptych_stage_seconds_sum", stage=name) for name, _ in stages.by_name()}
    assert staged == dict(stages.by_name())


def test_what_a_way_was_predicted_and_came_to_cost():
    registry = CollectorRegistry()
    metrics = DecisionMetrics(registry)
    for _ in range(3):
        metrics.decided("colocated", "cheaper")
    metrics.measured("colocated", 0.75, 0.5, 0.125)
    metrics.measured("colocated", 9.0, None, None)
    way = {"path": "colocated"}
    assert registry.get_sample_value("diptych_disagg_decisions_total", way | {"reason": "cheaper"}) == 3
    assert registry.get_sample_value("diptych_disagg_predicted_seconds_total", way) == 0.5
    assert registry.get_sample_value("diptych_disagg_measured_seconds_total", way) == 0.75
    assert registry.get_sample_value("diptych_disagg_prediction_error_seconds_sum", way) == 0.25
    assert registry.get_sample_value("diptych_disagg_regret_seconds_sum") == 0.125
    assert registry.get_sample_value("diptych_disagg_regret_seconds_count") == 1


def test_a_stage_that_did_not_happen_is_no_stage_of_no_time():
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    metrics.request_finished(SAMPLE)
    counts = {
        s.labels["stage"]: s.value
        for f in families(metrics)
        for s in f.samples
        if s.name == "diptych_stage_seconds_count"
    }
    said = {"admission", "prefill_compute", "first_step", "ttft_unexplained", "ttft_overexplained"}
    assert counts == dict.fromkeys(said, 1)


def test_stages_that_say_too_much_are_seen():
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    metrics.request_finished(replace(SAMPLE, gap_s=8.5, ttft_s=0.3))
    rest = {
        name: value(metrics, "diptych_stage_seconds_sum", stage=name)
        for name in ("gap_overexplained", "gap_unexplained")
    }
    assert rest == {"gap_overexplained": 0.5, "gap_unexplained": 0.0}
    assert abs(value(metrics, "diptych_stage_seconds_sum", stage="ttft_overexplained") - 0.1) < 1e-9
    assert value(metrics, "diptych_second_token_gap_seconds_sum") == 8.5


def test_a_connector_that_is_not_known_is_other():
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    for name in ("a", "b"):
        metrics.request_finished(replace(SAMPLE, handoffs=(replace(SAMPLE.handoffs[0], connector=name),)))
    assert value(metrics, "diptych_handoffs_total", connector="other") == 2


def test_only_the_stages_before_the_first_token_explain_it():
    assert abs(SAMPLE.stages.ttft_s - 0.4) < 1e-9
    assert SAMPLE.stages.gap_s == 9.0


def test_no_stage_is_left_out_when_they_are_told_or_added_up():
    names = [f.name for f in fields(StageTimes)]
    stages = StageTimes(*(2.0**place for place in range(len(names))))
    assert stages.ttft_s + stages.gap_s == sum(asdict(stages).values())
    assert stages.ttft_s == sum(getattr(stages, f"{name}_s") for name in TTFT_STAGES)
    assert [name for name, _ in stages.by_name()] == [*TTFT_STAGES, *GAP_STAGES]
    assert Spent(stages).by_field() == asdict(stages)


def test_a_failure_is_no_latency():
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    metrics.request_finished(replace(SAMPLE, outcome="UNAVAILABLE", succeeded=False, ttft_s=None, handoffs=()))
    assert value(metrics, "diptych_requests_total", outcome="UNAVAILABLE") == 1
    assert value(metrics, "diptych_e2e_seconds_count") == 0
    assert value(metrics, "diptych_ttft_seconds_count") == 0
    metrics.request_finished(replace(SAMPLE, outcome="UNAVAILABLE", succeeded=False, gap_s=0.1))  # after a token
    samples = [s for f in families(metrics) for s in f.samples]
    counts = {
        name: picked(samples, f"diptych_{name}_seconds_count") for name in ("ttft", "e2e", "tpot", "second_token_gap")
    }
    assert counts == {"ttft": 1, "e2e": 0, "tpot": 0, "second_token_gap": 0}
    assert not [s for s in samples if s.name == "diptych_stage_seconds_count" and s.value]
    assert not [s for s in samples if s.name == "vllm:request_queue_time_seconds_count" and s.value]


def test_vllm_s_count_of_requests_has_each_that_was_begun_and_no_other():
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    metrics.request_finished(SAMPLE)
    for outcome in ("CANCELLED", "UNAVAILABLE", "DEADLINE_EXCEEDED"):
        metrics.request_finished(replace(SAMPLE, outcome=outcome, succeeded=False))
    metrics.request_finished(replace(SAMPLE, outcome="RESOURCE_EXHAUSTED", succeeded=False, route="none", ttft_s=None))
    ended = {
        reason: value(metrics, "vllm:request_success_total", model_name="m", engine="0", finished_reason=reason)
        for reason in FINISHED_REASON.values
    }
    assert ended == {"stop": 0, "length": 1, "abort": 1, "error": 2}
    assert value(metrics, "vllm:request_prompt_tokens_count") == 1, "only what was answered has a size"


def test_a_worker_that_has_gone_leaves_no_series():
    workers = [WORKER]
    metrics = RouterMetrics("m", lambda: workers, lambda: (3, 2))
    of_it = {
        "diptych_worker_running_requests": 2,
        "diptych_worker_waiting_requests": 1,
        "diptych_worker_queued_tokens": 30,
        "diptych_worker_kv_usage_ratio": 0.5,
        "diptych_worker_epoch": 7,
    }
    samples = [s for f in families(metrics) for s in f.samples]
    assert {name: picked(samples, name, worker_id="d0", pool="decode") for name in of_it} == of_it
    assert (value(metrics, "diptych_requests_running"), value(metrics, "diptych_requests_waiting")) == (3, 2)
    assert value(metrics, "diptych_workers", pool="decode", state="ready") == 1
    assert value(metrics, "vllm:num_requests_running") == 2
    assert value(metrics, "vllm:num_requests_waiting") == 3
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.5
    workers.clear()
    assert not [s for f in families(metrics) for s in f.samples if "worker_id" in s.labels]


def test_requests_are_measured_by_what_is_promised():
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    metrics.measure_by(Limits(ttft_s=0.6, itl_s=0.4))
    metrics.request_finished(SAMPLE)  # a mean gap of 0.5 s
    metrics.request_finished(replace(SAMPLE, e2e_s=1.0))
    metrics.request_finished(replace(SAMPLE, e2e_s=1.0, ttft_s=0.7))
    metrics.request_finished(replace(SAMPLE, outcome="CANCELLED", succeeded=False, excused=True))
    metrics.request_finished(replace(SAMPLE, outcome="UNAVAILABLE", succeeded=False, ttft_s=0.9))
    assert value(metrics, "diptych_goodput_requests_total") == 1
    assert value(metrics, "diptych_slo_judged_requests_total") == 4
    missed = [f for f in families(metrics) if f.name == "diptych_slo_missed_requests"]
    assert {s.labels["slo"]: s.value for s in missed[0].samples} == {"ttft": 1, "itl": 1, "errors": 1}
    limits = [f for f in families(metrics) if f.name == "diptych_slo_limit_seconds"]
    assert {s.labels["slo"]: s.value for s in limits[0].samples} == {"ttft": 0.6, "itl": 0.4}  # none is set for e2e
    shares = {slo: value(metrics, "diptych_slo_attainment_ratio", slo=slo) for slo in SLO_SHARE.values}
    assert shares == {"ttft": 3 / 4, "itl": 3 / 4, "e2e": 1, "errors": 3 / 4, "all": 1 / 4}


def test_the_share_is_that_of_the_last_requests():
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    metrics.measure_by(Limits(ttft_s=0.4))
    for ttft_s in (0.5, *[0.3] * LAST):
        metrics.request_finished(replace(SAMPLE, ttft_s=ttft_s))
    assert value(metrics, "diptych_slo_attainment_ratio", slo="ttft") == 1.0


def test_vllm_s_buckets_are_among_ours():
    """So that series of both can be summed by `le`, where a fleet has both."""
    ttft = (
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1,
        2.5,
        5,
        7.5,
        10,
        20,
        40,
        80,
        160,
        640,
        2560,
    )
    gap = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
    whole = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
    theirs = {
        "time_to_first_token_seconds": ttft,
        "inter_token_latency_seconds": gap,
        "time_per_output_token_seconds": gap,
        "request_time_per_output_token_seconds": gap,
        "e2e_request_latency_seconds": whole,
        "request_queue_time_seconds": whole,
        "request_prefill_time_seconds": whole,
        "request_decode_time_seconds": whole,
        "request_inference_time_seconds": whole,
        "request_params_n": (1, 2, 5, 10, 20),
        "request_prompt_tokens": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000),
    }
    seen = bounds(RouterMetrics("m", list, lambda: (0, 0)).registry)
    worker = WorkerMetrics("m", "prefill")
    SenderMetrics(worker.registry, "m")
    theirs_too = {
        "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        "nixl_xfer_time_seconds": (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5),
        "nixl_bytes_transferred": tuple(2**power for power in range(11, 35, 2)),
        "nixl_num_descriptors": (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000),
    }
    for wanted, there in ((theirs, seen), (theirs_too, bounds(worker.registry))):
        for name, asked in wanted.items():
            assert set(asked) <= there[f"vllm:{name}"], name


def bounds(registry):
    """Upper bounds of the buckets of each histogram."""
    return {
        family.name: {float(s.labels["le"]) for s in family.samples if "le" in s.labels}
        for family in registry.collect()
        if family.type == "histogram"
    }


def test_what_can_be_counted_is_there_at_zero_before_it_happens():
    """rate() does not see what brings its series with it."""
    metrics = RouterMetrics("m", list, lambda: (0, 0))
    for name in ("drained_attempts", "migrations", "canary", "handoff_blocks"):
        zeros = [s for f in families(metrics) for s in f.samples if s.name == f"diptych_{name}_total"]
        assert len(zeros) > 1, name
        assert {s.value for s in zeros} == {0.0}
