"""Several routers on one Redis: one set of workers, whoever they spoke to, whatever becomes of Redis meanwhile."""

import asyncio
import contextlib
import time

import grpc
import pytest
import redis

from contracts.clock import MonotonicClock
from contracts.errors import ConfigError
from contracts.pb.diptych.v1 import decode_pb2_grpc
from contracts.worker import WorkerKind
from engine.build import ModelRuntimeConfig
from registry import keys
from registry.client import RedisRegistryClient, begin_life
from registry.config import LeaseConfig, RedisConfig, parse_redis_url
from registry.link import RedisLink, check_credentials
from router.config import LimitsConfig, RegistryConfig
from router.main import serve
from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE
from rpc.channel import open_channel
from tests.identities import Identities
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.scripted_workers import ScriptedDecode
from tests.integration.slow_redis import SlowRedis
from tests.redis_process import RedisProcess, require_redis_server
from worker.config import WorkerConfig
from worker.registration import Registration

TTL_S, QUIET = 1.5, 0.9
QUICK = {
    "connect_timeout_s": 1.0,
    "command_timeout_s": 0.5,
    "check_s": 0.1,
    "min_backoff_s": 0.02,
    "max_backoff_s": 0.1,
}


def quick(url):
    return RedisConfig(parse_redis_url(url), **QUICK)


class Deployment:
    """Routers on one Redis, and scripted workers that announce themselves there."""

    def __init__(self, url, tmp_path, stack):
        self.url, self.tmp_path, self.stack = url, tmp_path, stack
        self.routers = []
        self.link = RedisLink(quick(url), MonotonicClock())

    async def router(self, url=None):
        redis = quick(url or self.url)
        limits = LimitsConfig(requests_per_minute=100_000)
        config = router_config(self.tmp_path, registry=RegistryConfig(TTL_S, QUIET), redis=redis, limits=limits)
        running = await self.stack.enter_async_context(running_router(config))
        running.cluster.registry_client = lambda: RedisRegistryClient(self.link, LeaseConfig(TTL_S))
        self.routers.append(running)
        return running

    async def decode(self, worker_id, epoch=1):
        return await self.routers[0].cluster.add(WorkerKind.DECODE, worker_id, epoch)


@contextlib.asynccontextmanager
async def deployment(url, tmp_path, num_routers=2):
    async with contextlib.AsyncExitStack() as stack:
        made = Deployment(url, tmp_path, stack)
        made.link.start()
        stack.push_async_callback(made.link.close)
        for _ in range(num_routers):
            await made.router()
        yield made


@pytest.fixture
async def two(redis_process, tmp_path):
    async with deployment(redis_process.url, tmp_path) as made:
        for running in made.routers:
            await heard(running, "ok")
        yield made


async def health(running):
    return (await running.http.get("/health")).json()


async def heard(running, registry, limit_s=10.0):
    """Until /health says so of the registry."""
    async with asyncio.timeout(limit_s):
        while not (await health(running))["registry"].startswith(registry):
            await asyncio.sleep(0.02)


async def ready(running, number, limit_s=10.0):
    """How long it took until the router would choose from so many decode workers."""
    began = time.monotonic()
    async with asyncio.timeout(limit_s):
        while (await health(running))["ready"]["decode"] != number:
            await asyncio.sleep(0.01)
    return time.monotonic() - began


async def ask(running, number=1):
    body = {"model": MODEL, "prompt": "It is", "max_tokens": 4, "seed": 3}
    answers = await asyncio.gather(*(running.http.post("/v1/completions", json=body) for _ in range(number)))
    assert [answer.status_code for answer in answers] == [200] * number, [a.text for a in answers]


async def test_a_worker_joins_everywhere_at_once_and_leaves_so(two):
    first, second = two.routers
    worker = await two.decode("d0")
    for running in two.routers:
        assert await ready(running, 1) < 1.0
        await ask(running)
    assert len(worker.seen) == 2
    over_grpc = await over_a_routers_door(second, "d1")
    for running in two.routers:
        assert await ready(running, 2) < 1.0, "it spoke to one router, and is known to both"
    await ask(first, 8)
    assert over_grpc.seen
    await worker.stop(leave=True)
    for running in two.routers:
        assert await ready(running, 1) < 1.0
    await over_grpc.stop(leave=True)
    for running in two.routers:
        assert await ready(running, 0) < 1.0


