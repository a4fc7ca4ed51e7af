"""What an OTLP collector is told of requests: one tree each, whose stages stand beside each other inside the request."""

import asyncio
import logging
import signal
import sys
import time
from itertools import pairwise

import grpc
import pytest

from contracts.errors import ConfigError, TransferFailed
from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc
from observability.tracing.config import TracingConfig, tracing_config
from router.config import DisaggregationConfig, DisaggregationMode
from router.tracing import open_tracing
from tests.integration.otlp_collector import Span, running_collector
from tests.integration.router_harness import router_config, running_router
from tests.integration.scripted_workers import DECODE_STAGES, PREFILL_STAGES, STATS
from tests.integration.test_up import up

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"
BODY = {"model": "tiny", "prompt": "It is a truth", "max_tokens": 6}
WAYS = ("prefill", "transfer", "decode")
LATE_S = 0.05


@pytest.fixture(autouse=True)
def prompt_spans(monkeypatch):
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
async def collector():
    async with running_collector() as made:
        yield made


@pytest.fixture
async def served(tmp_path, collector):
    async with running_router(router_config(tmp_path, tracing=TracingConfig(collector.endpoint))) as running:
        yield running


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def check_nested(root: Span, children: list[Span]) -> None:
    for child in children:
        assert child.trace == root.trace
        assert root.begun <= child.begun <= child.ended <= root.ended, child.name


async def test_stages_are_siblings_inside_the_request(served, collector):
    (prefill,), (decode,) = await served.cluster.pools(1, 1)
    sent = {"traceparent": SAMPLED, "tracestate": "vendor=42", "x-request-id": "r-1"}
    prefill.faults.books_late_s = LATE_S
    decode.faults.hold.clear()
    asyncio.get_running_loop().call_later(2 * LATE_S, decode.faults.hold.set)
    response = await served.http.post("/v1/completions", json=BODY, headers=sent)
    assert response.status_code == 200
    (root,) = await collector.requests()
    assert (root.name, root.trace, root.parent, root.failed) == ("text_completion tiny", TRACE, CALLER, False)
    assert root.service == "diptych-router"
    assert root.state == "vendor=42"
    children = collector.below(root)
    assert names(children) == ["admission", "tokenise", "route", *WAYS]
    assert len(collector.spans) == 7  # nothing is below a stage
    check_nested(root, children)
    admission, tokenise, route, read, moved, wrote = children
    assert root.begun < admission.begun  # its bytes came between
    for before, after in pairwise((admission, tokenise, route)):
        assert before.ended == after.begun, after.name
    assert route.ended == pytest.approx(read.begun, abs=2e6)
    assert read.ended == moved.begun < moved.ended == wrote.begun < wrote.ended
    assert (moved.ended - moved.begun) / 1e9 == pytest.approx(LATE_S, abs=0.03)  # the commit was told so late
    of_it = {"diptych.answer.index": 0, "diptych.attempt": 1}
    for stage in (admission, tokenise, route):
        assert stage.values == {}
    assert read.values == of_it | {
        "diptych.worker.id": "p0",
        "diptych.worker.epoch": 1,
        "diptych.prefill.queue_s": pytest.approx(PREFILL_STAGES.prefill_queue_s),
        "diptych.prefill.compute_s": pytest.approx(PREFILL_STAGES.prefill_compute_s),
    }
    assert moved.values == of_it | {
        "diptych.worker.id": "d0",
        "diptych.worker.epoch": 1,
        "diptych.transfer.connector": STATS.connector,
        "diptych.transfer.bytes": STATS.kv_bytes,
        "diptych.transfer.busy_s": STATS.transfer_s,
        "diptych.transfer.exposed_s": STATS.exposed_s,
        "diptych.transfer.failures": 0,
    }
    assert wrote.values == of_it | {
        "diptych.worker.id": "d0",
        "diptych.worker.epoch": 1,
        "diptych.decode.queue_s": pytest.approx(DECODE_STAGES.decode_queue_s),
        "diptych.decode.first_step_s": pytest.approx(DECODE_STAGES.first_step_s),
        "diptych.output_tokens": 5,
    }
    # The workers are told of the request's own span, so that whatever they do for it can be hung below it.
    seen = prefill.seen[-1]
    assert seen.traceparent == f"00-{TRACE}-{root.ident}-01"
    assert seen.tracestate == "vendor=42"


