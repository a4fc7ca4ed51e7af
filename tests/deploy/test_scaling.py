"""What autoscalers ask: of series that we have, with one meaning for both kinds, and what comes out is what should."""

import json
import re
import subprocess

import pytest
import yaml

from tests.deploy.render import ROOT
from tests.deploy.values_sets import all_rendered
from tests.monitoring.prometheus_process import binary

LABELS = 'namespace="llm",release="demo"'
ADAPTER = yaml.safe_load((ROOT / "deploy/prometheus/adapter-values.yml").read_text())["rules"]


def triggers(pool):
    spec = all_rendered()["KEDA and everything watched"].one("ScaledObject", pool)["spec"]
    return {trigger["name"]: trigger for trigger in spec["triggers"]}


def metrics(pool):
    """Of a HorizontalPodAutoscaler: what each is, and its target."""
    spec = all_rendered()["HPA"].one("HorizontalPodAutoscaler", pool)["spec"]
    return [(m["type"], m[m["type"].lower()]["metric"], m[m["type"].lower()]["target"]) for m in spec["metrics"]]


def test_both_kinds_scale_the_same_pools_within_the_same_bounds():
    for pool in ("prefill", "decode"):
        keda = all_rendered()["KEDA and everything watched"].one("ScaledObject", pool)["spec"]
        hpa = all_rendered()["HPA"].one("HorizontalPodAutoscaler", pool)["spec"]
        assert hpa["scaleTargetRef"]["name"] == keda["scaleTargetRef"]["name"] == f"demo-diptych-{pool}"
        assert (hpa["minReplicas"], hpa["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"]) == (1, 4)
        assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert hpa["behavior"]["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


def test_each_pool_has_its_own_reasons():
    assert {name: (t["metricType"], t["metadata"]["threshold"]) for name, t in triggers("prefill").items()} == {
        "queued-tokens": ("AverageValue", "4096"),
        "ttft": ("Value", "0.8"),
    }
    assert {name: (t["metricType"], t["metadata"]["threshold"]) for name, t in triggers("decode").items()} == {
        "kv-usage": ("Value", "0.7"),
        "itl": ("Value", "0.08"),
    }
    release = {"matchLabels": {"release": "demo"}}
    assert metrics("prefill") == [
        ("Pods", {"name": "diptych_engine_queued_tokens"}, {"type": "AverageValue", "averageValue": "4096"}),
        ("External", {"name": "diptych_ttft_p95_seconds", "selector": release}, {"type": "Value", "value": "800m"}),
    ]
    assert metrics("decode") == [
        ("Pods", {"name": "diptych_engine_kv_usage_ratio"}, {"type": "AverageValue", "averageValue": "700m"}),
        ("External", {"name": "diptych_itl_p95_seconds", "selector": release}, {"type": "Value", "value": "80m"}),
    ]


def test_the_adapter_makes_what_autoscalers_ask_for_and_asks_what_keda_asks():
    made = {rule["seriesQuery"].partition("{")[0] for rule in ADAPTER["custom"]}
    external = {rule["name"]["as"]: rule["metricsQuery"] for rule in ADAPTER["external"]}
    asked = [*metrics("prefill"), *metrics("decode")]
    assert {metric["name"] for kind, metric, _ in asked if kind == "Pods"} == made
    assert {metric["name"] for kind, metric, _ in asked if kind == "External"} == set(external)
    for pool, trigger, name in (
        ("prefill", "ttft", "diptych_ttft_p95_seconds"),
        ("decode", "itl", "diptych_itl_p95_seconds"),
    ):
        query = triggers(pool)[trigger]["metadata"]["query"]
        assert external[name].replace("<<.LabelMatchers>>", LABELS) == query


def test_the_series_are_ours_and_of_this_release():
    names = set(re.findall(r"^\| `(diptych_\w+)` \| (\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    exported = {
        name + end for name, kind in names for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
    for pool in ("prefill", "decode"):
        for trigger in triggers(pool).values():
            query = trigger["metadata"]["query"]
            selectors = re.findall(r"(diptych_\w+)\{([^}]*)\}", query)
            assert selectors and {name for name, _ in selectors} <= exported

            assert all(LABELS in matchers for _, matchers in selectors)


def series(name, value, **labels):
    words = ",".join(f'{key}="{text}"' for key, text in {**labels, "namespace": "llm", "release": "demo"}.items())
    return {"series": f"{name}{{{words}}}", "values": value}


# Ten requests a second for ten minutes; of their first tokens most come between half a second and one.
TRAFFIC = [
    series("diptych_ttft_seconds_bucket", "0+0x20", le="0.5"),
    series("diptych_ttft_seconds_bucket", "0+300x20", le="1"),
    series("diptych_ttft_seconds_bucket", "0+300x20", le="+Inf"),
    series("diptych_ttft_seconds_sum", "0+240x20"),
    series("diptych_itl_seconds_bucket", "0+9000x20", le="0.05"),
    series("diptych_itl_seconds_bucket", "0+9000x20", le="+Inf"),
]
IDLE = [{**one, "values": "500x20"} for one in TRAFFIC]
QUEUE = series("diptych_stage_seconds_sum", "0+120x20", stage="prefill_queue")
NO_QUEUE = series("diptych_stage_seconds_sum", "0+12x20", stage="prefill_queue")
LOAD = [
    series("diptych_engine_queued_tokens", "3000x20", job="diptych-prefill", pod="a"),
    series("diptych_engine_queued_tokens", "7000x20", job="diptych-prefill", pod="b"),
    series("diptych_engine_queued_tokens", "9000x20", job="diptych-decode", pod="c"),
    series("diptych_engine_kv_usage_ratio", "0.5x20", job="diptych-decode", pod="c"),
    series("diptych_engine_kv_usage_ratio", "0.9x20", job="diptych-decode", pod="d"),
    series("diptych_engine_kv_usage_ratio", "0.1x20", job="diptych-prefill", pod="a"),
]
# What each query is worth, of these series; None: no answer, with which an autoscaler takes nobody away.
WORTH = {
    "a queue": ([*TRAFFIC, QUEUE, *LOAD], {"queued-tokens": 10000, "ttft": 0.975, "kv-usage": 0.7, "itl": 0.0475}),
    "long prompts and no queue": (
        [*TRAFFIC, NO_QUEUE],
        {"queued-tokens": None, "ttft": 0, "kv-usage": None, "itl": 0.0475},
    ),
    "nobody asks": (
        [*IDLE, {**QUEUE, "values": "50x20"}, *LOAD],
        {"queued-tokens": 10000, "ttft": 0, "kv-usage": 0.7, "itl": 0},
    ),
    "nothing is scraped": ([], {"queued-tokens": None, "ttft": 0, "kv-usage": None, "itl": 0}),
}


def test_what_prometheus_answers(tmp_path):
    queries = {name: t["metadata"]["query"] for pool in ("prefill", "decode") for name, t in triggers(pool).items()}
    tests = []
    for about, (given, worth) in WORTH.items():
        expected = [
            {
                "expr": queries[name],
                "eval_time": "9m",
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
            for name, value in worth.items()
        ]
        tests.append({"name": about, "interval": "30s", "input_series": given, "promql_expr_test": expected})
    (tmp_path / "scaling.yml").write_text(json.dumps({"rule_files": [], "tests": tests}))
    done = subprocess.run(
        [binary("promtool"), "test", "rules", "scaling.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_nothing_scales_on_what_is_not_known(pool):
    """A Prometheus that has lost its targets answers nothing: KEDA must take that for an error, not for no load."""
    assert {t["metadata"]["ignoreNullValues"] for t in triggers(pool).values()} == {"false"}
