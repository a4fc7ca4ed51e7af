"""Workers that drain cost a request nothing, whenever it hears of it; one that its workers die of is given up in time."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from contracts.errors import Draining
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerKind
from router.config import RetryConfig
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.scripted_workers import ScriptedWorker, answer

PROMPT = (5, 6, 7)
BASE = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 12, "seed": 3, "return_token_ids": True}
EXPECTED = answer(GenerationRequest("x", PROMPT, SamplingParams(max_tokens=12, seed=3)))
# No failure may be afforded, and one that is counted shows: it waits for ever.
NOTHING_TO_SPARE = RetryConfig(
    max_failures=0, max_handoff_failures=0, backoff_s=60.0, worker_wait_s=15.0, first_worker_wait_s=0.0
)
ROUTES = pytest.mark.parametrize("route", ["disaggregated", "colocated"])


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path, retry=NOTHING_TO_SPARE)) as running:
        await running.cluster.pools(2, 2)
        yield running


async def complete(running, **changes):
    response = await running.http.post("/v1/completions", json={**BASE, **changes})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == EXPECTED
    await nothing_failed(running)


async def nothing_failed(running) -> None:
    await running.cluster.idle()
    assert await running.metric("diptych_failed_attempts_total") == 0


class Stream:
    """A client that reads its tokens as they come."""

    def __init__(self, running) -> None:
        self.running = running
        self.told: list[int] = []
        self.status, self.text = 0, ""

    async def read(self, **changes) -> None:
        body = {**BASE, "stream": True, **changes}
        async with self.running.http.stream("POST", "/v1/completions", json=body) as response:
            self.status = response.status_code
            async for line in response.aiter_lines():
                self.text += line
                if line.startswith("data: {"):
                    choices = json.loads(line[6:]).get("choices", ())
                    self.told += [token for choice in choices for token in choice["token_ids"]]

    async def has(self, num_tokens: int) -> None:
        """Return when it has heard so many.

        A decode worker's end is its answer's own only once the first token came, on another connection.
        """
        while len(self.told) < num_tokens:
            await asyncio.sleep(0.005)


def pool(running, kind) -> list[ScriptedWorker]:
    return [worker for worker in running.cluster.workers if worker.kind is kind]


async def drained(running) -> tuple[float, float]:
    whens = ("before_first_token", "mid_answer")
    return tuple([await running.metric("diptych_drained_attempts_total", when=when) for when in whens])


@pytest.mark.parametrize("kind", list(WorkerKind))
async def test_a_worker_that_refuses_because_it_drains_costs_nothing_and_is_not_asked_twice(served, kind):
    first = pool(served, kind)[0]
    await first.mute()  # nor does it say itself that it drains
    route = "disaggregated" if kind is WorkerKind.PREFILL else "colocated"
    first.faults.refuse.extend(Draining("is about to stop") for _ in range(50))
    for _ in range(6):
        await complete(served, diptych={"route": route})
    assert len(first.faults.refuse) == 49
    assert await drained(served) == (1, 0)


async def prefer(worker: ScriptedWorker, over: ScriptedWorker) -> None:
    over.load = replace(over.load, num_running=50)
    await over.announcer.announce_once()
    await worker.mute()


@ROUTES
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
async def test_an_answer_that_is_sent_away_goes_on_elsewhere(served, route, num_tokens):
    first, second = pool(served, WorkerKind.DECODE)
    stream = Stream(served)
    first.faults.drain_after_tokens, first.faults.before_end = num_tokens, stream.has
    await prefer(first, over=second)
    await stream.read(diptych={"route": route})
    assert stream.told == EXPECTED
    await nothing_failed(served)
    assert await drained(served) == ((1, 0) if route == "colocated" and num_tokens == 0 else (0, 1))
    await complete(served, diptych={"route": route})
    assert sum(await drained(served)) == 1, "nobody asks it again"


@ROUTES
@pytest.mark.parametrize("num_tokens", [0, 5])
async def test_a_session_that_ends_in_good_order_is_no_failure_of_what_it_carries(served, route, num_tokens):
    first, second = pool(served, WorkerKind.DECODE)
    first.faults.end_session_after_tokens = num_tokens
    await prefer(first, over=second)
    await complete(served, diptych={"route": route})
    assert sum(await drained(served)) == 1


@ROUTES
@pytest.mark.parametrize("num_tokens", [0, 5])
async def test_who_said_farewell_and_is_cut_short_is_no_failure_either(served, route, num_tokens):
    first, second = pool(served, WorkerKind.DECODE)
    await prefer(first, over=second)
    first.faults.hold.clear()
    asking = asyncio.create_task(complete(served, diptych={"route": route}))
    async with asyncio.timeout(20):
        while not first.running:
            await asyncio.sleep(0.01)
    assert await first.announcer.leave() == 1, "the second can take it"
    first.faults.die_after_tokens = num_tokens
    first.faults.hold.set()
    await asking
    assert sum(await drained(served)) == 1


async def test_a_prefill_worker_that_leaves_and_is_cut_short_is_no_failure(served):
    first, second = pool(served, WorkerKind.PREFILL)
    await prefer(first, over=second)
    first.faults.hold.clear()
    asking = asyncio.create_task(complete(served, diptych={"route": "disaggregated"}))
    async with asyncio.timeout(20):
        while not first.running:
            await asyncio.sleep(0.01)
    assert await first.announcer.leave() == 1, "the second can take it"
    first.faults.die_before_first = 1
    first.faults.hold.set()
    await asking
    assert await drained(served) == (1, 0)


async def test_a_hand_off_to_a_worker_that_drains_costs_a_second_push_and_nothing_else(served):
    for worker in pool(served, WorkerKind.PREFILL):
        worker.faults.handoff_failures.append(Draining("d is about to stop"))
    await complete(served, diptych={"route": "disaggregated"})
    assert sum(len(worker.seen) for worker in pool(served, WorkerKind.PREFILL)) == 1, "the prompt was computed once"
    assert await drained(served) == (0, 0), "the attempt went on"


async def test_when_the_only_decode_worker_drains_the_answer_waits_for_its_next_life(tmp_path):
    async with running_router(router_config(tmp_path, retry=NOTHING_TO_SPARE)) as running:
        _, (only,) = await running.cluster.pools(1, 1)
        stream = Stream(running)
        only.faults.drain_after_tokens, only.faults.before_end = 4, stream.has
        asking = asyncio.create_task(stream.read())
        async with asyncio.timeout(20):
            while await drained(running) != (0, 1):
                await asyncio.sleep(0.01)
        await only.mute()
        assert await only.announcer.leave() == 0, "nobody can take it"
        await only.server.stop(0)
        late = asyncio.create_task(complete(running))  # comes while nobody is there
        await asyncio.sleep(0.2)
        assert not asking.done(), stream.text
        assert not late.done()
        await running.cluster.add(WorkerKind.DECODE, only.ref.worker_id, epoch=2)
        await asyncio.gather(asking, late)
        assert stream.told == EXPECTED
        await nothing_failed(running)


async def test_nobody_waits_for_a_pool_that_was_never_there_or_is_gone_for_long(tmp_path):
    retry = replace(NOTHING_TO_SPARE, worker_wait_s=3.0)
    async with running_router(router_config(tmp_path, retry=retry)) as running:
        for epoch in (1, 2):
            began = time.monotonic()
            response = await running.http.post("/v1/completions", json=BASE)
            assert response.status_code == 503
            assert "no decode worker is ready" in response.json()["error"]["message"]
            assert time.monotonic() - began < retry.worker_wait_s / 2
            worker = await running.cluster.add(WorkerKind.DECODE, "d0", epoch)
            await worker.stop(leave=True)
            await asyncio.sleep(retry.worker_wait_s + 0.1)


@pytest.mark.parametrize("kind", list(WorkerKind))
async def test_a_request_that_its_workers_die_of_does_not_kill_them_all(tmp_path, kind):
    async with running_router(
        router_config(tmp_path, retry=RetryConfig(backoff_s=0.01, max_worker_deaths=1))
    ) as running:
        await running.cluster.pools(5, 5)
        stream = Stream(running)
        for worker in pool(running, kind):
            if kind is WorkerKind.PREFILL:
                worker.faults.die_before_first = 1
            else:
                worker.faults.die_after_tokens, worker.faults.before_end = 0, stream.has
        await stream.read(diptych={"route": "disaggregated"})
        if kind is WorkerKind.PREFILL:  # before the first token
            assert stream.status == 503
        assert "given up: 2 workers in a row went away while they had this request" in stream.text
        alive = [w for w in pool(running, kind) if w.faults.die_before_first or w.faults.die_after_tokens is not None]
        assert len(alive) == 3
