"""Every number that processes export is what happened: a load of which all is known, and then the counts of all of them.

A real router in front of real workers, in one event loop. The load: prompts over two pools, one of them again (caches), on one
worker, of several answers, of one token, over a write that fails, that is refused, and that is left by its client.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import pytest
from prometheus_client.exposition import generate_latest

from dashboard.slo import SloConfig
from kv_transfer.local import Delivery, WriteFault
from observability.stages import TTFT_STAGES
from tests.integration.exposition import Scrape, faults
from tests.integration.pools import Setup, until
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.test_router_pools import FAKE, served

BLOCK = FAKE.layout.block_size
SIZE = FAKE.layout.block_bytes
BLOCKS = 64  # of each worker
BLOCKS_EACH = 5  # of each prompt
FILLING = 12  # prompts
LENGTH = BLOCKS_EACH * BLOCK
WORKERS = {"prefill-0", "decode-0"}
POLICIES = {"prefix_aware"}  # those that the router uses


@dataclass
class Load:
    """What a cluster was asked, and what it answered."""

    running: object
    answers: dict[str, dict] = field(default_factory=dict)

    async def ask(self, name: str, prompt: int, max_tokens: int, route: str, **more: object) -> None:
        body = {"model": MODEL, "prompt": words(prompt), "max_tokens": max_tokens, "ignore_eos": True}
        body |= {"diptych": {"stages": True, "route": route}, **more}
        response = await self.running.http.post("/v1/completions", json=body)
        self.answers[name] = {"status": response.status_code, **response.json()}

    async def leave(self, prompt: int) -> None:
        """Ask, and go after the first words."""
        body = {"model": MODEL, "prompt": words(prompt), "max_tokens": 300, "ignore_eos": True, "stream": True}
        async with self.running.http.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())

    def usage(self, key: str, *names: str) -> int:
        """Of these answers, or of all, the sum of one number."""
        return sum(self.answers[name]["usage"][key] for name in names or self.answers if "usage" in self.answers[name])


def words(prompt: int) -> list[int]:
    """The tokens of one of the prompts; they share no block."""
    return [2 + (prompt * 131 + i * 7) % 1000 for i in range(LENGTH)]


class Told:
    """What three processes export at one time."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.router, self.prefill, self.decode = (Scrape(texts[pool]) for pool in ("router", "prefill", "decode"))

    def faults(self, pool: str, text: str | None = None) -> list[str]:
        """What is wrong with what that process exports, or with `text` in its place."""
        scrape = Scrape(self.texts[pool] if text is None else text)
        ones = {"block_size": {str(BLOCK)}, "num_gpu_blocks": {str(BLOCKS)}, "cache_dtype": {"float32"}}
        return faults(scrape, pool, {"model_name": {MODEL}, "worker_id": WORKERS, "policy": POLICIES, **ones})


async def asked(running, workers) -> Told:
    """All processes, once nothing is under way."""
    await workers.idle()
    for worker in (*workers.prefill, *workers.decode):
        worker.worker.load()  # says what was last known, and has it looked at
    await workers.idle()
    texts = {"router": (await running.http.get("/metrics")).text}
    for pool, (worker,) in (("prefill", workers.prefill), ("decode", workers.decode)):
        texts[pool] = generate_latest(worker.metrics.registry).decode()
    return Told(texts)


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """What was asked, what was told of it afterwards, and what once a client had left as well."""
    return asyncio.run(played(tmp_path_factory.mktemp("counted")))