async def over_a_routers_door(running, worker_id):
    running.cluster.__dict__.pop("registry_client", None)  # as a worker without --registry does
    return await running.cluster.add(WorkerKind.DECODE, worker_id)


async def test_a_worker_that_falls_silent_is_lost_everywhere(two):
    worker = await two.decode("d0")
    for running in two.routers:
        await ready(running, 1)
    await worker.mute()
    for running in two.routers:
        assert await ready(running, 0) < TTL_S + 2


async def test_a_router_that_comes_later_knows_the_workers_of_before(two):
    await two.decode("d0")
    third = await two.router()
    assert await ready(third, 1) < 1.0


async def test_another_database_is_another_deployment(two, redis_process):
    apart = await two.router(redis_process.url.removesuffix("0") + "1")
    await heard(apart, "ok")
    await two.decode("d0")
    await ready(two.routers[0], 1)
    await asyncio.sleep(0.3)  # words enough, and channels are the same in all databases of a Redis
    assert (await health(apart))["ready"]["decode"] == 0


async def test_a_farewell_says_how_many_others_can_take_the_work(two, redis_process):
    first, second = await two.decode("d0"), await two.decode("d1")
    await two.routers[0].cluster.add(WorkerKind.PREFILL, "p0")
    for worker, others in ((first, 1), (second, 0)):
        await worker.mute()
        assert await worker.announcer.leave() == others
    assert await second.announcer.leave() == 0, "once more is no harm"


@pytest.mark.parametrize("how", ["killed", "hung"])
async def test_while_redis_is_away_the_last_known_workers_are_used_and_one_that_dies_is_not(two, redis_process, how):
    alive, dying = await two.decode("d0"), await two.decode("d1")
    for running in two.routers:
        await ready(running, 2)
        await ask(running, 4)
    redis_process.kill() if how == "killed" else redis_process.pause()
    for running in two.routers:
        await heard(running, "away: ")
    await asyncio.sleep(1.3 * TTL_S)
    for running in two.routers:
        assert (await health(running))["ready"]["decode"] == 2, "nobody can be heard, so silence means nothing"
        assert (await health(running))["status"] == "ok"
        assert "the registry is away" in running.router._health.troubles()  # on the dashboard
        assert await running.metric("diptych_registry_up") == 0
        await ask(running, 4)
    await dying.stop()
    for running in two.routers:
        await ready(running, 1)
    seen = len(alive.seen)
    await ask(two.routers[0], 4)
    assert len(alive.seen) == seen + 4
    redis_process.start() if how == "killed" else redis_process.resume()
    for running in two.routers:
        await heard(running, "ok")
        assert (await health(running))["ready"]["decode"] == 1
        assert await running.metric("diptych_registry_up") == 1
    await asyncio.sleep(1.2 * TTL_S)
    for running in two.routers:
        assert (await health(running))["ready"]["decode"] == 1, "it has registered again by itself"
    await two.decode("d2")
    for running in two.routers:
        assert await ready(running, 2) < 1.0


async def test_a_worker_joins_at_a_routers_door_while_redis_is_away_and_is_everywhere_when_it_is_back(
    two, redis_process
):
    first, second = two.routers
    await two.decode("d0")
    for running in two.routers:
        await ready(running, 1)
    redis_process.kill()
    for running in two.routers:
        await heard(running, "away: ")
    came, went = await over_a_routers_door(first, "d1"), await first.cluster.add(WorkerKind.DECODE, "d2")
    assert await ready(first, 3) < 1.0
    await ask(first, 8)
    assert came.seen, "it gets traffic at once"
    assert (await health(second))["ready"]["decode"] == 1, "nobody can have told it"
    await went.stop(leave=True)
    assert await ready(first, 2) < 1.0, "and it leaves so"
    redis_process.start()
    for running in two.routers:
        await heard(running, "ok")
        await ready(running, 2)
    await asyncio.sleep(1.2 * TTL_S)
    seen = len(came.seen)
    for running in two.routers:
        assert (await health(running))["ready"]["decode"] == 2
        await ask(running, 8)
    assert len(came.seen) > seen


