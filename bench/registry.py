"""What the shared registry costs, and how soon a worker is known: real Redis, as many tables as there would be routers.

    a worker joins ──announce──▶ Redis ──message──▶ every router's table has it           time, slowest router
    N workers known ──look──▶ one script reads all leases                                 time, as Redis is busy with it
    N workers announce ──▶ Redis, and every router reads the message                      CPU of Redis and of a router a word
    Redis killed, started again ──▶ every router says that the registry is there           time
    a real worker joins a busy cluster ──▶ its first step for a user (`bench.joining`)     time

Workers are words without a process, but for the last. Does not know requests.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.joining import joins
from bench.progress import Say
from bench.redis_server import RedisServer
from bench.report import Measure, Report, Verdict
from bench.stats import percentile
from contracts.clock import MonotonicClock
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from registry import keys, scripts
from registry.client import RedisRegistryClient
from registry.config import LeaseConfig, RedisConfig
from registry.link import RedisLink
from router.config import RegistryConfig
from router.workers.redis_registry import RedisRegistry

_LAYOUT = KVLayout("bench", "bfloat16", 30, 3, 64, 16)
_TTL_S = 60.0
_TRAFFIC = "from serving to its first step:"


@dataclass(frozen=True, slots=True)
class RegistryBenchConfig:
    """Sizes. A join is measured `joins` times a round; looks and words with each number of `crowds`."""

    rounds: int = 5
    num_routers: int = 4
    joins: int = 50
    crowds: tuple[int, ...] = (100, 1000)
    words: int = 2000
    looks: int = 20
    join_rounds: int = 3  # of real workers: eight of them each


@dataclass(slots=True)
class _Deployment:
    server: RedisServer
    link: RedisLink
    client: RedisRegistryClient
    registries: list[RedisRegistry]

    async def known(self, number: int) -> None:
        """Until every router knows so many workers."""
        while any(len(registry.workers()) != number for registry in self.registries):
            await asyncio.sleep(0)

    async def there(self) -> None:
        """Until every router says that the registry is there."""
        while any(registry.problem for registry in self.registries):
            await asyncio.sleep(0.001)


def run_registry(config: RegistryBenchConfig, model: Path, say: Say) -> Report:
    """Four minutes. Raises ConfigError where there is no redis-server, ClusterDidNotStart."""
    found: dict[str, list[float]] = {}
    for index in range(config.rounds):
        say(f"registry: round {index + 1} of {config.rounds}")
        for name, value in uvloop.run(_round(config)).items():
            found.setdefault(name, []).append(value)
    for index in range(config.join_rounds):
        for shared, where in ((True, "Redis"), (False, "embedded registry")):
            say(f"registry: real workers join, {where}, round {index + 1} of {config.join_rounds}")
            for name, took_s in asyncio.run(joins(model, shared=shared)).items():
                found.setdefault(f"{_TRAFFIC} {where}, {name}, s", []).append(took_s)
    units = {name: name.rpartition(", ")[2] for name in found}
    measures = tuple(Measure(name.rpartition(", ")[0], units[name], tuple(runs)) for name, runs in found.items())
    slowest = max(found["a worker joins: known to all routers, p99, ms"])
    first = max(max(runs) for name, runs in found.items() if name.startswith(_TRAFFIC))
    back = max(found["Redis killed and back: all routers hear again, s"])
    return Report(
        name="registry",
        title=f"A registry in Redis, {config.num_routers} routers",
        command="python -m bench registry",
        method=f"{config.joins} joins a round; the routers' tables share one process and its event loop.",
        measures=measures,
        verdicts=(
            Verdict("a joined worker is known to all routers, p99 of the worst round", slowest, "ms", 1000, False),
            Verdict("a worker that joins a busy cluster computes for it, slowest", first, "s", 1, False),
            Verdict("routers hear again after Redis is back, worst round", back, "s", 2, False),
        ),
    )


async def _round(config: RegistryBenchConfig) -> dict[str, float]:
    found: dict[str, float] = {}
    async with _deployed(config.num_routers) as made:
        joins = await _joins(made, config.joins)
        found["a worker joins: known to all routers, p50, ms"] = percentile(joins, 50) * 1e3
        found["a worker joins: known to all routers, p99, ms"] = percentile(joins, 99) * 1e3
        for crowd in config.crowds:
            infos = [_info(f"crowd-{i}") for i in range(crowd)]
            for info in infos:
                await made.client.announce(info, WorkerLoad())
            found[f"a look at {crowd} workers, ms"] = await _look_ms(made, config.looks)
            redis_us, routers_us = await _word_us(made, infos, config.words)
            found[f"a word among {crowd} workers, CPU of Redis, µs"] = redis_us
            found[f"a word among {crowd} workers, CPU of worker and {config.num_routers} routers, µs"] = routers_us
        found["Redis killed and back: all routers hear again, s"] = await _back_s(made)
    return found


@asynccontextmanager
async def _deployed(num_routers: int) -> AsyncIterator[_Deployment]:
    async with AsyncExitStack() as stack:
        server = RedisServer(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(server.kill)
        server.start()
        config = RedisConfig(server.address, command_timeout_s=5.0)
        link = RedisLink(config, MonotonicClock())
        stack.push_async_callback(link.close)
        registries = []
        for _ in range(num_routers):
            its = RedisLink(RedisConfig(server.address), MonotonicClock())
            registry = RedisRegistry(its, RegistryConfig(_TTL_S), "bench", MonotonicClock())
            stack.push_async_callback(its.close)
            stack.push_async_callback(registry.close)
            its.start()
            registry.start()
            registries.append(registry)
        link.start()
        await link.presence.wait_up()
        made = _Deployment(server, link, RedisRegistryClient(link, LeaseConfig(_TTL_S)), registries)
        await made.there()
        yield made


async def _joins(made: _Deployment, number: int) -> list[float]:
    took = []
    for index in range(number):
        info = _info(f"join-{index}")
        began = time.perf_counter()
        await made.client.announce(info, WorkerLoad())
        await made.known(1)
        took.append(time.perf_counter() - began)
        await made.client.leave(info.ref)
        await made.known(0)
    return took


async def _look_ms(made: _Deployment, number: int) -> float:
    args = (keys.WORKER, round(_TTL_S * 1e3))
    began = time.perf_counter()
    for _ in range(number):
        await made.link.script(scripts.LOOK, (keys.WORKERS, keys.router("bench")), args)
    return (time.perf_counter() - began) / number * 1e3


async def _word_us(made: _Deployment, infos: Sequence[WorkerInfo], number: int) -> tuple[float, float]:
    redis_s, ours_s = made.server.cpu_s(), time.process_time()
    for index in range(number):
        await made.client.announce(infos[index % len(infos)], WorkerLoad(num_running=index))
    return (made.server.cpu_s() - redis_s) / number * 1e6, (time.process_time() - ours_s) / number * 1e6


async def _back_s(made: _Deployment) -> float:
    made.server.kill()
    while not all(registry.problem for registry in made.registries):
        await asyncio.sleep(0.001)
    await asyncio.sleep(1.0)
    began = time.perf_counter()
    made.server.start()
    await made.there()
    took = time.perf_counter() - began
    await made.link.presence.wait_up()
    return took


def _info(worker_id: str) -> WorkerInfo:
    return WorkerInfo(WorkerRef(worker_id, 1), WorkerKind.DECODE, "h:1", "bench", _LAYOUT, ("shm", "tcp"), 8192, 1000)
