"""A real cluster to measure: router, prefill and decode worker as child processes, started by `diptych`'s own commands.

    with serving(model) as cluster:   # both ways through it answer
        … cluster.grpc, cluster.look() …
    # SIGTERM; returns when everything has ended

Started by command line, as services are, because `bench` stands below `cli`; the children end with this process whatever
happens to it. Does not know what is asked of the cluster.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import psutil

from bench.load import LoadFailed, LoadPlan, LoadRequest, Protocol, Route, carry_out

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.3
HOST = "127.0.0.1"
_STEP_SERIES = re.compile(rb"^diptych_engine_step_seconds_(sum|count) (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Look:
    """The cluster's counters at `at_s` of the monotonic clock: the decode worker's steps, CPU seconds by kind of process."""

    at_s: float
    num_steps: int
    step_s: float  # of all steps together
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class ServedProcess:
    """One process of the cluster; `metrics` is its /metrics URL."""

    kind: str  # router, prefill, decode
    pid: int
    metrics: str


@dataclass(frozen=True, slots=True)
class ServedCluster:
    """Where a running cluster is reached and what it runs as."""

    http: str
    grpc: str
    model: str
    processes: tuple[ServedProcess, ...]

    def look(self) -> Look:
        """Read the counters; a few milliseconds of the decode worker's time."""
        (decode,) = (p for p in self.processes if p.kind == "decode")
        page = httpx.get(decode.metrics).raise_for_status().content
        values = {name: float(value) for name, value in _STEP_SERIES.findall(page)}
        times = {p.kind: psutil.Process(p.pid).cpu_times() for p in self.processes}
        cpu_s = {kind: spent.user + spent.system for kind, spent in times.items()}
        return Look(time.monotonic(), int(values[b"count"]), values[b"sum"], cpu_s)


class ClusterDidNotStart(RuntimeError):
    """A process ended, or the cluster did not answer in time; carries its last words."""


class ModelSize(msgspec.Struct):
    """Of a model's config.json, what prompts are made from."""

    vocab_size: int


def vocab_size_of(model: Path) -> int:
    """Token ids of the model in directory `model` are below this."""
    return msgspec.json.decode((model / "config.json").read_bytes(), type=ModelSize).vocab_size


@contextmanager
def serving(
    model: Path,
    threads: int = 1,
    worker_flags: Sequence[str] = (),
    way: str = "always",
    router_flags: Sequence[str] = (),
) -> Iterator[ServedCluster]:
    """1 prefill + 1 decode worker of `threads` threads each on the model directory `model`, with more flags for workers and router.

    `way` is the router's --disaggregate: what becomes of requests that ask for no way.

    Raises ClusterDidNotStart.
    """
    ports = dict(zip(("http", "grpc", "prefill", "decode"), free_ports(4), strict=True))
    name = model.resolve().name
    router = f"{HOST}:{ports['grpc']}"
    shared = ["--model", str(model), "--served-name", name]
    worker = [*shared, "--router", router, "--threads", str(threads), "--kv-memory", "512MiB", *worker_flags]
    commands = {
        "router": [
            *shared,
            "--http-port",
            str(ports["http"]),
            "--grpc-port",
            str(ports["grpc"]),
            "--disaggregate",
            way,
            *router_flags,
        ],
        "prefill": [*worker, "--metrics-port", str(ports["prefill"])],
        "decode": [*worker, "--metrics-port", str(ports["decode"])],
    }
    with tempfile.TemporaryFile() as log, ExitStack() as running:
        children = {}
        for kind, arguments in commands.items():
            command = [sys.executable, "-P", "-m", "cli", kind, "--exit-with", str(os.getpid()), *arguments]
            children[kind] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            running.callback(stop_child, children[kind])
        metrics = {"router": ports["http"], **ports}
        served = tuple(
            ServedProcess(kind, child.pid, f"http://{HOST}:{metrics[kind]}/metrics") for kind, child in children.items()
        )
        cluster = ServedCluster(f"http://{HOST}:{ports['http']}", router, name, served)
        try:
            _wait_answers(cluster, list(children.values()))
        except ClusterDidNotStart as error:
            log.seek(0)
            raise ClusterDidNotStart(f"{error}; {log.read()[-2000:].decode('utf-8', 'replace')}") from error
        yield cluster


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now; all different, because all are held until the last is found."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_answers(cluster: ServedCluster, children: list[subprocess.Popen[bytes]]) -> None:
    """Return when both ways through the cluster have answered a request."""
    give_up = time.monotonic() + START_TIMEOUT_S
    requests = tuple(LoadRequest((1, 2, 3), 2, way) for way in (Route.DISAGGREGATED, Route.COLOCATED))
    plan = LoadPlan(Protocol.GRPC, cluster.grpc, cluster.model, 1, requests)
    last = "no answer"
    while time.monotonic() < give_up:
        if any(child.poll() is not None for child in children):
            raise ClusterDidNotStart("a process has ended")
        try:
            asyncio.run(_answered(plan))
            return
        except LoadFailed as error:  # not all are there yet
            last = str(error)
            time.sleep(POLL_S)
    raise ClusterDidNotStart(f"does not answer within {START_TIMEOUT_S:g} s: {last}")


async def _answered(plan: LoadPlan) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        await carry_out(plan)


def stop_child(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and wait; one that does not end is killed, and TimeoutExpired raised."""
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise
