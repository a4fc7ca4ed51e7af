"""What breaks between the pools, and that the client gets the undisturbed answer all the same."""

import asyncio

import pytest

from contracts.errors import InternalError, LayoutMismatch, NoRoom, Overloaded, TransferFailed, WorkerLost
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerKind, WorkerLoad, WorkerState
from observability.stages import GAP_STAGES, TTFT_STAGES
from tests.integration.router_harness import MODEL, events, router_config, running_router
from tests.integration.scripted_workers import answer

PROMPT = (5, 6, 7)
BASE = {
    "model": MODEL,
    "prompt": list(PROMPT),
    "max_tokens": 12,
    "seed": 3,
    "return_token_ids": True,
    "diptych": {"stages": True},
}
EXPECTED = answer(GenerationRequest("x", PROMPT, SamplingParams(max_tokens=12, seed=3)))


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(2, 2)
        yield running


async def complete(running, **changes):
    """Ask, assert that nothing is amiss with the tokens, and return the body."""
    response = await running.http.post("/v1/completions", json={**BASE, **changes})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["choices"][0]["token_ids"] == EXPECTED
    await running.cluster.idle()
    return body


def all_workers(running, kind):
    return [w for w in running.cluster.workers if w.kind is kind]


@pytest.mark.parametrize("fault", ["die_before_first", "die_after_first"])
async def test_a_prefill_worker_that_dies(served, fault):
    for worker in all_workers(served, WorkerKind.PREFILL)[:1]:
        setattr(worker.faults, fault, 1)
    bodies = [await complete(served) for _ in range(2)]  # one of the two meets it
    assert await served.metric("diptych_failed_attempts_total", code="UNAVAILABLE") == 1
    assert await served.metric("diptych_retries_total") == 1
    moved = fault == "die_after_first"
    assert await served.metric("diptych_migrations_total", cause="failure") == moved
    spent = [body["diptych"] for body in bodies]
    stages = [told["stages"] for told in spent]
    assert sorted(s["recover_s"] > 0 for s in stages) == [False, moved]
    assert sorted(s["retry_s"] > 0 for s in stages) == [False, not moved]
    for told, said in zip(spent, stages, strict=True):
        rest = told["unexplained_s"]  # below 0: these workers say how long they take, whatever it was
        assert sum(said[f"{stage}_s"] for stage in TTFT_STAGES) + rest["ttft"] == pytest.approx(told["ttft_s"])
        assert sum(said[f"{stage}_s"] for stage in GAP_STAGES) + rest["gap"] == pytest.approx(told["gap_s"])
    seen = [r for w in all_workers(served, WorkerKind.PREFILL) for r in w.seen]
    assert len({r.request_id for r in seen}) == len(seen) == 3
    assert {len(r.output_token_ids) for r in seen} == ({0} if fault == "die_before_first" else {0, 1})


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("route", ["disaggregated", "colocated"])
async def test_a_decode_worker_that_dies_mid_answer(served, num_tokens, route):
    for worker in all_workers(served, WorkerKind.DECODE):
        worker.faults.die_after_tokens = num_tokens
    body = await complete(served, diptych={"route": route, "stages": True})
    assert body["diptych"]["route"] == route
    assert await served.metric("diptych_failed_attempts_total", code="UNAVAILABLE") >= 1


async def told(served, kind, number):
    """That they are cancelled reaches the workers beside the answer, not before it."""
    async with asyncio.timeout(3):
        while sum(len(w.cancelled) for w in all_workers(served, kind)) < number:
            await asyncio.sleep(0.01)
    assert sum(len(w.cancelled) for w in all_workers(served, kind)) == number


@pytest.mark.parametrize("error", [NoRoom("full"), TransferFailed("lost"), LayoutMismatch("dtype", "a", "b")], ids=str)
async def test_a_failed_handoff_goes_to_another_decode_worker(served, error):
    for worker in all_workers(served, WorkerKind.PREFILL):
        worker.faults.handoff_failures.append(error)
    body = await complete(served)
    assert body["diptych"]["route"] == "disaggregated"
    assert body["diptych"]["handoff"]["kv_bytes"] == 4096
    prefills = [r for w in all_workers(served, WorkerKind.PREFILL) for r in w.seen]
    assert len(prefills) == 1, "the prompt was computed once"
    await told(served, WorkerKind.DECODE, 1)  # the first target