async def test_a_request_has_the_names_that_dashboards_look_for(served, collector):
    await served.cluster.pools(1, 1)
    served.cluster.num_cached_tokens = 2
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, **sampling}
    response = await served.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "r-2"})
    usage = response.json()["usage"]
    (root,) = await collector.requests()
    assert root.name == "chat tiny"
    assert root.parent == ""
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "diptych",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "r-2",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "diptych.route": "disaggregated",
        "diptych.decision.reason": "always",
    }
    assert {name: root.values.get(name) for name in expected} == expected
    took_s = (root.ended - root.begun) / 1e9
    admission, prefill = (span for span in collector.below(root) if span.name in ("admission", "prefill"))
    said = {
        name.removeprefix("gen_ai.latency."): value
        for name, value in root.values.items()
        if name.startswith("gen_ai.latency.")
    }
    ttft_s, queued_s = said["time_to_first_token"], (admission.ended - admission.begun) / 1e9 + 0.001
    assert said == {
        "e2e": pytest.approx(took_s, abs=1e-4),
        "time_to_first_token": ttft_s,
        "time_in_queue": pytest.approx(queued_s, abs=1e-5),
        "time_in_model_prefill": PREFILL_STAGES.prefill_compute_s,
        "time_in_model_decode": pytest.approx(said["e2e"] - ttft_s),
        "time_in_model_inference": pytest.approx(said["e2e"] - queued_s, abs=1e-5),
    }
    assert (prefill.ended - root.begun) / 1e9 <= ttft_s < took_s
    assert "error.type" not in root.values


async def test_an_answer_that_moves_has_stages_of_each_attempt(served, collector):
    _, (first, second) = await served.cluster.pools(1, 2)
    for worker in (first, second):
        worker.faults.die_after_tokens = 2
        worker.faults.before_end = lambda _: asyncio.sleep(
            0.05
        )  # what was said before a call breaks may be lost with it
    response = await served.http.post("/v1/completions", json=BODY | {"max_tokens": 8})
    assert response.status_code == 200
    (root,) = await collector.requests()
    assert not root.failed
    children = collector.below(root)
    check_nested(root, children)
    decodes = [span for span in children if span.name == "decode"]
    assert len(decodes) >= 2
    assert [span.values["diptych.attempt"] for span in decodes] == list(range(1, len(decodes) + 1))
    assert decodes[0].values["error.type"] == "UNAVAILABLE"
    assert decodes[0].failed
    assert not decodes[-1].failed
    assert decodes[0].values["diptych.worker.id"] != decodes[1].values["diptych.worker.id"]
    for number in range(1, len(decodes) + 1):
        of_it = [span for span in children if span.values.get("diptych.attempt") == number]
        assert sorted(names(of_it)) == sorted(WAYS)


async def test_a_worker_that_drains_is_said_to(served, collector):
    _, (first, second) = await served.cluster.pools(1, 2)
    first.faults.drain_after_tokens = second.faults.drain_after_tokens = 3
    await served.http.post("/v1/completions", json=BODY | {"max_tokens": 6})
    (root,) = await collector.requests()
    assert not root.failed
    errors = [span.values.get("error.type") for span in collector.below(root) if span.name == "decode"]
    assert errors[0] == "DRAINING"
    assert errors[-1] is None


async def test_a_second_target_is_one_transfer_that_failed_once(served, collector):
    (prefill,), _ = await served.cluster.pools(1, 2)
    prefill.faults.handoff_failures = [TransferFailed("no")]
    await served.http.post("/v1/completions", json=BODY)
    (root,) = await collector.requests()
    children = collector.below(root)
    check_nested(root, children)
    assert names(children)[3:] == list(WAYS)
    assert children[4].values["diptych.transfer.failures"] == 1
    assert not children[4].failed


async def test_a_commit_that_is_heard_first_puts_nothing_outside(served, collector):
    (prefill,), _ = await served.cluster.pools(1, 1)
    prefill.faults.commit_before_first = True
    await served.http.post("/v1/completions", json=BODY)
    (root,) = await collector.requests()
    children = collector.below(root)
    check_nested(root, children)
    by_name = {span.name: span for span in children}
    assert by_name["prefill"].begun <= by_name["transfer"].begun
    assert by_name["transfer"].ended < by_name["prefill"].ended <= by_name["decode"].begun


async def test_one_token_needs_no_hand_off(served, collector):
    await served.cluster.pools(1, 1)
    await served.http.post("/v1/completions", json=BODY | {"max_tokens": 1})
    (root,) = await collector.requests()
    assert names(collector.below(root)) == ["admission", "tokenise", "route", "prefill"]


async def test_each_of_n_answers_has_its_stages(served, collector):
    await served.cluster.pools(1, 1)
    await served.http.post("/v1/completions", json=BODY | {"n": 2})
    (root,) = await collector.requests()
    assert root.values["gen_ai.request.choice.count"] == 2
    assert root.values["gen_ai.usage.output_tokens"] == 12
    children = collector.below(root)
    check_nested(root, children)
    for index in (0, 1):
        assert sorted(names([s for s in children if s.values.get("diptych.answer.index") == index])) == sorted(WAYS)
    assert names(children).count("route") == 1


async def test_one_worker_alone_has_no_transfer(tmp_path, collector):
    changes = {
        "tracing": TracingConfig(collector.endpoint),
        "disaggregation": DisaggregationConfig(DisaggregationMode.NEVER),
    }
    async with running_router(router_config(tmp_path, **changes)) as served:
        await served.cluster.pools(0, 1)
        await served.http.post("/v1/completions", json=BODY)
        (root,) = await collector.requests()
    children = collector.below(root)
    assert names(children) == ["admission", "tokenise", "route", "prefill", "decode"]
    assert {s.values["diptych.worker.id"] for s in children[3:]} == {"d0"}


async def test_a_failed_request_says_why_and_nothing_of_its_prompt(served, collector):
    refused = await served.http.post("/v1/completions", json=BODY | {"prompt": "secret words", "model": "other"})
    assert refused.status_code == 404
    (root,) = await collector.requests()
    assert root.failed
    assert root.values["error.type"] == "NOT_FOUND"
    assert root.said == "NOT_FOUND"
    failed = await served.http.post("/v1/completions", json=BODY | {"prompt": "secret words"})
    assert failed.status_code == 503  # no workers
    root = (await collector.requests(2))[1]
    assert root.values["error.type"] == "UNAVAILABLE"
    route = collector.below(root)[-1]
    assert (route.name, route.values["error.type"]) == ("route", "UNAVAILABLE")
    assert "secret" not in repr(collector.spans)


async def test_a_client_that_leaves_cancels_the_stage_that_ran(served, collector):
    _, (decode,) = await served.cluster.pools(1, 1)
    decode.faults.hold.clear()
    async with served.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        await anext(response.aiter_lines())
        await asyncio.sleep(0.05)
    (root,) = await collector.requests()
    assert root.values["error.type"] == "CANCELLED"
    children = collector.below(root)
    check_nested(root, children)
    assert [span.name for span in children if span.failed] == [children[-1].name]
    assert children[-1].name in ("transfer", "decode")