async def played(folder):
    faulty = iter(())

    def fault(index):
        return next(faulty, WriteFault())

    setup = Setup(model=FAKE, prefill_blocks=BLOCKS, decode_blocks=BLOCKS, step_s=0.002, faults=fault)
    config = router_config(folder, slo=SloConfig(ttft_s=60.0, itl_s=60.0))
    async with served(folder, setup, config) as (running, workers):
        for worker in (*workers.prefill, *workers.decode):
            worker.metrics.placed(1, 0)  # as a process of its own says of its cores
        load = Load(running)
        await load.ask("two pools", 1, 6, "disaggregated")
        await load.ask("again", 1, 6, "disaggregated")
        await load.ask("alone", 2, 5, "colocated")
        await load.ask("two answers", 3, 4, "disaggregated", n=2)
        await load.ask("one token", 4, 1, "disaggregated")
        faulty = iter([WriteFault(Delivery.FAIL)])
        await load.ask("pushed twice", 5, 6, "disaggregated")
        await load.ask("too long", 6, 5000, "disaggregated")
        for turn in range(FILLING):  # more than there is room for: blocks are evicted
            await load.ask(f"filling {turn}", 10 + turn, 2, "colocated")
        before = await asked(running, workers)
        await load.leave(7)
        await until(partial(ended, running, "CANCELLED"))
        return load, before, await asked(running, workers)


async def ended(running, outcome):
    return f'diptych_requests_total{{outcome="{outcome}"' in (await running.http.get("/metrics")).text


def test_users_requests(scene):
    load, told, _ = scene
    router, answered = told.router, [name for name, answer in load.answers.items() if answer["status"] == 200]
    made, prompts = load.usage("completion_tokens"), LENGTH * len(answered)
    by_way = {("length", "disaggregated"): 5, ("length", "colocated"): 1 + FILLING, ("INVALID_ARGUMENT", "none"): 1}
    assert router.by("diptych_requests_total", "outcome", "route") == by_way
    assert load.usage("prompt_tokens") == prompts
    cached = load.answers["again"]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 4 * BLOCK  # the last block has the token that must be computed
    counts = {
        "diptych_prompt_tokens_total": prompts,
        "diptych_cached_prompt_tokens_total": cached,
        "diptych_generated_tokens_total": made,
        "diptych_goodput_requests_total": len(answered),
        "diptych_slo_judged_requests_total": len(answered),  # who asked for too much was promised nothing
        "diptych_ttft_seconds_count": len(answered),
        "diptych_e2e_seconds_count": len(answered),
        "diptych_tpot_seconds_count": len(answered) - 1,
        "diptych_second_token_gap_seconds_count": len(answered) - 1,
        "diptych_itl_seconds_count": made - len(answered) - 1,  # one of them has two answers
        "vllm:prompt_tokens_total": prompts,
        "vllm:generation_tokens_total": made,
        "vllm:prefix_cache_queries_total": prompts,
        "vllm:prefix_cache_hits_total": cached,
        "vllm:time_to_first_token_seconds_count": len(answered),
        "vllm:e2e_request_latency_seconds_count": len(answered),
        "vllm:request_queue_time_seconds_count": len(answered),
        "vllm:request_prompt_tokens_sum": prompts,
        "vllm:request_generation_tokens_sum": made,
        "vllm:request_max_num_generation_tokens_sum": made - 4,
        "vllm:request_params_max_tokens_sum": made - 4,
        "vllm:request_params_n_sum": len(answered) + 1,
        "vllm:request_prefill_kv_computed_tokens_sum": prompts - cached,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
    }
    assert {name: router.total(name) for name in counts} == counts
    sources = {("local_compute",): prompts - cached, ("local_cache_hit",): cached}
    assert router.by("vllm:prompt_tokens_by_source_total", "source") == sources
    assert router.by("vllm:request_success_total", "finished_reason") == {("length",): len(answered)}
    ttft_s = sum(load.answers[name]["diptych"]["ttft_s"] for name in answered)
    assert router.total("vllm:time_to_first_token_seconds_sum") == pytest.approx(ttft_s, abs=1e-3)
    staged = router.by("diptych_stage_seconds_sum", "stage")
    for stage in TTFT_STAGES:
        told_s = sum(load.answers[name]["diptych"]["stages"][f"{stage}_s"] for name in answered)
        assert staged.get((stage,), 0.0) == pytest.approx(told_s, abs=1e-3), stage