async def test_who_took_a_name_at_a_door_while_redis_was_away_loses_it_to_who_has_it_there(two, redis_process):
    (first, second) = two.routers
    redis_process.kill()
    for running in two.routers:
        await heard(running, "away: ")
    here, there = await over_a_routers_door(first, "d0"), await over_a_routers_door(second, "d0")
    for running in two.routers:
        assert await ready(running, 1) < 1.0
    redis_process.start()
    for running in two.routers:
        await heard(running, "ok")
    await asyncio.sleep(1.2 * TTL_S)
    tables = [running.router._registry.workers() for running in two.routers]
    addresses = {worker.info.address for table in tables for worker in table}
    assert len(addresses) == 1, "one of them, at both"
    assert addresses < {here.info.address, there.info.address}
    for running in two.routers:
        assert (await health(running))["ready"]["decode"] == 1
        await ask(running)


async def test_a_connection_that_broke_while_redis_is_away_is_used_again_when_it_stands_again(two, redis_process):
    worker = await two.decode("d0")
    for running in two.routers:
        await ready(running, 1)
        await ask(running)
    redis_process.kill()
    for running in two.routers:
        await heard(running, "away: ")
    await worker.server.stop(0)
    for running in two.routers:
        await ready(running, 0)
    worker.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    decode_pb2_grpc.add_DecodeServicer_to_server(ScriptedDecode(worker), worker.server)
    worker.server.add_insecure_port(worker.info.address)
    await worker.server.start()
    for running in two.routers:
        await ready(running, 1)
        await ask(running)
    redis_process.start()
    for running in two.routers:
        await heard(running, "ok")
        await ask(running)


async def test_a_redis_that_forgets_everything_or_takes_no_writes_loses_no_worker(two, redis_process):
    await two.decode("d0")
    for running in two.routers:
        await ready(running, 1)
    redis_process.command("FLUSHALL")
    await asyncio.sleep(0.3)
    assert redis_process.command("EXISTS", keys.worker("d0")), "it has told it again"
    redis_process.command("CONFIG", "SET", "min-replicas-to-write", "1")
    for running in two.routers:
        await heard(running, "away: ")
    await asyncio.sleep(1.5 * TTL_S)
    for running in two.routers:
        assert (await health(running))["ready"]["decode"] == 1
        await ask(running)
    redis_process.command("CONFIG", "SET", "min-replicas-to-write", "0")
    for running in two.routers:
        await heard(running, "ok")
        await ask(running)


async def test_a_slow_redis_costs_requests_no_time(redis_process, tmp_path):
    async with SlowRedis(redis_process.port) as slow, deployment(slow.url, tmp_path, 1) as made:
        (running,) = made.routers
        await heard(running, "ok")
        await made.decode("d0")
        await ready(running, 1)
        slow.late_s = 0.1
        for _ in range(5):
            began = time.monotonic()
            await ask(running, 10)
            assert time.monotonic() - began < 2.0, "far is not away, and nobody waits"
            assert (await health(running))["registry"] == "ok"
        slow.late_s = 3.0
        await heard(running, "away: ")
        await asyncio.sleep(1.5 * TTL_S)
        began = time.monotonic()
        await ask(running, 4)
        assert time.monotonic() - began < 3.0, "nobody waits for it"
        slow.late_s = 0.0
        await heard(running, "ok")
        await ask(running)


async def test_a_router_that_starts_while_redis_is_away_waits_and_says_so(redis_process, tmp_path, caplog):
    redis_process.kill()
    async with deployment(redis_process.url, tmp_path, 1) as made:
        (running,) = made.routers
        await heard(running, "away: ")
        report = await health(running)
        assert report["status"] == "unavailable"
        assert report["missing"]
        async with asyncio.timeout(10):
            while "redis is away; going on without it" not in caplog.text:
                await asyncio.sleep(0.02)
        redis_process.start()
        await heard(running, "ok")
        await made.decode("d0")
        await ready(running, 1)
        await ask(running)


HOSTILE = (
    ("SET", keys.WORKERS, "not a set"),
    ("SADD", keys.WORKERS, "x", b"\xff\x00", "y" * 5000),
    ("SET", keys.worker("x"), "not a hash"),
    ("HSET", keys.worker("x"), "epoch", "many", "word", b"\xff\xff\xff", "ttl", "1e9"),
    ("HSET", keys.worker("x"), "epoch", "-1", "left", "1"),
    ("HSET", keys.worker("x"), "epoch", "9" * 400, "word", "z" * 100_000, "ttl", "9" * 400),
    ("HSET", keys.worker("x"), "epoch", "9" * 5000, "left", "1"),
    ("HSET", keys.worker("x"), "epoch", "7", "word", b"\x0a", "ttl", "9" * 5000),
    ("HSET", keys.worker("d0"), "epoch", "9" * 5000, "address", "h:1"),
    ("HSET", keys.worker("d0"), "epoch", "nan", "address", "h:1", "left", "1"),
    ("SET", keys.LAYOUT, b"\xff"),
    ("SADD", keys.LAYOUT, "not a string"),
    ("HSET", keys.worker("d0"), "epoch", "x", "address", b"\xff"),
    ("SET", keys.worker("d0"), "not a hash"),
    ("SET", keys.epoch("d0"), "not a number"),
    ("PUBLISH", keys.ANNOUNCED, b"\xff\xff\xff"),
    ("PUBLISH", keys.ANNOUNCED, b""),
    ("PUBLISH", keys.ANNOUNCED, "z" * 1_000_000),
    ("PUBLISH", keys.LEFT, b"\xff"),
    ("PUBLISH", keys.LEFT, b""),
)


async def test_damaged_values_cost_a_line_in_the_log_and_a_count_but_no_worker(two, redis_process, caplog):
    await two.decode("d0")
    for running in two.routers:
        await ready(running, 1)
    for words in HOSTILE:
        if words[0] != "PUBLISH":
            redis_process.command("DEL", words[1])
        redis_process.command(*words)
        await asyncio.sleep(0.12)  # a word of the worker
        for running in two.routers:
            assert await ready(running, 1) < 5.0, words[:2]  # at once, but where the worker itself is too slow to speak
    await asyncio.sleep(1.1)  # a look
    await two.decode("d1")
    for running in two.routers:
        await ready(running, 2)
        await ask(running)
        assert await running.metric("diptych_registry_refused_words_total") >= 4
        await heard(running, "ok")
    refusals = [record for record in caplog.records if record.getMessage() == "a word in redis is refused"]
    assert 2 <= len(refusals) <= 4, "now and then, not each time"


async def test_lives_begin_in_redis_and_are_never_mixed_up_though_it_forgets(redis_process):
    link = RedisLink(quick(redis_process.url), MonotonicClock())
    waiting = asyncio.ensure_future(begin_life(link, "w", MonotonicClock()))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "no Redis yet"
    link.start()
    epochs = [(await waiting).epoch]
    for spoil in (None, None, ("FLUSHALL",), ("SET", keys.epoch("w"), "x"), ("SET", keys.epoch("w"), 2**63 - 1)):
        if spoil is not None:
            await asyncio.sleep(0.005)
            redis_process.command(*spoil)
        epochs.append((await begin_life(link, "w", MonotonicClock())).epoch)
    assert epochs == sorted(set(epochs))
    assert epochs[0] > 1_700_000_000_000, "of the size of those that workers without a Redis take"
    await link.close()


