"""The dashboard of a real router, without a browser: its page, its events, who may see them, and what they never say."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import httpx
import pytest

from dashboard.feed import MOST_WATCHERS
from dashboard.files import EVENTS_PATH, PAGE, PAGE_PATHS
from dashboard.frames import Frame, Snapshot, heard
from dashboard.requests import ms
from dashboard.slo import SloConfig
from observability.stages import GAP_STAGES, TTFT_STAGES
from router.config import AccessConfig
from router.keys import hash_of, new_key
from rpc.server import ServerConfig
from tests.integration.router_harness import MODEL, router_config, running_router

SECRET_WORDS = "the violet giraffe"
KEY = new_key()


@pytest.fixture
async def served(tmp_path):
    async with running_router(router_config(tmp_path, slo=SloConfig(ttft_s=5.0, itl_s=5.0))) as running:
        await running.cluster.pools(1, 1)
        yield running


@asynccontextmanager
async def watching(running, **headers):
    """Events as they come, decoded."""
    async with running.http.stream("GET", EVENTS_PATH, headers=headers) as response:
        assert response.status_code == 200, await response.aread()

        async def events():
            async for line in response.aiter_lines():
                if line:
                    yield heard(line.removeprefix("data: "))

        yield events()


async def ask(running, **more):
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, **more}
    return await running.http.post("/v1/completions", json=body)


async def test_the_page_and_its_files_are_there_and_loads_nothing_from_elsewhere(served):
    for path in sorted(PAGE_PATHS):
        response = await served.http.get(path)
        assert response.status_code == 200, path
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy.pop("default-src") == "'none'"
        assert set(policy.values()) <= {"'self'", "'none'"}
        assert response.headers["x-content-type-options"] == "nosniff"
        again = await served.http.get(path, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert (await served.http.get(f"{PAGE}/uplot/../main.py")).status_code == 404
    assert (await served.http.get(f"{PAGE}/LICENSE")).status_code == 404
    assert (await served.http.post(PAGE)).status_code == 405


async def test_a_request_is_seen_within_two_seconds_with_its_stages_and_its_way(served):
    async with watching(served) as events:
        first = await anext(events)
        assert isinstance(first, Snapshot)
        assert (first.model, first.limits.ttft, first.limits.e2e) == (MODEL, 5000.0, None)
        asked_at = time.monotonic()
        answer = await served.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "diptych": {"stages": True}},
            headers={"X-Request-Id": "mine"},
        )
        assert answer.status_code == 200
        async with asyncio.timeout(5):
            frame = await anext(events)
            while not frame.requests:
                frame = await anext(events)
        assert time.monotonic() - asked_at < 2.5
    assert isinstance(frame, Frame)
    (row,) = frame.requests
    assert (row.id, row.ok, row.good, row.prefill, row.decode, row.output_tokens) == ("mine", True, True, "p0", "d0", 4)
    account = answer.json()["diptych"]  # what the client was told
    predicted = {name: account["decision"][f"predicted_{name}_s"] for name in ("remote", "local")}
    assert (row.decision.reason, row.decision.remote, row.decision.local) == ("always", *map(ms, predicted.values()))
    assert {f"{name}_s": took for name, took in row.stages.items()} == {
        name: pytest.approx(ms(took_s), abs=0.002) for name, took_s in account["stages"].items() if took_s
    }
    assert row.handoff.connector == "local"
    told = {stage: row.stages.get(stage, 0.0) for stage in (*TTFT_STAGES, *GAP_STAGES)}
    assert sum(told[s] for s in TTFT_STAGES) + row.unexplained == pytest.approx(row.ttft, abs=0.02)  # each is rounded
    assert sum(told[s] for s in GAP_STAGES) + row.second_unexplained == pytest.approx(row.second, abs=0.02)
    assert frame.window.tokens == 4
    assert frame.window.good == 1
    assert {(w.id, w.state) for w in frame.workers} == {("p0", "ready"), ("d0", "ready")}


async def test_a_killed_worker_is_seen_within_three_seconds_without_a_request(served):
    async with watching(served) as events:
        await anext(events)
        killed_at = time.monotonic()
        for worker in list(served.cluster.workers):
            await worker.stop()
        async with asyncio.timeout(5):
            async for frame in events:
                if all(worker.state != "ready" for worker in frame.workers):
                    break
        assert time.monotonic() - killed_at < 3


async def test_no_word_of_a_prompt_or_an_answer_is_told(served):
    words = served.ids(SECRET_WORDS)
    served.cluster.script = lambda request, index: words[index % len(words)]
    async with served.http.stream("GET", EVENTS_PATH) as response:
        lines = response.aiter_lines()
        await anext(lines)
        answer = await ask(served, prompt=SECRET_WORDS, max_tokens=12)
        assert "giraffe" in answer.json()["choices"][0]["text"]
        failed = await ask(served, prompt=SECRET_WORDS, max_tokens=100_000)
        assert failed.status_code == 400
        said = ""
        async with asyncio.timeout(5):
            while said.count('"outcome"') < 2:
                said += await anext(lines)
        said += (await snapshot_text(served)).decode()
    assert "INVALID_ARGUMENT" in said
    assert not [w for w in (*SECRET_WORDS.split()[1:], answer.json()["choices"][0]["text"]) if w in said]


async def snapshot_text(running) -> bytes:
    async with running.http.stream("GET", EVENTS_PATH) as response:
        async for line in response.aiter_lines():
            return line.encode()
    raise AssertionError


async def test_with_keys_the_page_is_open_and_its_events_are_not(tmp_path):
    keys = tmp_path / "keys.json"
    other = new_key()
    owners = [{"name": "alice", "hash": hash_of(KEY)}, {"name": "bob", "hash": hash_of(other), "dashboard": False}]
    keys.write_text(json.dumps({"keys": owners}))
    access = AccessConfig(api_keys=keys, workers=ServerConfig(port=0))
    async with running_router(router_config(tmp_path, access=access)) as running:
        for path in sorted(PAGE_PATHS):
            assert (await running.http.get(path)).status_code == 200
        for url in (EVENTS_PATH, f"{EVENTS_PATH}/", f"{EVENTS_PATH}?key={KEY}&api_key={KEY}", f"{PAGE}/nothing"):
            async with asyncio.timeout(5):  # a stream that is let through does not end
                refused = await running.http.get(url)
            assert refused.status_code == 401, url
            assert "snapshot" not in refused.text
        refused = await running.http.get(EVENTS_PATH, headers={"Authorization": f"Bearer {other}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        async with watching(running, Authorization=f"Bearer {KEY}") as events:
            snapshot = await anext(events)
        assert isinstance(snapshot, Snapshot)
        answer = await running.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": [1]}, headers={"Authorization": f"Bearer {KEY}"}
        )
        assert answer.status_code == 503  # no worker
        said = (await read_until_outcome(running)).decode()
        assert "alice" not in said


async def read_until_outcome(running) -> bytes:
    async with running.http.stream("GET", EVENTS_PATH, headers={"Authorization": f"Bearer {KEY}"}) as response:
        async with asyncio.timeout(5):
            async for line in response.aiter_lines():
                if '"outcome"' in line:
                    return line.encode()
    raise AssertionError


async def test_so_many_watch_and_who_leaves_makes_room(served):
    async with httpx.AsyncClient(
        base_url=served.url, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as http:
        streams = [http.stream("GET", EVENTS_PATH) for _ in range(MOST_WATCHERS)]
        assert [(await stream.__aenter__()).status_code for stream in streams] == [200] * MOST_WATCHERS
        refused = await http.get(EVENTS_PATH)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert str(MOST_WATCHERS) in refused.json()["error"]["message"]
        async with asyncio.timeout(3):  # it watches nothing, and so does not wait for room
            assert (await http.head(EVENTS_PATH)).status_code == 200
        await streams.pop().__aexit__(None, None, None)
        async with asyncio.timeout(3):  # its leaving is heard at once, not with the next frame's failure
            while (status := await _status(http)) == 429:
                await asyncio.sleep(0.02)
        assert status == 200
        for stream in streams:
            await stream.__aexit__(None, None, None)


async def _status(http) -> int:
    async with http.stream("GET", EVENTS_PATH) as response:
        return response.status_code


async def test_a_router_that_stops_ends_the_streams_and_is_not_held_up_by_them(tmp_path):
    async with running_router(router_config(tmp_path)) as running, watching(running) as events:
        await anext(events)
        begun = time.monotonic()
        await running.router.stop()
        async for _ in events:
            pass
        assert time.monotonic() - begun < 3
