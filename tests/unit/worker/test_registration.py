"""A worker that nobody will hear of says so."""

import asyncio
import logging
from pathlib import Path

import pytest

from contracts.clock import VirtualClock
from contracts.errors import ConfigError
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from engine.build import ModelRuntimeConfig
from registry.config import RedisConfig, parse_redis_url
from rpc.channel import open_channel
from worker.config import WorkerConfig
from worker.registration import Registration

INFO = WorkerInfo(
    WorkerRef("d0", 1), WorkerKind.DECODE, "127.0.0.1:1", "m", KVLayout("m", "float32", 1, 1, 8, 16), ("tcp",), 64, 8
)


@pytest.mark.parametrize("routers", [(), ("127.0.0.1:1",)])
async def test_without_redis_a_life_begins_only_where_there_are_routers_to_turn_to(routers):
    clock = VirtualClock()
    config = WorkerConfig(
        worker_id="d0",
        model_name="m",
        model=ModelRuntimeConfig(Path("m")),
        routers=routers,
        redis=RedisConfig(parse_redis_url("redis://127.0.0.1:1/0")),
    )
    registration = Registration(config, clock, open_channel)
    beginning = asyncio.ensure_future(registration.begin_life())
    await clock.advance(2.0)
    assert not beginning.done(), "Redis may come"
    await clock.advance(2.0)
    assert beginning.done() is bool(routers)
    if routers:
        assert beginning.result().epoch > 1_700_000_000_000
    beginning.cancel()
    await registration.close()


@pytest.mark.parametrize("routers", [(), ("127.0.0.1:1",)])
async def test_a_worker_without_router_and_registry_says_so(routers, caplog):
    config = WorkerConfig(worker_id="d0", model_name="m", model=ModelRuntimeConfig(Path("m")), routers=routers)
    announcers = Registration(config, VirtualClock(), open_channel).announcers(INFO, WorkerLoad)
    assert len(announcers) == len(routers)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["known nowhere" in record.getMessage() for record in warned] == [True] * (not routers)
    for announcer in announcers:
        await announcer.leave()


@pytest.mark.parametrize(("flag", "value"), [("kv_transfer_dtype", "int4"), ("kv_staging_bytes", 0)])
def test_how_kv_travels_is_checked(flag, value):
    with pytest.raises(ConfigError, match=f"{flag}: got {value!r}, must be"):
        WorkerConfig(worker_id="d0", model_name="m", model=ModelRuntimeConfig(Path("m")), **{flag: value})