async def test_handoffs_that_keep_failing_end_on_a_decode_worker_alone(served):
    for worker in all_workers(served, WorkerKind.PREFILL):
        worker.faults.handoff_failures.extend(TransferFailed(f"{i}") for i in range(10))
    body = await complete(served)
    assert body["diptych"]["route"] == "colocated"
    alone = [r for w in all_workers(served, WorkerKind.DECODE) for r in w.seen]
    assert [len(r.output_token_ids) for r in alone] == [1], "the first token was kept"
    await told(served, WorkerKind.PREFILL, 1)


async def test_a_request_that_no_prefill_worker_can_read_runs_alone(served):
    for worker in all_workers(served, WorkerKind.PREFILL):
        worker.faults.refuse.extend(InternalError("poison") for _ in range(10))
    body = await complete(served)
    assert body["diptych"]["route"] == "colocated"
    assert [len(w.seen) for w in all_workers(served, WorkerKind.PREFILL)] == [1, 1]


async def test_a_forced_route_is_never_left_silently(served):
    for worker in all_workers(served, WorkerKind.PREFILL):
        worker.faults.handoff_failures.extend(TransferFailed(f"{i}") for i in range(50))
    response = await served.http.post("/v1/completions", json={**BASE, "diptych": {"route": "disaggregated"}})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    await served.cluster.idle()


async def test_a_lost_token_is_noticed_and_made_again(served):
    for worker in all_workers(served, WorkerKind.DECODE):
        worker.faults.skip_a_token = 1
    await complete(served)
    assert await served.metric("diptych_failed_attempts_total", code="INTERNAL") >= 1


async def test_errors_that_another_worker_may_not_have(served):
    worker = all_workers(served, WorkerKind.DECODE)[0]
    for error in (InternalError("bug"), Overloaded("queue"), WorkerLost("gone")):
        worker.faults.refuse.append(error)
        for _ in range(2):
            await complete(served, diptych={"route": "colocated", "stages": True})
    assert not worker.faults.refuse


async def test_the_budget_is_bounded_and_the_last_error_is_said(served):
    for worker in served.cluster.workers:
        worker.faults.refuse.extend(WorkerLost(f"broken {i}") for i in range(50))
    response = await served.http.post("/v1/completions", json=BASE)
    assert response.status_code == 503
    assert "broken" in response.json()["error"]["message"]
    asked = sum(50 - len(w.faults.refuse) for w in served.cluster.workers)
    assert asked == 7, "max_failures is 6"


async def test_everyone_overloaded_is_429_without_hammering(served):
    for worker in all_workers(served, WorkerKind.DECODE):
        worker.faults.refuse.extend(Overloaded("full") for _ in range(50))
    response = await served.http.post("/v1/completions", json={**BASE, "diptych": {"route": "colocated"}})
    assert response.status_code == 429
    assert [len(w.faults.refuse) for w in all_workers(served, WorkerKind.DECODE)] == [49, 49]


async def test_a_stream_pauses_and_goes_on(served):
    for worker in all_workers(served, WorkerKind.DECODE):
        worker.faults.die_after_tokens = 3
    got = events((await served.http.post("/v1/completions", json={**BASE, "stream": True})).text)
    assert [i for e in got[:-1] for i in e["choices"][0]["token_ids"]] == EXPECTED
    assert "error" not in str(got)


@pytest.mark.parametrize("leave", [True, False])
async def test_workers_come_and_go(tmp_path, leave):
    async with running_router(router_config(tmp_path)) as running:
        prefill, decode = await running.cluster.pools(1, 1)
        await complete(running)
        second = await running.cluster.add(WorkerKind.DECODE, "d1")
        await decode[0].stop(leave=leave)
        for _ in range(3):
            await complete(running)
        assert len(second.running) == 0
        await prefill[0].stop(leave=leave)
        body = await complete(running)
        assert body["diptych"]["route"] == "colocated"


