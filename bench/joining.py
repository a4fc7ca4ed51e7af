"""How soon a real worker that joins a busy cluster computes for its users: from its own word "serving" to its first step.

    2 routers, 1 prefill + 1 decode worker, requests through one router all the while
    another worker starts ──"serving" in its log──▶ announces itself ──▶ is known, chosen, asked ──▶ its first step        time

once for each pool and each router, with the registry in Redis and with the embedded one. Policies are round robin, so that the
time is the registry's and not a policy's liking for who has something cached. Does not know statistics.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.cluster import HOST, START_TIMEOUT_S, ClusterDidNotStart, free_ports, stop_child
from bench.redis_server import RedisServer

_STEPS = re.compile(rb"^diptych_engine_step_seconds_count (\S+)$", re.MULTILINE)
_STREAMS = 2
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Joiner:
    """Where processes of one cluster are told to go."""

    model: Path
    folder: Path
    worker_flags: tuple[str, ...]
    urls: tuple[str, ...]  # of the routers

    def worker(self, kind: str, name: str) -> tuple[subprocess.Popen[bytes], Path, str]:
        """Started: the process, its log, its metrics."""
        (port,) = free_ports(1)
        flags = ["--threads", "1", "--kv-memory", "64MiB", "--worker-id", name, "--metrics-port", str(port)]
        log = self.folder / f"{name}.log"
        return (
            _started([kind, *_model(self.model), *flags, *self.worker_flags], log),
            log,
            f"http://{HOST}:{port}/metrics",
        )


async def joins(model: Path, *, shared: bool) -> dict[str, float]:
    """Seconds for each pool and router; `shared`: with a Redis. Raises ClusterDidNotStart."""
    found = {}
    async with _cluster(model, shared=shared) as joiner:
        for index, url in enumerate(joiner.urls):
            async with _load(url, _name(model)):
                for kind in ("prefill", "decode"):
                    found[f"{kind} worker, router {index + 1}"] = await _join(joiner, kind, f"{kind}-{index + 1}")
    return found


async def _join(joiner: Joiner, kind: str, name: str) -> float:
    child, log, metrics = joiner.worker(kind, name)
    try:
        async with asyncio.timeout(START_TIMEOUT_S), httpx.AsyncClient() as client:
            while b"serving" not in log.read_bytes():
                _alive(child, log)
                await asyncio.sleep(_POLL_S)
            began = time.perf_counter()
            while True:
                page = (await client.get(metrics)).content
                steps = _STEPS.search(page)
                if steps is not None and float(steps[1]) > 0:
                    return time.perf_counter() - began
                await asyncio.sleep(_POLL_S)
    finally:
        await asyncio.to_thread(stop_child, child)


@asynccontextmanager
async def _cluster(model: Path, *, shared: bool) -> AsyncIterator[Joiner]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        registry: tuple[str, ...] = ()
        if shared:
            server = RedisServer(str(folder))
            stack.callback(server.kill)
            server.start()
            registry = ("--registry", server.address.url)
        ports = free_ports(4)
        urls = tuple(f"http://{HOST}:{port}" for port in ports[:2])
        for index, (http, grpc) in enumerate(zip(ports[:2], ports[2:], strict=True)):
            doors = ["--http-port", str(http), "--grpc-port", str(grpc), "--disaggregate", "always"]
            policies = ["--prefill-policy", "round_robin", "--decode-policy", "round_robin"]
            router = _started(["router", *_model(model), *doors, *policies, *registry], folder / f"router-{index}.log")
            stack.callback(stop_child, router)
        routers = tuple(flag for port in ports[2:] for flag in ("--router", f"{HOST}:{port}"))
        joiner = Joiner(model, folder, registry or routers, urls)
        for kind in ("prefill", "decode"):
            child, log, _ = joiner.worker(kind, f"{kind}-0")
            stack.callback(stop_child, child)
            await _served(joiner.urls, kind, child, log)
        yield joiner


@asynccontextmanager
async def _load(url: str, model: str) -> AsyncIterator[None]:
    """Requests without a pause."""

    async def ask(client: httpx.AsyncClient, stream: int) -> None:
        body = {"model": model, "prompt": [10 + stream, 20, 30], "max_tokens": 4, "ignore_eos": True}
        while True:
            (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()

    async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as group:
        asking = [group.create_task(ask(client, stream)) for stream in range(_STREAMS)]
        yield
        for task in asking:
            task.cancel()


async def _served(urls: Sequence[str], kind: str, child: subprocess.Popen[bytes], log: Path) -> None:
    """Until every router counts a worker of this pool as ready."""
    async with asyncio.timeout(START_TIMEOUT_S), httpx.AsyncClient() as client:
        waiting = list(urls)
        while waiting:
            _alive(child, log)
            try:
                if (await client.get(f"{waiting[0]}/health")).json()["ready"][kind]:
                    waiting.pop(0)
                    continue
            except httpx.TransportError as error:  # it does not listen yet
                if child.poll() is not None:
                    raise ClusterDidNotStart(f"{waiting[0]} does not answer") from error
            await asyncio.sleep(0.1)


def _alive(child: subprocess.Popen[bytes], log: Path) -> None:
    if child.poll() is not None:
        raise ClusterDidNotStart(f"a process has ended; {log.read_text(errors='replace')[-2000:]}")


def _name(model: Path) -> str:
    return model.resolve().name


def _model(model: Path) -> list[str]:
    return ["--model", str(model), "--served-name", _name(model)]


def _started(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "cli", arguments[0], "--exit-with", str(os.getpid()), *arguments[1:]]
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
