"""The same with the `diptych` commands themselves, each a process of its own, behind proxies that only their flags make known."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from tests.integration.processes.checks import check_answered, check_whole_again
from tests.integration.processes.children import Child, Config
from tests.integration.processes.cluster import WORKERS, Cluster, Setup
from tests.integration.processes.moments import mid_decode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Patient(Cluster):
    """Commands import torch one by one, on a machine that has better to do."""

    patience_s = 120.0


class Commands:
    """Starts `diptych router | prefill | decode`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: set[asyncio.Task[None]] = set()

    async def start(self, name: str, config: Config) -> Child:
        """See Starter."""
        log = self._folder / f"{name}.log"
        argv = [sys.executable, "-P", "-m", "cli", *argv_of(config), "--log-level", "info"]
        with log.open("a") as out:
            process = await asyncio.create_subprocess_exec(*argv, stdout=out, stderr=out, cwd="/")
        child = Child(name, process.pid, log)
        waiting = asyncio.ensure_future(self._wait(process, child))
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)
        return child

    async def _wait(self, process: asyncio.subprocess.Process, child: Child) -> None:
        child.code = await process.wait()
        child.ended.set()


def argv_of(config: Config) -> list[str]:
    """The command line of a process."""
    if isinstance(config, RouterConfig):
        named = ["router", "--model", str(config.model_dir), "--served-name", config.model_name]
        ports = ["--http-port", str(config.http.port), "--grpc-port", str(config.grpc.port)]
        return [*named, *ports, "--disaggregate", config.disaggregation.mode.value]
    worker = config.worker
    argv = [
        *("prefill" if isinstance(config, PrefillConfig) else "decode", "--model", str(worker.model.model_dir)),
        *("--served-name", worker.model_name, "--worker-id", worker.worker_id, "--threads", "1"),
        *("--connector", *worker.connectors, "--kv-memory", str(worker.kv_memory_bytes)),
        *("--max-num-batched-tokens", str(worker.scheduler.max_num_batched_tokens)),
        *("--max-num-seqs", str(worker.scheduler.max_num_seqs)),
        *("--port", str(worker.server.port), "--advertise", worker.server.advertise),
        *("--kv-port", str(worker.network.port)),
        *("--advertise-kv", f"127.0.0.1:{worker.network.advertise_port}"),
        *("--metrics-port", str(worker.metrics_port)),
    ]
    routers = worker.routers or ("127.0.0.1:1",)  # the oracle's: nobody
    return [*argv, *(word for router in routers for word in ("--router", router))]


async def test_a_killed_decode_worker_and_a_drained_cluster(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        made = Patient(Setup("tcp"), Commands(tmp_path))
        stack.push_async_callback(made.end)
        await made.open(stack)
        scene = await mid_decode(made, "command decode", 160, seeded=True)
        made.children[scene.decode].signal(signal.SIGKILL)
        await made.children[scene.decode].ended.wait()
        scene.go_on()
        await check_answered(made, scene.victim)
        await check_whole_again(made, scene.victim)
        for name in (*WORKERS, "router"):
            made.children[name].signal(signal.SIGTERM)
        for name in (*WORKERS, "router"):
            await asyncio.wait_for(made.children[name].ended.wait(), 60)
            assert made.children[name].code == 0, made.logs()