async def test_what_the_caller_does_not_sample_is_passed_on_and_not_told(served, collector):
    (prefill,), _ = await served.cluster.pools(1, 1)
    async with grpc.aio.insecure_channel(served.target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for sent in (UNSAMPLED, SAMPLED):
            request = inference_pb2.GenerateRequest(text="It is", sampling={"max_tokens": 2})
            metadata = (("traceparent", sent), ("tracestate", "v=1"))
            async for _ in stub.Generate(request, metadata=metadata):
                pass
    (root,) = await collector.requests()
    assert len([span for span in collector.spans if span.kind == 2]) == 1
    first, second = prefill.seen
    assert first.traceparent.startswith(f"00-{TRACE}-")
    assert first.traceparent.endswith("-00")
    assert first.tracestate == "v=1"
    assert second.traceparent == f"00-{TRACE}-{root.ident}-01"


async def test_a_collector_that_is_away_costs_a_line_and_no_request(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    caplog.set_level(logging.WARNING)
    async with running_router(router_config(tmp_path, tracing=TracingConfig("http://127.0.0.1:9"))) as served:
        await served.cluster.pools(1, 1)
        for _ in range(3):
            assert (await served.http.post("/v1/completions", json=BODY)).status_code == 200
            await asyncio.sleep(0.3)
        began = time.monotonic()
    assert time.monotonic() - began < 6
    assert [r.getMessage() for r in caplog.records if "trace" in r.getMessage()] == [
        "traces are lost: their collector does not take them"
    ]
    assert not [r for r in caplog.records if r.name.startswith("opentelemetry")]


async def test_what_a_client_sends_goes_on_where_nobody_traces(tmp_path):
    async with running_router(router_config(tmp_path)) as served:
        (prefill,), _ = await served.cluster.pools(1, 1)
        await served.http.post("/v1/completions", json=BODY, headers={"traceparent": SAMPLED, "tracestate": "a=b"})
        assert (prefill.seen[-1].traceparent, prefill.seen[-1].tracestate) == (SAMPLED, "a=b")
        await served.http.post("/v1/completions", json=BODY, headers={"tracestate": "a=b"})
        assert prefill.seen[-1].tracestate == ""  # of no trace


async def test_real_workers_under_up_are_told_the_way(tmp_path, collector):
    """The flag reaches the router; what its clock saw holds what the workers measured of themselves."""
    with up(
        tmp_path, "--otlp-endpoint", collector.endpoint, "--disaggregate", "always", "--canary-interval", "0"
    ) as cluster:
        assert await asyncio.to_thread(cluster.complete)
        cluster.process.send_signal(signal.SIGTERM)
        (root,) = await collector.requests()
        assert await asyncio.to_thread(cluster.process.wait, 30) == 0
    children = {span.name: span for span in collector.below(root)}
    assert list(children) == ["admission", "tokenise", "route", *WAYS]
    check_nested(root, list(children.values()))
    prefill, transfer, decode = (children[name] for name in WAYS)
    inside = prefill.values["diptych.prefill.queue_s"] + prefill.values["diptych.prefill.compute_s"]
    assert 0 < inside <= (prefill.ended - prefill.begun) / 1e9
    assert 0 < decode.values["diptych.decode.first_step_s"] <= (decode.ended - decode.begun) / 1e9 + 0.01
    assert transfer.values["diptych.transfer.bytes"] > 0
    assert transfer.values["diptych.transfer.connector"] in ("shm", "tcp")


def test_a_missing_extra_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [n for n in sys.modules if n.startswith(("opentelemetry.", "observability.tracing.otel"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[otel\]'"):
        open_tracing(TracingConfig("http://127.0.0.1:4317"), "i")
    assert open_tracing(None, "i") is None


@pytest.mark.parametrize(
    ("flag", "env", "endpoint"),
    [
        (None, {}, None),
        ("http://a:1", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2"}, "http://a:1"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://b:2/"}, "https://b:2"),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:3"},
            "http://c:3",
        ),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://a:1", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_a_flag_or_the_usual_variables_turn_it_on(monkeypatch, flag, env, endpoint):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    config = tracing_config(flag)
    assert (config and config.endpoint) == endpoint


@pytest.mark.parametrize(
    "url", ["localhost:4317", "http://host", "ftp://a:1", "http://a:99999", "http://a:1/v1/traces"]
)
def test_an_address_that_cannot_be_used_is_named(url):
    with pytest.raises(ValueError, match="--otlp-endpoint: got"):
        tracing_config(url)


def test_another_protocol_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ValueError, match="must be grpc"):
        tracing_config(None)