def test_hand_offs_in_three_processes(scene):
    _, told, _ = scene
    router, prefill, decode = told.router, told.prefill, told.decode
    one, two = BLOCKS_EACH * SIZE, 2  # bytes of a prompt; answers of one request
    committed = 3 + two
    sent = 3 * one  # not again what the decode worker has: the repeated prompt, the second answer
    for scrape, name in ((router, "diptych_handoff_kv_bytes_total"), (prefill, "diptych_kv_sent_bytes_total")):
        assert scrape.by(name, "connector") == {("local",): sent}, name
    assert router.by("diptych_handoffs_total", "connector") == {("local",): committed}
    assert router.by("diptych_handoff_blocks_total", "state") == {
        ("sent",): 3 * BLOCKS_EACH,
        ("cached",): 2 * BLOCKS_EACH,
    }
    assert router.total("diptych_failed_handoffs_total") == 1
    assert prefill.by("diptych_kv_transfers_total", "outcome") == {("committed",): committed, ("failed",): 1}
    assert prefill.total("vllm:nixl_num_failed_transfers_total") == 1
    assert prefill.total("vllm:nixl_bytes_transferred_sum") == sent
    for name in ("vllm:nixl_bytes_transferred", "vllm:nixl_xfer_time_seconds", "diptych_kv_transfer_seconds"):
        assert prefill.total(f"{name}_count") == 3, name  # those that moved something
    assert prefill.total("diptych_kv_transfer_gb_per_second_count") == 3
    assert prefill.total("diptych_kv_transfer_exposed_seconds_count") == committed
    for ours, theirs in (
        ("diptych_kv_transfer_seconds_sum", "diptych_handoff_transfer_seconds_sum"),
        ("diptych_kv_transfer_exposed_seconds_sum", "diptych_handoff_exposed_seconds_sum"),
        ("diptych_kv_transfer_gb_per_second_sum", "diptych_handoff_gb_per_second_sum"),
    ):
        assert prefill.total(ours) == pytest.approx(router.total(theirs)) != 0
    assert prefill.total("diptych_kv_grant_wait_seconds_count") == committed + 1
    assert decode.by("diptych_kv_reservations_total", "outcome") == {("granted",): committed + 1}
    assert decode.total("diptych_kv_adopted_total") == committed
    assert decode.total("diptych_kv_lease_expired_total") == 1  # what the failed one had
    assert decode.by("diptych_kv_leases", "state") == {}
    assert (prefill.total("diptych_kv_transfers_in_flight"), prefill.total("diptych_kv_transfers_asking")) == (0, 0)
    decisions = {("disaggregated", "request"): 6, ("colocated", "request"): 1 + FILLING}
    assert router.by("diptych_disagg_decisions_total", "path", "reason") == decisions
    assert router.by("diptych_worker_epoch", "worker_id") == {(worker,): 1 for worker in WORKERS}


def test_what_passed_each_engine(scene):
    load, told, _ = scene
    runs, made = 6, load.usage("completion_tokens")  # of answers at the prefill worker; tokens of all
    prefill = {
        "vllm:prompt_tokens_total": runs * LENGTH,
        "vllm:prefix_cache_queries_total": runs * LENGTH,
        "vllm:prefix_cache_hits_total": 2 * 4 * BLOCK,  # again, and the second answer
        "vllm:generation_tokens_total": runs,
        "vllm:iteration_tokens_total_sum": told.prefill.total("diptych_engine_scheduled_tokens_total"),
        "vllm:num_preemptions_total": 0,
        "vllm:kv_cache_usage_perc": 0,
        "diptych_engine_queued_tokens": 0,
    }
    assert {name: told.prefill.total(name) for name in prefill} == prefill
    handed = 5 * LENGTH
    sources = {("external_kv_transfer",): handed, ("local_compute",): (1 + FILLING) * LENGTH}
    assert told.decode.by("vllm:prompt_tokens_by_source_total", "source") == sources
    decode = {
        "vllm:prompt_tokens_total": handed + (1 + FILLING) * LENGTH,
        "vllm:generation_tokens_total": made - runs,
        "vllm:iteration_tokens_total_sum": told.decode.total("diptych_engine_scheduled_tokens_total"),
        "vllm:kv_cache_usage_perc": 0,
    }
    assert {name: told.decode.total(name) for name in decode} == decode
    assert told.decode.by("vllm:request_success_total", "finished_reason") == {("length",): 5 + 1 + FILLING}
    named = (4 + FILLING) * BLOCKS_EACH  # of different prompts
    lives = told.decode.total("vllm:kv_block_lifetime_seconds_count")
    assert lives == told.decode.total("vllm:kv_block_idle_before_evict_seconds_count") > 0
    assert named - lives == told.router.total("diptych_prefix_index_blocks", pool="decode")
    reused = 2 * BLOCKS_EACH
    assert told.decode.total("vllm:kv_block_reuse_gap_seconds_count") == reused
    assert told.decode.total("vllm:prefix_cache_hits_total") == reused * BLOCK


def test_a_client_that_left(scene):
    _, before, after = scene
    assert after.router.total("diptych_requests_total", outcome="CANCELLED") == 1
    assert after.router.total("vllm:request_success_total", finished_reason="abort") == 1
    for name in ("diptych_slo_judged_requests_total", "vllm:request_prompt_tokens_count", "diptych_e2e_seconds_count"):
        assert after.router.total(name) == before.router.total(name), name
    assert after.router.total("diptych_generated_tokens_total") > before.router.total("diptych_generated_tokens_total")
    assert after.router.total("diptych_requests_running") == 0
    granted = after.decode.total("diptych_kv_reservations_total", outcome="granted")
    assert granted == after.decode.total("diptych_kv_adopted_total") + after.decode.total(
        "diptych_kv_lease_expired_total"
    )
    assert after.decode.total("diptych_kv_leases") == after.decode.total("vllm:kv_cache_usage_perc") == 0


async def test_a_fault_of_ours_is_no_client_that_left(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("router.service.fitted", broken)
    async with running_router(router_config(tmp_path)) as running:
        assert (await running.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code == 500
        told = Scrape((await running.http.get("/metrics")).text)
    assert told.by("diptych_requests_total", "outcome") == {("INTERNAL",): 1}
    assert told.by("diptych_slo_missed_requests_total", "slo") == {("errors",): 1}


@pytest.mark.parametrize("pool", ["router", "prefill", "decode"])
def test_all_is_declared_and_bounded(scene, pool):
    for told in scene[1:]:
        assert told.faults(pool) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("diptych_retries_total 0.0", 'diptych_retries_total{user="me"} 0.0', "labels ['user'], declared []"),
        ('outcome="length"', 'outcome="my-model"', "outcome='my-model'"),
        ('worker_id="decode-0"', 'worker_id="decode-9"', "worker_id='decode-9'"),
        ('model_name="tiny",stage="route"', 'model_name="any",stage="route"', "model_name='any'"),
        ('stage="route"', 'stage="rout"', "stage='rout'"),
        ("diptych_retries", "diptych_tries", "diptych_tries: not declared for router"),
        ("diptych_retries", "diptych_tries", "diptych_retries: missing"),
        ("# TYPE diptych_ttft_seconds histogram", "# TYPE diptych_ttft_seconds gauge", "a gauge"),
        ("diptych_registry_up 1.0\n", "", "diptych_registry_up: no series"),
        ("diptych_registry_up 1.0\n", "diptych_registry_up 1.0\n" * 2, "twice"),
    ],
)
def test_what_is_not_would_be_seen(scene, old, new, said):
    """The check of the test above can fail."""
    told = scene[1]
    assert old in told.texts["router"]
    assert any(said in fault for fault in told.faults("router", told.texts["router"].replace(old, new)))
