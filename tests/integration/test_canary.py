"""Ways between the pools that do not work: canaries find them before users do, and find out when they work again."""

import asyncio
import logging
import time
from contextlib import asynccontextmanager

import pytest

from contracts.errors import InternalError, TransferFailed
from contracts.worker import ConnectorAddress
from dashboard.frames import heard
from kv_transfer.local import Delivery, LocalConnector, LocalHub, WriteFault
from router.config import CanaryConfig
from tests.integration.pools import Setup, until
from tests.integration.router_harness import router_config, running_router
from tests.integration.test_integrity import checked
from tests.integration.test_router_pools import FAKE, body, served, tokens

QUICK = CanaryConfig(interval_s=0.3, spacing_s=0.02, timeout_s=1.0, retry_s=0.05, max_backoff_s=0.2)
SILENT = CanaryConfig(interval_s=1000.0, spacing_s=1000.0)  # pairs are judged, by users' hand-offs alone


class Road(LocalHub):
    """What one prefill worker reaches: all that the hub does, but for what is cut."""

    def __init__(self, whole: LocalHub) -> None:
        super().__init__()
        self._whole = whole
        self.cut: set[str] = set()

    def find(self, address: ConnectorAddress) -> LocalConnector:
        if address.address in self.cut:
            raise TransferFailed(f"no way to {address.address}")
        return self._whole.find(address)


def road(workers, prefill):
    connector = workers.prefill[prefill].worker.links.side.connectors[0]
    if not isinstance(connector._hub, Road):
        connector._hub = Road(connector._hub)
    return connector._hub


def place(decode):
    """Where a decode worker's connector is: these are the first to join the hub."""
    return f"local-{decode}"


@asynccontextmanager
async def cluster(tmp_path, canary, setup=None):
    config = router_config(tmp_path, canary=canary)
    async with served(tmp_path, setup or Setup(model=FAKE), config) as (running, workers):
        yield running, workers
        await workers.idle()


async def health(running):
    return (await running.http.get("/health")).json()


async def pairs_are(running, **expected):
    async def are():
        return {state: n for state, n in (await health(running))["pairs"].items() if n} == expected

    await until(are)


async def failures(running):
    """Attempts of users' requests that failed, whatever the reason."""
    text = (await running.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("diptych_failed_attempts_total{")]
    return sum(float(line.split()[-1]) for line in lines)


async def test_a_bad_pair_is_found_and_left_out_and_comes_back_and_no_user_hears_of_it(tmp_path):
    setup = Setup(model=FAKE, num_prefill=2, num_decode=2)
    async with cluster(tmp_path, QUICK, setup) as (running, workers):
        await pairs_are(running, ok=4)
        assert await running.metric("diptych_bad_pairs") == 0.0
        road(workers, 0).cut.add(place(1))
        await pairs_are(running, ok=3, bad=1)
        (bad,) = (await health(running))["bad_pairs"]
        assert (bad["prefill"], bad["decode"]) == ("prefill-0", "decode-1")
        assert "no way" in bad["reason"]
        assert await running.metric("diptych_bad_pairs") == 1.0
        running.router._board.tick()
        shown = heard((await anext(aiter(running.router._board.watch()))).removeprefix(b"data: "))
        assert [said.partition(" (")[0] for said in shown.troubles] == ["no KV from prefill-0 to decode-1"]

        def ask(seed):
            return tokens(running, seed=seed, diptych={"route": "disaggregated"})

        await asyncio.gather(*(ask(seed) for seed in range(16)))
        assert await failures(running) == 0.0, "nobody was sent that way"
        road(workers, 0).cut.clear()
        await pairs_are(running, ok=4)
        assert await running.metric("diptych_canary_total", outcome="failed") >= 2
        assert await running.metric("diptych_canary_total", outcome="ok") >= 4
        assert await running.metric("diptych_requests_total") == 16.0, "canaries are no users' requests"
        assert await running.metric("diptych_handoffs_total") == 16.0
        assert await running.metric("diptych_prompt_tokens_total") == 16.0 * 80


async def test_users_hand_offs_alone_mark_a_pair_and_no_user_fails(tmp_path):
    setup = Setup(model=FAKE, num_decode=2)
    async with cluster(tmp_path, SILENT, setup) as (running, workers):
        road(workers, 0).cut.add(place(0))
        for seed in range(8):
            await tokens(running, seed=seed, diptych={"route": "disaggregated"})
        assert (await health(running))["pairs"] == {"unknown": 0, "ok": 1, "bad": 1}
        met = await failures(running)
        for seed in range(8):
            await tokens(running, seed=seed, diptych={"route": "disaggregated"})
        assert await failures(running) == met
        assert await running.metric("diptych_canary_total", outcome="ok") == 0.0


async def test_when_every_pair_is_bad_decode_workers_run_alone_and_it_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with cluster(tmp_path, QUICK) as (running, workers):
        await pairs_are(running, ok=1)
        road(workers, 0).cut.add(place(0))
        await pairs_are(running, bad=1)
        answer = await tokens(running, diptych={"stages": True})
        assert answer["diptych"]["route"] == "colocated"
        forced = await running.http.post("/v1/completions", json=body(diptych={"route": "disaggregated"}))
        assert forced.status_code == 503
        assert "every pair of them is bad" in forced.json()["error"]["message"]
        response = await running.http.get("/health")
        assert response.status_code == 200, "requests are served"
        assert any("no hand-off gets through" in line for line in response.json()["missing"])
        await until(lambda: any("requests run on decode workers alone" in m for m in caplog.messages))
        road(workers, 0).cut.clear()
        await pairs_are(running, ok=1)
        answer = await tokens(running, diptych={"stages": True})
        assert answer["diptych"]["route"] == "disaggregated"
        await until(lambda: "hand-offs get through again" in caplog.messages)


