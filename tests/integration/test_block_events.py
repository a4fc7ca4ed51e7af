"""What workers tell of their prefix caches, over real gRPC into real routers: who follows whom, and what comes of it."""

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from contracts.block_hash import short_names
from contracts.clock import MonotonicClock
from contracts.pb.diptych.v1 import blocks_pb2, blocks_pb2_grpc
from contracts.pb.diptych.v1.types_pb2 import WorkerRef as WorkerRefPb
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from engine.config import SchedulerConfig
from engine.execution.fake import FakeModel
from router.config import PolicyConfig
from rpc.announce import AnnounceConfig, Announcer, GrpcRegistryClient
from tests.integration.pools import Setup, pools, until
from tests.integration.router_harness import MODEL, router_config, running_router

FAKE = FakeModel(vocab_size=1024, max_model_len=512, eos_token_ids=frozenset({1}))
SETUP = Setup(model=FAKE, num_prefill=2, num_decode=2, scheduler=SchedulerConfig(max_num_batched_tokens=64))
BLOCK = FAKE.layout.block_size
AWARE = PolicyConfig("prefix_aware", "prefix_aware")


def info_of(kind, served):
    return WorkerInfo(served.ref, kind, served.address, MODEL, FAKE.layout, ("local",), 512, 128)


class Served:
    """Some routers over the same workers; `leave` and `join` are of one worker."""

    def __init__(self, routers, workers, stack):
        self.routers = routers
        self.workers = workers
        self._stack = stack
        self._announcing = {}

    async def join(self, info, load):
        tasks = []
        for running in self.routers:
            client = GrpcRegistryClient(running.target)
            announcer = Announcer(client, info, load, MonotonicClock(), AnnounceConfig(interval_s=0.1))
            assert await announcer.announce_once()
            tasks.append(asyncio.create_task(announcer.run()))
            self._stack.push_async_callback(client.close)
            self._stack.callback(tasks[-1].cancel)
        self._announcing[info.ref] = tasks

    def silence(self, ref):
        for task in self._announcing.pop(ref):
            task.cancel()

    @property
    def indexes(self):
        return [running.router.placement.index for running in self.routers]


@asynccontextmanager
async def served(tmp_path, num_routers=1, setup=SETUP, policies=AWARE):
    async with AsyncExitStack() as stack:
        config = router_config(tmp_path, policies=policies)
        routers = [await stack.enter_async_context(running_router(config)) for _ in range(num_routers)]
        workers = await stack.enter_async_context(pools(setup))
        made = Served(routers, workers, stack)
        for kind, pool in ((WorkerKind.PREFILL, workers.prefill), (WorkerKind.DECODE, workers.decode)):
            for worker in pool:
                await made.join(info_of(kind, worker), worker.worker.load)
        for running in routers:
            await until(lambda running=running: len(running.router.placement.watch.followed) == len(made._announcing))
        yield made


async def has(served_worker):
    """The short names of all blocks that this worker's engine finds."""
    names = await served_worker.worker.driver.call(lambda engine: tuple(engine.block_news._names))
    return set(short_names(names))


async def agree(made):
    """Wait until every router knows of every worker exactly what its engine has."""
    for worker in (*made.workers.prefill, *made.workers.decode):
        names = await has(worker)
        for index in made.indexes:
            await until(lambda index=index, worker=worker, names=names: index.names(worker.ref) == names)


async def ask(running, prompt, **changes):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "seed": 7, "ignore_eos": True, "return_token_ids": True}
    body |= {"diptych": {"route": "disaggregated"}}
    response = await running.http.post("/v1/completions", json=body | changes)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def prompt_of(seed, num_tokens=80):
    rng = random.Random(seed)
    return [rng.randrange(2, 1000) for _ in range(num_tokens)]


async def test_every_turn_of_a_conversation_goes_where_its_blocks_are(tmp_path):
    """Six conversations at once: without the index half of their turns would go elsewhere, and find nothing."""
    async with served(tmp_path) as made:
        (running,) = made.routers

        async def converse(seed):
            prompt, num_asked_before = prompt_of(seed, 64), 0
            for turn in range(4):
                answer, cached = await ask(running, prompt, max_tokens=8)
                assert cached >= num_asked_before // BLOCK * BLOCK, (seed, turn)
                num_asked_before = len(prompt)
                prompt = [*prompt, *answer, *prompt_of(seed * 100 + turn, 24)]
                await asyncio.sleep(0.02)
            return prompt

        prompts = await asyncio.gather(*(converse(seed) for seed in range(6)))
        await agree(made)
        name = "diptych_prefix_index_hits_total"
        hits = {pool: await running.metric(name, pool=pool) for pool in ("prefill", "decode")}
        for prompt in prompts:  # nobody else is there now: at both pools they go where they were
            await ask(running, prompt)
        await agree(made)
        assert hits["prefill"] >= 18
        for pool in ("prefill", "decode"):
            assert await running.metric("diptych_prefix_index_lookups_total", pool=pool) == 30
            assert await running.metric(name, pool=pool) == hits[pool] + 6
            assert await running.metric("diptych_prefix_index_workers", pool=pool) == 2
            assert await running.metric("diptych_prefix_index_blocks", pool=pool) > 6 * 64 / BLOCK
        looked, found = [
            await running.metric(f"diptych_prefix_index_{what}_tokens_total", pool="prefill")
            for what in ("lookup", "hit")
        ]
        assert looked > found > looked / 3
        await made.workers.idle()