async def test_a_worker_that_hangs_gives_way_to_its_next_life_elsewhere_when_its_word_is_old(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        _, decode = await running.cluster.pools(1, 1)
        running.cluster.step_s = 0.02
        asking = asyncio.create_task(complete(running))
        async with asyncio.timeout(5):
            while not decode[0].running:
                await asyncio.sleep(0.01)
        await decode[0].mute()  # it hangs: its sockets stay open, and it says no more
        decode[0].faults.hold.clear()
        await running.cluster.add(WorkerKind.DECODE, "d0", epoch=2)
        await asyncio.wait_for(asking, 6)
        assert await running.metric("diptych_worker_epoch", worker_id="d0") == 2


async def test_a_worker_that_says_nothing_any_more_loses_its_requests_to_another(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 2)
        running.cluster.step_s = 0.02
        asking = asyncio.create_task(complete(running))
        async with asyncio.timeout(5):
            while not (busy := [w for w in all_workers(running, WorkerKind.DECODE) if w.running]):
                await asyncio.sleep(0.01)
        await busy[0].mute()
        busy[0].faults.hold.clear()
        await asyncio.wait_for(asking, 6)  # within ttl_s, the registry gives it up


async def test_a_prefill_worker_that_hangs_loses_its_requests_to_another(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        prefill, _ = await running.cluster.pools(2, 1)
        prefill[0].faults.hold.clear()
        asking = asyncio.create_task(complete(running))  # the first by name gets the first request
        async with asyncio.timeout(5):
            while not prefill[0].running:
                await asyncio.sleep(0.01)
        await prefill[0].mute()
        await asyncio.wait_for(asking, 8)
        assert len(prefill[1].seen) == 1


async def test_decode_dies_while_prefill_says_nothing(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        prefill, decode = await running.cluster.pools(2, 2)
        prefill[0].faults.stall_before_handoff = True
        asking = asyncio.create_task(complete(running))
        async with asyncio.timeout(5):
            while not prefill[0].running or not decode[0].attached:
                await asyncio.sleep(0.01)
        await decode[0].stop()
        await asyncio.wait_for(asking, 5)
        assert [len(r.output_token_ids) for r in prefill[1].seen] == [1], "the first token was kept"
        assert len(prefill[0].cancelled) == 1


@pytest.mark.parametrize("fault", [{"commit_before_first": True}, {"books_late_s": 0.2}, {"no_books": True}], ids=str)
async def test_news_of_two_connections_in_any_order(served, fault):
    for worker in all_workers(served, WorkerKind.PREFILL):
        for name, value in fault.items():
            setattr(worker.faults, name, value)
    body = await complete(served)
    assert (body["diptych"]["handoff"] is None) == ("no_books" in fault)
    got = events((await served.http.post("/v1/completions", json={**BASE, "stream": True})).text)
    assert [i for e in got[:-1] for i in e["choices"][0]["token_ids"]] == EXPECTED
    if "no_books" not in fault:  # a call that ends without an outcome is a fault of that worker
        assert await served.metric("diptych_failed_attempts_total") == 0


async def test_a_decode_worker_that_restarts_alone_in_its_pool_is_waited_for(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        _, decode = await running.cluster.pools(1, 1)
        decode[0].faults.die_after_tokens = 4
        await complete(running)


async def test_a_draining_worker_gets_nothing_new(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        _, decode = await running.cluster.pools(0, 2)
        decode[0].load = WorkerLoad(state=WorkerState.DRAINING)
        await decode[0].announcer.announce_once()
        async with asyncio.timeout(3):
            while (await running.http.get("/health")).json()["ready"]["decode"] != 1:
                await asyncio.sleep(0.01)
        for _ in range(4):
            await complete(running)
        assert not decode[0].seen


async def test_load_is_spread(served):
    served.cluster.step_s = 0.01
    await asyncio.gather(*(complete(served) for _ in range(8)))
    assert [len(w.seen) for w in all_workers(served, WorkerKind.PREFILL)] == [4, 4]


async def test_many_at_once_are_never_mixed_up(served):
    async def ask(seed):
        prompt = [5, 6, 7 + seed]
        body = {**BASE, "prompt": prompt, "seed": seed, "stream": True}
        got = events((await served.http.post("/v1/completions", json=body)).text)
        request = GenerationRequest("x", tuple(prompt), SamplingParams(max_tokens=12, seed=seed))
        assert [i for e in got[:-1] for i in e["choices"][0]["token_ids"]] == answer(request)

    for worker in all_workers(served, WorkerKind.DECODE):
        worker.faults.die_after_tokens = 100
    await asyncio.gather(*(ask(seed) for seed in range(32)))
    await served.cluster.idle()