@pytest.mark.parametrize(
    ("delivery", "timeout_s"),
    [
        (Delivery.DROP, 0.3),  # nobody is refused and nothing arrives: the first token comes, and then nothing
        (Delivery.FAIL, 2.0),
        (Delivery.CORRUPT, 2.0),  # what arrives is not what was sent: the decode worker finds out
    ],
)
async def test_a_way_that_does_not_keep_its_word_is_bad_too(tmp_path, delivery, timeout_s):
    broken = [True]

    def faults(index):
        del index
        return WriteFault(delivery, flipped_bit=12) if broken[0] else WriteFault()

    setup = checked(faults, model=FAKE, num_prefill=2)
    canary = CanaryConfig(interval_s=0.3, spacing_s=0.02, timeout_s=timeout_s, retry_s=0.05, max_backoff_s=0.2)
    async with cluster(tmp_path, canary, setup) as (running, workers):
        del workers
        await pairs_are(running, ok=1, bad=1)
        await asyncio.gather(*(tokens(running, seed=seed) for seed in range(4)))
        assert await failures(running) == 0.0
        broken[0] = False
        await pairs_are(running, ok=2)


async def test_a_worker_that_is_full_or_busy_is_not_called_bad(tmp_path):
    setup = Setup(model=FAKE, num_decode=1, decode_blocks=8, step_s=0.05)
    canary = CanaryConfig(interval_s=0.1, spacing_s=0.02, timeout_s=2.0, canary_failures=1)
    async with cluster(tmp_path, canary, setup) as (running, workers):
        lease = await workers.decode[0].worker.driver.call(lambda engine: engine.reserve("full", 128, ()))
        await until(lambda: running.metric("diptych_canary_total", outcome="undecided"))
        assert (await health(running))["bad_pairs"] == []
        assert await running.metric("diptych_canary_total", outcome="failed") == 0.0
        await workers.decode[0].worker.driver.call(lambda engine: engine.release(lease))
        await pairs_are(running, ok=1)


async def test_a_canary_leaves_nothing_in_prefix_caches_and_costs_milliseconds(tmp_path):
    async with cluster(tmp_path, QUICK) as (running, workers):
        await until(lambda: _at_least(running, 3))
        await workers.idle()
        for served_worker in (*workers.prefill, *workers.decode):
            stats = await served_worker.worker.driver.call(lambda engine: engine.stats())
            assert stats.num_prefix_hit_tokens == 0


async def test_canaries_come_one_at_a_time_with_pauses_between_and_one_per_pair(tmp_path):
    canary = CanaryConfig(interval_s=1000.0, spacing_s=0.25)
    async with running_router(router_config(tmp_path, canary=canary)) as running:
        began = time.monotonic()
        prefill, _ = await running.cluster.pools(2, 2)
        await pairs_are(running, ok=4)
        assert time.monotonic() - began >= 3 * canary.spacing_s
        await asyncio.sleep(0.6)
        assert await running.metric("diptych_canary_total", outcome="ok") == 4.0
        assert sum(len(worker.seen) for worker in prefill) == 4


async def test_a_router_that_drains_sends_no_more(tmp_path):
    async with cluster(tmp_path, QUICK) as (running, workers):
        del workers
        await until(lambda: _at_least(running, 1))
        await running.router.drain()
        await asyncio.sleep(0.1)  # one may be under way
        sent = await running.metric("diptych_canary_total", outcome="ok")
        await asyncio.sleep(1.0)  # three intervals
        assert await running.metric("diptych_canary_total", outcome="ok") == sent


async def _at_least(running, count):
    return await running.metric("diptych_canary_total", outcome="ok") >= count


async def test_canaries_can_be_turned_off(tmp_path):
    async with cluster(tmp_path, CanaryConfig(interval_s=0.0, spacing_s=0.01)) as (running, workers):
        del workers
        await asyncio.sleep(0.3)
        assert await running.metric("diptych_canary_total", outcome="ok") == 0.0
        assert (await health(running))["pairs"] == {"unknown": 1, "ok": 0, "bad": 0}


async def test_a_canary_closes_the_breaker_of_a_worker_that_nobody_is_sent_to(tmp_path):
    async with cluster(tmp_path, QUICK) as (running, _):
        await pairs_are(running, ok=1)
        breakers = running.router._breakers
        (worker,) = (w for w in running.router._registry.workers() if w.info.kind.value == "decode")
        for _ in range(5):
            breakers.begin(worker.info.ref).failed(InternalError("broken"))
        assert [b["state"] for b in (await health(running))["breakers"]] == ["open"]
        (said,) = running.router._health.troubles()  # on the dashboard
        assert said.startswith("decode-0 is left out (")

        async def closed():
            return (await health(running))["breakers"] == []

        await until(closed)