async def test_a_prefix_that_nobody_has_yet_is_computed_once_for_ten_at_once(tmp_path):
    """What was just sent counts before the worker tells of it."""
    async with served(tmp_path, setup=replace(SETUP, step_s=0.02)) as made:
        (running,) = made.routers
        system = prompt_of(1, 96)
        asking = []
        for user in range(10):
            asking.append(asyncio.create_task(ask(running, [*system, *prompt_of(100 + user, 4)])))
            await asyncio.sleep(0.01)
        await asyncio.gather(*asking)
        names = set(short_names(_chain(system)))
        have = [names <= await has(worker) for worker in made.workers.prefill]
        assert sorted(have) == [False, True]


def _chain(tokens):
    from contracts.block_hash import BlockHasher

    return BlockHasher(FAKE.layout.block_size, FAKE.layout.hash_seed).chain(tokens)


async def test_two_routers_know_the_same_of_all_workers(tmp_path):
    """Under requests of both and a pool so tight that blocks are evicted all the time."""
    tight = replace(SETUP, prefill_blocks=24, decode_blocks=24)
    async with served(tmp_path, num_routers=2, setup=tight) as made:
        for wave in range(3):
            asking = [ask(made.routers[seed % 2], prompt_of(wave * 10 + seed, 60)) for seed in range(8)]
            await asyncio.gather(*asking)
            await agree(made)
        first, second = made.indexes
        _, cached = await ask(made.routers[0], prompt_of(20, 60))
        _, elsewhere = await ask(made.routers[1], prompt_of(20, 60))
        assert cached <= elsewhere == 60 // BLOCK * BLOCK - (BLOCK if 60 % BLOCK == 0 else 0)
        assert {ref: first.names(ref) for ref in first.workers} == {ref: second.names(ref) for ref in second.workers}


async def test_the_next_life_of_a_worker_has_nothing_and_the_last_is_forgotten(tmp_path):
    async with served(tmp_path) as made:
        (running,), (index,) = made.routers, made.indexes
        for seed in range(4):
            await ask(running, prompt_of(seed))
        await agree(made)
        old = made.workers.prefill[0]
        assert index.size(old.ref) > 0
        async with pools(replace(SETUP, num_prefill=1, num_decode=0, epoch=2)) as again:
            made.silence(old.ref)
            await old.server.stop(0)
            new = again.prefill[0]
            assert new.ref == WorkerRef(old.ref.worker_id, 2)
            info = info_of(WorkerKind.PREFILL, new)

            async def joined():
                registry = GrpcRegistryClient(running.target)
                try:
                    return await Announcer(registry, info, new.worker.load, MonotonicClock()).announce_once()
                finally:
                    await registry.close()

            await until(joined)
            await until(lambda: info.ref in {one.ref for one in running.router.placement.watch.followed})
            assert old.ref not in index.workers
            assert index.size(new.ref) == 0
            assert not index.names(old.ref)


async def test_a_worker_that_is_lost_takes_its_entries_along(tmp_path):
    async with served(tmp_path) as made:
        (running,), (index,) = made.routers, made.indexes
        for seed in range(4):
            await ask(running, prompt_of(seed))
        await agree(made)
        for worker in made.workers.prefill:
            made.silence(worker.ref)
            await worker.server.stop(0)
        await until(lambda: all(worker.ref not in index.workers for worker in made.workers.prefill))
        assert index.num_names == len(set().union(*[index.names(w.ref) for w in made.workers.decode]))
        assert await running.metric("diptych_prefix_index_blocks", pool="prefill") == 0


async def test_a_stream_that_breaks_begins_again_with_all_there_is(tmp_path):
    async with served(tmp_path) as made:
        (running,), (index,) = made.routers, made.indexes
        await ask(running, prompt_of(1))
        watch = running.router.placement.watch
        worker = made.workers.prefill[0]
        # what a router misses while it does not listen
        index.replace(worker.ref, [1, 2, 3])
        await worker.worker.driver.call(lambda engine: engine.block_news.ignore())
        worker.worker.blocks._on_all(())  # the engine's own snapshot, asked for anew, would say the same
        await until(lambda: index.names(worker.ref) == set())
        assert len(watch.followed) == 4


async def test_another_life_is_refused_and_a_worker_that_drains_ends_the_stream(tmp_path):
    async with pools(SETUP) as workers:
        worker = workers.decode[0]
        stub = blocks_pb2_grpc.BlockEventsStub(worker.channel)
        ours = WorkerRefPb(worker_id=worker.ref.worker_id, epoch=worker.ref.epoch)
        stale = blocks_pb2.WatchRequest(worker=WorkerRefPb(worker_id=ours.worker_id, epoch=ours.epoch + 1))
        with pytest.raises(grpc.aio.AioRpcError, match="FAILED_PRECONDITION"):
            await anext(aiter(stub.Watch(stale)))
        stream = aiter(stub.Watch(blocks_pb2.WatchRequest(worker=ours)))
        first = await anext(stream)
        assert first.worker == ours
        assert first.number == 1
        assert first.WhichOneof("event") == "snapshot"
        assert not first.snapshot.blocks
        await worker.worker.drain(0.0)
        assert [message async for message in stream] == []
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await anext(aiter(stub.Watch(blocks_pb2.WatchRequest(worker=ours))))
