"""What a worker tells of its prefix cache: every reader ends up knowing exactly what there is, however it reads."""

import asyncio
import random
from contextlib import aclosing, asynccontextmanager

import pytest

from contracts.block_hash import short_names
from contracts.clock import MonotonicClock
from contracts.errors import Draining, Overloaded
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from engine.config import EngineConfig, SchedulerConfig
from engine.driver import EngineDriver
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner
from engine.inline import inline
from worker import block_feed
from worker.block_feed import BlockFeed, Changes, Snapshot

MODEL = FakeModel(vocab_size=8, max_model_len=256)
BLOCK = MODEL.layout.block_size


@asynccontextmanager
async def fed(num_blocks=12):
    engine = Engine(
        FakeRunner(MODEL, num_blocks), EngineConfig(SchedulerConfig(max_num_batched_tokens=64)), MonotonicClock()
    )
    driver = EngineDriver(engine, lambda output: None, loop=inline(lambda output: 0.0))
    feed = BlockFeed(driver)
    driver.start()
    try:
        yield engine, driver, feed
    finally:
        await driver.stop()
        assert not driver.fatal.done()


class Reader:
    """Reads on and on, or only when it may."""

    def __init__(self, feed, *, reads=True):
        self.feed = feed
        self.known = None
        self.messages = []
        self.may_read = asyncio.Event()
        if reads:
            self.may_read.set()
        self.task = asyncio.create_task(self._read())

    async def _read(self):
        parts = []
        async with aclosing(self.feed.watch()) as messages:
            async for message in messages:
                self.messages.append(message)
                match message:
                    case Snapshot(blocks, more):
                        parts += blocks
                        if not more:
                            self.known, parts = set(parts), []
                    case Changes(stored, removed):
                        assert self.known is not None, "a snapshot comes first"
                        assert not self.known & set(stored)
                        assert self.known >= set(removed)
                        self.known = (self.known - set(removed)) | set(stored)
                await self.may_read.wait()

    async def leave(self):
        self.task.cancel()
        await asyncio.wait((self.task,))


async def compute(engine, driver, rng, times=1):
    """Requests of a few tokens of a tiny alphabet, some after each other: blocks are shared, and evicted."""
    for _ in range(times):
        prompt = tuple(rng.randrange(1, 3) for _ in range(BLOCK)) + tuple(rng.randrange(1, 8) for _ in range(BLOCK * 3))
        request = GenerationRequest(f"r{rng.random()}", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        await driver.call(lambda engine, request=request: engine.admit(request))
        async with asyncio.timeout(10):
            while await driver.call(lambda engine: engine.has_work):
                await asyncio.sleep(0)


async def settled():
    for _ in range(30):
        await asyncio.sleep(0)


def there_is(engine):
    return set(short_names(tuple(engine.block_news._names)))


@pytest.mark.parametrize("seed", range(4))
async def test_all_readers_know_what_there_is_whenever_they_came_and_however_they_read(seed):
    rng = random.Random(seed)
    async with fed() as (engine, driver, feed):
        readers = [Reader(feed)]
        for _ in range(25):
            await compute(engine, driver, rng)
            if rng.random() < 0.3:
                readers.append(Reader(feed, reads=rng.random() < 0.5))
            if rng.random() < 0.3:
                reader = rng.choice(readers)
                reader.may_read.clear() if reader.may_read.is_set() else reader.may_read.set()
            if rng.random() < 0.1:
                await readers.pop(rng.randrange(len(readers))).leave()
                readers = readers or [Reader(feed)]
        for reader in readers:
            reader.may_read.set()
        await settled()
        assert there_is(engine)
        assert [reader.known for reader in readers] == [there_is(engine)] * len(readers)
        for reader in readers:
            await reader.leave()


async def test_while_nobody_reads_the_engine_keeps_no_news():
    rng = random.Random(0)
    async with fed() as (engine, driver, feed):
        await compute(engine, driver, rng)
        assert engine.block_news._changes is None
        reader = Reader(feed)
        await settled()
        assert engine.block_news._changes is not None
        await reader.leave()
        await settled()
        assert feed.num_readers == 0
        assert engine.block_news._changes is None
        assert not feed._mirror


async def test_who_does_not_read_is_owed_a_snapshot_and_no_more_memory(monkeypatch):
    monkeypatch.setattr(block_feed, "_FEW", 4)
    rng = random.Random(0)
    async with fed() as (engine, driver, feed):
        await compute(engine, driver, rng, times=6)
        slow, quick = Reader(feed, reads=False), Reader(feed)
        await settled()
        most = 0
        for _ in range(40):
            await compute(engine, driver, rng)
            most = max([most, *(len(r.behind or ()) for r in feed._readers)])
        assert most <= 2 * engine._kv._pool.num_blocks
        slow.may_read.set()
        await settled()
        assert slow.known == quick.known == there_is(engine)
        assert [type(m) for m in slow.messages] == [Snapshot, Snapshot]
        assert [type(m) for m in quick.messages[:3]] == [Snapshot, Changes, Changes]
        for reader in (slow, quick):
            await reader.leave()


async def test_large_snapshots_and_changes_come_in_parts(monkeypatch):
    monkeypatch.setattr(block_feed, "MAX_NAMES", 3)
    rng = random.Random(1)
    async with fed(num_blocks=10) as (engine, driver, feed):
        await compute(engine, driver, rng, times=5)
        reader = Reader(feed)
        await settled()
        assert [len(m.blocks) for m in reader.messages] == [3, 3, 3, 1]
        assert [m.more for m in reader.messages] == [True, True, True, False]
        assert reader.known == there_is(engine)
        await compute(engine, driver, rng, times=2)
        await settled()
        assert all(len(m.stored) + len(m.removed) <= 3 for m in reader.messages[4:])
        assert reader.known == there_is(engine)
        await reader.leave()


async def test_there_is_an_end_to_readers(monkeypatch):
    monkeypatch.setattr(block_feed, "MAX_READERS", 1)
    async with fed() as (_, _, feed):
        reader = Reader(feed)
        await settled()
        with pytest.raises(Overloaded, match="1 readers"):
            await anext(feed.watch())
        feed.close()
        await reader.task
        assert reader.known == set()
        with pytest.raises(Draining):
            await anext(feed.watch())