async def test_credentials_and_how_their_refusal_is_told(tmp_path, caplog):
    require_redis_server()
    caplog.set_level("DEBUG")
    process = RedisProcess(tmp_path, "--requirepass", "sesame-opens")
    process.start()
    try:
        right = process.url.replace("//", "//:sesame-opens@")
        async with deployment(right, tmp_path, 1) as made:
            await heard(made.routers[0], "ok")
            await heard(await made.router(process.url), "away: Authentication required")
            await heard(
                await made.router(process.url.replace("//", "//:wrong-pass@")), "away: invalid username-password"
            )
            may_not = ("ACL", "SETUSER", "half", "on", ">pw", "~*", "+@all", "-subscribe")
            redis.Redis(port=process.port, password="sesame-opens").execute_command(*may_not)
            half = await made.router(process.url.replace("//", "//half:pw@"))
            await heard(half, "away: this user has no permissions to run the 'subscribe' command")
    finally:
        process.kill()
    logged = "".join(str(record.__dict__) for record in caplog.records)
    assert "sesame-opens" not in logged
    assert "wrong-pass" not in logged


@pytest.mark.parametrize(
    ("credentials", "said"),
    [
        ("", "Authentication required"),
        (":wrong-pass@", "invalid username-password"),
        ("nobody:pw@", "invalid username"),
    ],
)
async def test_who_starts_with_wrong_credentials_ends_and_says_so(tmp_path, credentials, said):
    require_redis_server()
    process = RedisProcess(tmp_path, "--requirepass", "sesame-opens")
    url = quick(process.url.replace("//", f"//{credentials}"))
    worker = WorkerConfig(worker_id="d", model_name="m", model=ModelRuntimeConfig(tmp_path), redis=url)
    registration = Registration(worker, MonotonicClock(), open_channel)
    await registration.check()  # nobody is there: Redis may come
    living = asyncio.ensure_future(registration.begin_life())
    process.start()
    try:
        for refused in (registration.check(), serve(router_config(tmp_path, redis=url)), living):
            async with asyncio.timeout(10):
                with pytest.raises(ConfigError, match=said) as caught:
                    await refused
            assert "--registry-password-file" in caught.value.message
            assert "wrong-pass" not in caught.value.message
        right = quick(process.url.replace("//", "//:sesame-opens@"))
        await check_credentials(right, MonotonicClock())
    finally:
        await registration.close()
        process.kill()


async def test_over_tls(tmp_path):
    require_redis_server()
    folder = Identities(tmp_path).issue("redis")
    ca, cert, key = (str(folder / name) for name in (CA_FILE, CERT_FILE, KEY_FILE))
    process = RedisProcess(tmp_path, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca, tls=True)
    process.start()
    try:
        url = process.url.replace("redis://", "rediss://")
        client = f"ssl_ca_certs={ca}&ssl_certfile={cert}&ssl_keyfile={key}"
        async with deployment(f"{url}?{client}", tmp_path, 1) as made:
            await heard(made.routers[0], "ok")
            await made.decode("d0")
            await ready(made.routers[0], 1)
            unknown = await made.router(url)
            async with asyncio.timeout(10):
                while "certificate verify failed" not in (await health(unknown))["registry"]:
                    await asyncio.sleep(0.02)
    finally:
        process.kill()


async def test_over_tls_a_server_with_another_name_is_not_believed(tmp_path):
    require_redis_server()
    folder = Identities(tmp_path).issue("redis", names=("redis.example",))
    ca, cert, key = (str(folder / name) for name in (CA_FILE, CERT_FILE, KEY_FILE))
    files = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca, "--tls-auth-clients", "no")
    process = RedisProcess(tmp_path, *files, tls=True)
    process.start()
    url = f"{process.url.replace('redis://', 'rediss://')}?ssl_ca_certs={ca}"
    link = RedisLink(quick(url), MonotonicClock())
    link.start()
    try:
        async with asyncio.timeout(10):
            while "certificate is not valid for '127.0.0.1'" not in link.presence.problem:
                await asyncio.sleep(0.02)
    finally:
        await link.close()
        process.kill()
