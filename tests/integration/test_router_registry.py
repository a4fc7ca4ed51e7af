"""A worker's connection says more than its word: when it breaks, nothing is sent there, and its next life may be elsewhere."""

import asyncio
import time
from dataclasses import replace

import pytest

from contracts.errors import InvalidRequest, WorkerIdTaken
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from router.config import RegistryConfig
from rpc.announce import GrpcRegistryClient
from rpc.server import RpcServer, ServerConfig
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.scripted_workers import LAYOUT as SCRIPTED_LAYOUT

LAYOUT = KVLayout(MODEL, "float32", 1, 1, 4, 16)
TTL_S = 30.0


def info(epoch: int, address: str) -> WorkerInfo:
    return WorkerInfo(WorkerRef("decode-0", epoch), WorkerKind.DECODE, address, MODEL, LAYOUT, ("local",), 512, 128)


async def ready(running) -> int:
    return (await running.http.get("/health")).json()["ready"]["decode"]


async def until_ready(running, number: int) -> float:
    began = time.monotonic()
    async with asyncio.timeout(10):
        while await ready(running) != number:
            await asyncio.sleep(0.02)
    return time.monotonic() - began


@pytest.fixture
async def running(tmp_path):
    registry = RegistryConfig(ttl_s=TTL_S)
    async with running_router(router_config(tmp_path, registry=registry)) as running:
        yield running


async def test_a_broken_connection_takes_a_worker_out_of_routing_and_frees_its_name_for_its_next_life(running):
    async with asyncio.timeout(20):
        client = GrpcRegistryClient(running.target)
        first, second = RpcServer(ServerConfig(), ()), RpcServer(ServerConfig(), ())
        here, there = f"127.0.0.1:{await first.start()}", f"127.0.0.1:{await second.start()}"
        await client.announce(info(1, here), WorkerLoad())
        await until_ready(running, 1)
        await asyncio.sleep(0.2)  # connected
        with pytest.raises(WorkerIdTaken, match=rf"{here} has it and is alive, the one at {there} wants it"):
            await client.announce(info(2, there), WorkerLoad())
        await first.stop(0)
        assert await until_ready(running, 0) < 5.0, "long before its word is too old"
        await client.announce(info(2, there), WorkerLoad())
        await until_ready(running, 1)
        await client.close()
        await second.stop(0)


async def test_a_worker_that_comes_back_where_it_was_is_offered_with_its_first_word(running):
    async with asyncio.timeout(20):
        client = GrpcRegistryClient(running.target)
        first = RpcServer(ServerConfig(), ())
        port = await first.start()
        await client.announce(info(1, f"127.0.0.1:{port}"), WorkerLoad())
        await asyncio.sleep(0.2)
        await first.stop(0)
        await until_ready(running, 0)
        second = RpcServer(ServerConfig(port=port), ())
        await second.start()
        await client.announce(info(1, f"127.0.0.1:{port}"), WorkerLoad())
        assert await ready(running) == 1, "the same life: a connection that broke and came back"
        await client.announce(info(2, f"127.0.0.1:{port}"), WorkerLoad())
        assert await ready(running) == 1
        await client.close()
        await second.stop(0)


async def test_a_worker_that_says_it_is_tiny_makes_nobody_else_smaller(tmp_path):
    async with running_router(router_config(tmp_path)) as running:
        await running.cluster.pools(1, 1)
        client = GrpcRegistryClient(running.target)
        for kind in WorkerKind:
            tiny = replace(info(1, "127.0.0.1:9"), ref=WorkerRef(f"tiny-{kind}", 1), kind=kind, layout=SCRIPTED_LAYOUT)
            await client.announce(replace(tiny, max_model_len=1, num_blocks=1), WorkerLoad())
        assert await ready(running) == 2
        for _ in range(6):
            body = {"model": MODEL, "prompt": "It is", "max_tokens": 500}
            answer = await running.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        assert await running.metric("diptych_failed_attempts_total") == 0, "nobody was sent there"
        (model,) = (await running.http.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == min(1024, running.card.max_model_len)
        await client.close()


@pytest.mark.parametrize(
    ("info_changes", "load", "field"),
    [
        ({"address": "unix:/tmp/x"}, WorkerLoad(), "info.address"),
        ({"connectors": ("shm\x1b[2J",)}, WorkerLoad(), "info.connectors"),
        ({"connectors": ("x" * 1000,)}, WorkerLoad(), "info.connectors"),
        ({"ref": WorkerRef("two\nlines", 1)}, WorkerLoad(), "worker_id"),
        ({}, WorkerLoad(kv_usage=float("nan")), "load.kv_usage"),
        ({}, WorkerLoad(decode_step_s=1e300), "load.decode_step_s"),
    ],
)
async def test_what_no_worker_would_say_is_refused_by_field(running, info_changes, load, field):
    client = GrpcRegistryClient(running.target)
    with pytest.raises(InvalidRequest, match=field):
        await client.announce(replace(info(1, "127.0.0.1:9"), **info_changes), load)
    assert await ready(running) == 0
    await client.close()


async def test_a_router_that_is_stopped_for_longer_than_words_are_believed_calls_nobody_lost(tmp_path):
    """Its event loop is, as a SIGSTOP stops it: what workers said meanwhile is heard afterwards."""
    async with running_router(router_config(tmp_path, registry=RegistryConfig(ttl_s=0.8))) as running:
        prefill, decode = await running.cluster.pools(1, 1)
        changes = []
        running.router._registry.subscribe(changes.append)
        decode[0].faults.hold.clear()
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4}
        asked = asyncio.ensure_future(running.http.post("/v1/completions", json=body))
        async with asyncio.timeout(10):
            while not decode[0].attached:
                await asyncio.sleep(0.01)
        time.sleep(2.0)  # noqa: ASYNC251
        decode[0].faults.hold.set()
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert (len(prefill[0].seen), len(decode[0].attached), changes) == (1, 1, [])
        await asyncio.sleep(0.3)
        assert (await running.http.get("/health")).json()["ready"] == {"prefill": 1, "decode": 1}
        assert not changes
