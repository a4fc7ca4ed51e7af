"""A real cluster to measure: `diptych up` as a child process, its processes' ids from the ready file.

    with serving(model, folder) as cluster:   # router, 1 prefill and 1 decode worker, one thread each
        … cluster.grpc, cluster.cpu_s() …
    # SIGTERM; returns when everything has ended

Started by its command line, as a user does, because `bench` stands below `cli`. Does not know what is asked of it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ServedProcess:
    """One process of the cluster."""

    name: str
    kind: str  # router, prefill, decode
    pid: int


@dataclass(frozen=True, slots=True)
class ServedCluster:
    """Where a running cluster is reached and what it runs as."""

    http: str
    grpc: str
    model: str
    processes: tuple[ServedProcess, ...]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds used so far, user and system, by kind of process."""
        spent: dict[str, float] = {}
        for process in self.processes:
            times = psutil.Process(process.pid).cpu_times()
            spent[process.kind] = spent.get(process.kind, 0.0) + times.user + times.system
        return spent


class ClusterDidNotStart(RuntimeError):
    """The command ended, or was not ready in time; carries its last words."""


class ModelSize(msgspec.Struct):
    """Of a model's config.json, what prompts are made from."""

    vocab_size: int


def vocab_size_of(model: Path) -> int:
    """Token ids of the model in directory `model` are below this."""
    return msgspec.json.decode((model / "config.json").read_bytes(), type=ModelSize).vocab_size


@contextmanager
def serving(model: Path, threads: int = 1) -> Iterator[ServedCluster]:
    """1 prefill + 1 decode worker of `threads` threads each on the model directory `model`. Raises ClusterDidNotStart."""
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        ready, log = Path(folder) / "ready.json", Path(folder) / "log"
        command = [sys.executable, "-P", "-m", "cli", "up", "--model", str(model), "--plain"]
        command += ["--prefill", "1", "--decode", "1", "--threads", str(threads)]
        command += ["--http-port", "0", "--grpc-port", "0", "--ready-file", str(ready)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            try:
                yield _wait_ready(process, ready, log)
            finally:
                _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> ServedCluster:
    give_up = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None:
            raise ClusterDidNotStart(log.read_text(encoding="utf-8", errors="replace")[-2000:])
        if time.monotonic() > give_up:
            raise ClusterDidNotStart(f"not ready within {START_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    return msgspec.json.decode(ready.read_bytes(), type=ServedCluster)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children end with it
        process.wait()
        raise
