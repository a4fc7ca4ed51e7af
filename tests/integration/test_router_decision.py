"""Which way a request goes through a real router, why, what it says of it, and what overrides it."""

import asyncio
import itertools
import logging

import grpc
import pytest

from contracts.errors import TransferFailed
from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc
from contracts.worker import WorkerKind, WorkerLoad
from registry.wire import MAX_GAUGE
from router.config import DisaggregationConfig, DisaggregationMode
from tests.integration.pools import until
from tests.integration.router_harness import MODEL, router_config, running_router

AUTO = DisaggregationConfig(explore_share=0.0)
_salts = itertools.count(5)
QUIET = WorkerLoad(decode_step_s=0.001, prefill_tokens_per_s=1000.0)
STREAMING = WorkerLoad(num_running=8, num_queued_tokens=8, decode_step_s=0.001, prefill_tokens_per_s=1000.0)
QUEUED = WorkerLoad(num_waiting=50, num_queued_tokens=5_000_000, prefill_tokens_per_s=1000.0)


def prompt() -> list[int]:
    """300 tokens that no worker has cached."""
    salt = next(_salts)
    return [salt, *(5 + index % 90 for index in range(299))]


async def asked(running, **changes) -> dict:
    """What the answer says of its way."""
    body = {"model": MODEL, "prompt": prompt(), "max_tokens": 4, "seed": 3, "diptych": {"stages": True}, **changes}
    response = await running.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    said = response.json()["diptych"]
    assert said["decision"]["path"] == said["route"]
    await running.cluster.idle()
    return said["decision"]


async def set_loads(running, prefill: WorkerLoad, decode: WorkerLoad) -> None:
    """The pools say so, and the router has heard it."""
    for worker in running.cluster.workers:
        worker.load = prefill if worker.kind is WorkerKind.PREFILL else decode

    async def heard() -> bool:
        queued = await running.metric("diptych_worker_queued_tokens", pool="prefill")
        streams = await running.metric("diptych_worker_running_requests", pool="decode")
        return (queued, streams) == (prefill.num_queued_tokens, decode.num_running)

    await until(heard)


def served(tmp_path, config: DisaggregationConfig):
    return running_router(router_config(tmp_path, disaggregation=config))


async def test_auto_goes_where_it_delays_users_least(tmp_path) -> None:
    async with served(tmp_path, AUTO) as running:
        await running.cluster.pools(1, 1)
        await set_loads(running, QUIET, QUIET)
        idle = await asked(running)
        assert (idle["path"], idle["reason"]) == ("colocated", "cheaper")  # a hand-off costs and saves nothing
        assert idle["predicted_local_s"] < idle["predicted_remote_s"]
        await set_loads(running, QUIET, STREAMING)
        streaming = await asked(running)
        assert (streaming["path"], streaming["reason"]) == ("disaggregated", "cheaper")
        assert streaming["predicted_remote_s"] < streaming["predicted_local_s"]
        assert 0 < streaming["measured_s"] < 5
        assert streaming["regret_s"] == max(0.0, streaming["measured_s"] - streaming["predicted_local_s"])
        await set_loads(running, QUEUED, STREAMING)
        assert (await asked(running))["path"] == "colocated"
        label = {"path": "colocated", "reason": "cheaper"}
        assert await running.metric("diptych_disagg_decisions_total", **label) == 2
        assert await running.metric("diptych_disagg_regret_seconds_count") == 3
        assert await running.metric("diptych_disagg_prediction_error_seconds_count", path="disaggregated") == 1


@pytest.mark.parametrize(
    ("config", "decode", "expected"),
    [
        (DisaggregationConfig(above_tokens=299), QUIET, ("disaggregated", "above")),
        (DisaggregationConfig(above_tokens=300), STREAMING, ("colocated", "below")),
        (DisaggregationConfig(DisaggregationMode.ALWAYS), QUIET, ("disaggregated", "always")),
        (DisaggregationConfig(DisaggregationMode.NEVER), STREAMING, ("colocated", "never")),
    ],
)
async def test_what_the_operator_says_comes_before_predictions_and_the_request_s_own_word_before_that(
    tmp_path, config, decode, expected
) -> None:
    async with served(tmp_path, config) as running:
        await running.cluster.pools(1, 1)
        await set_loads(running, QUIET, decode)
        decision = await asked(running)
        assert (decision["path"], decision["reason"]) == expected
        for route in ("disaggregated", "colocated"):
            forced = await asked(running, diptych={"stages": True, "route": route})
            assert (forced["path"], forced["reason"]) == (route, "request")


async def test_without_prefill_workers_and_where_hand_offs_fail_one_worker_does_it(tmp_path) -> None:
    async with served(tmp_path, DisaggregationConfig(DisaggregationMode.ALWAYS)) as running:
        await running.cluster.add(WorkerKind.DECODE, "d0")
        alone = await asked(running)
        assert (alone["path"], alone["reason"], alone["predicted_remote_s"]) == ("colocated", "no_pair", None)
        prefill = await running.cluster.add(WorkerKind.PREFILL, "p0")
        prefill.faults.handoff_failures = [TransferFailed("lost") for _ in range(3)]
        failed = await asked(running)
        assert (failed["path"], failed["reason"]) == ("colocated", "handoffs_failed")
        assert failed["measured_s"] is None  # what broke on the way teaches nothing


async def test_the_log_line_and_grpc_say_it_too(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    async with served(tmp_path, AUTO) as running, grpc.aio.insecure_channel(running.target) as channel:
        await running.cluster.pools(1, 1)
        await set_loads(running, QUIET, STREAMING)
        request = inference_pb2.GenerateRequest(
            model=MODEL, request_id="seen", token_ids=inference_pb2.TokenIds(ids=prompt())
        )
        request.sampling.max_tokens = 3
        pieces = [piece async for piece in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
        decision = pieces[-1].decision
        assert decision.reason == "cheaper"
        assert 0 < decision.predicted_remote_s < decision.predicted_local_s
        assert decision.HasField("measured_s")
        (record,) = [r for r in caplog.records if vars(r).get("diptych_fields", {}).get("request_id") == "seen"]
        told = {"decision": "disaggregated", "reason": "cheaper", "predicted_local_s": decision.predicted_local_s}
        told |= {"measured_s": decision.measured_s}
        told |= {"regret_s": max(0.0, decision.measured_s - decision.predicted_local_s)}
        told |= {"prefill": "p0", "decode": "d0"}
        assert told.items() <= vars(record)["diptych_fields"].items()


async def test_a_worker_that_announces_nonsense_breaks_nothing(tmp_path) -> None:
    nonsense = WorkerLoad(decode_step_s=MAX_GAUGE, prefill_tokens_per_s=1e-300, num_running=8)  # what is not refused
    async with served(tmp_path, AUTO) as running:
        await running.cluster.pools(1, 1)
        await set_loads(running, nonsense, nonsense)
        decisions = await asyncio.gather(*(asked(running, seed=seed) for seed in range(5)))
        for decision in decisions:
            assert 0 < decision["predicted_remote_s"] < 10
            assert 0 < decision["predicted_local_s"] < 60
