"""What Redis itself judges of workers' words, without any router; and what it tells whoever listens."""

import asyncio
from dataclasses import replace

import pytest

from contracts.clock import MonotonicClock
from contracts.errors import InvalidRequest, LayoutMismatch, StaleEpoch, Unavailable, WorkerIdTaken
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef, WorkerState
from registry import keys, wire
from registry.client import RedisRegistryClient
from registry.config import LeaseConfig, RedisConfig, parse_redis_url
from registry.link import RedisLink
from registry.subscription import Message, Signal, Subscription

LAYOUT = KVLayout("m", "float32", 1, 1, 8, 16)
BUSY = WorkerLoad(WorkerState.STALLED, 1, 2, 3, 0.5)


def info(worker_id="a", epoch=1, **changes):
    base = WorkerInfo(WorkerRef(worker_id, epoch), WorkerKind.DECODE, f"{worker_id}:1", "m", LAYOUT, ("shm",), 100, 10)
    return replace(base, **changes)


@pytest.fixture
async def client(redis_process):
    patient = RedisConfig(parse_redis_url(redis_process.url), command_timeout_s=5.0)
    link = RedisLink(patient, MonotonicClock())
    link.start()
    await link.presence.wait_up()
    made = RedisRegistryClient(link, LeaseConfig(ttl_s=30.0))
    yield made
    await link.close()


async def test_who_listens_hears_every_word_as_it_was_said(client):
    heard = Subscription(client._link, (keys.ANNOUNCED, keys.LEFT), MonotonicClock())
    assert await anext(heard) is Signal.LISTENING
    assert await client.announce(info(), BUSY) == 30.0
    await client.leave(info().ref)
    async with asyncio.timeout(5):
        announced, left = await anext(heard), await anext(heard)
    assert isinstance(announced, Message)
    assert wire.word_from_bytes(announced.data) == (info(), BUSY)
    assert (left.channel, wire.farewell_from_bytes(left.data)) == (keys.LEFT, info().ref)
    await heard.close()


async def test_a_name_has_one_living_holder_and_its_newest_life(client, redis_process):
    await client.announce(info(epoch=2), BUSY)
    with pytest.raises(WorkerIdTaken, match="a:1 has it and is alive, the one at b:1 wants it"):
        await client.announce(info(epoch=3, address="b:1"), BUSY)
    with pytest.raises(StaleEpoch, match="expected 2, got 1"):
        await client.announce(info(epoch=1), BUSY)
    redis_process.command("SET", keys.suspect("a"), "1")
    with pytest.raises(WorkerIdTaken):
        await client.announce(info(epoch=3, address="b:1"), BUSY)
    redis_process.command("SET", keys.suspect("a"), "2")
    await client.announce(info(epoch=3, address="b:1"), BUSY)
    assert redis_process.command("EXISTS", keys.suspect("a")) == 0


async def test_a_life_that_left_does_not_come_back_and_another_life_s_farewell_is_nothing(client):
    await client.announce(info(epoch=2), BUSY)
    for other in (1, 3):
        await client.leave(WorkerRef("a", other))
    await client.announce(info(epoch=2), BUSY)
    await client.leave(info(epoch=2).ref)
    for old in (1, 2):
        with pytest.raises(StaleEpoch, match="expected 3"):
            await client.announce(info(epoch=old), BUSY)
    await client.announce(info(epoch=3, address="elsewhere:1"), BUSY)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"model_name": "other"}, "model_name"), ({"layout": replace(LAYOUT, block_size=32)}, "block_size")],
)
async def test_all_have_one_layout_until_the_last_has_gone(client, redis_process, change, field):
    await client.announce(info("a"), BUSY)
    await client.announce(info("b"), BUSY)
    await client.leave(info("a").ref)
    with pytest.raises(LayoutMismatch) as caught:
        await client.announce(info("c", **change), BUSY)
    assert caught.value.field == field
    redis_process.command("DEL", keys.worker("b"))  # its lease is over
    await client.announce(info("c", **change), BUSY)
    await client.announce(info("c", 2), BUSY)  # alone, it may change
    with pytest.raises(LayoutMismatch):
        await client.announce(info("d", **change), BUSY)


async def test_a_layout_that_nobody_can_read_is_taken_away(client, redis_process):
    await client.announce(info("a"), BUSY)
    redis_process.command("SET", keys.LAYOUT, b"\xff")
    with pytest.raises(Unavailable, match="not readable"):
        await client.announce(info("b"), BUSY)
    await client.announce(info("b"), BUSY)


@pytest.mark.parametrize(
    ("spoilt", "field"),
    [
        (info("x" * 257), "worker_id"),
        (info("x\n"), "worker_id"),
        (info(epoch=2**53), "epoch"),
        (info(address="unix:/tmp/x"), "address"),
        (info(address="h:x"), "address"),
        (info(address=":1"), "address"),
        (info(address="h\n:1"), "address"),
        (info(connectors=("shm",) * 33), "connectors"),
    ],
)
async def test_what_no_worker_would_say_is_refused_by_field_on_both_sides(client, spoilt, field):
    with pytest.raises(InvalidRequest) as caught:
        await client.announce(spoilt, BUSY)
    assert caught.value.field.endswith(field)


@pytest.mark.parametrize("load", [replace(BUSY, kv_usage=float("nan")), replace(BUSY, decode_step_s=float("inf"))])
async def test_loads_are_numbers(client, load):
    with pytest.raises(InvalidRequest, match="must be a number"):
        await client.announce(info(), load)
