"""A router process with fake workers beside it, to be measured: the router on a core of its own where there are two.

    with routed(model, RoutedConfig(step_s=0.02)) as router:
        … router.cpu_s(), router.rss_bytes() …

Both are started by command line, end with this process whatever happens to it, and their logs go to a file that is shown when
one does not start. Does not know what is asked of them.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from bench.cluster import HOST, ClusterDidNotStart, free_ports, stop_child
from bench.fake_workers import FAKE_EPOCH, FAKE_PREFILL
from bench.load import LoadFailed
from bench.router_load import Door, RouterPlan, carry_out
from bench.router_requests import PLAIN, Manner
from router.keys import hash_of, new_key
from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE, Authority, Period, write_identity

SERVED_NAME = "bench"
START_TIMEOUT_S = 30.0
POLL_S = 0.1
_CONTEXT = 131_072
_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class RoutedConfig:
    """`step_s` is the fake decode worker's step, 0 for as fast as the router reads. `secured`: users need a key, over TLS."""

    step_s: float = 0.0
    max_running: int = 512
    secured: bool = False
    router_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Routed:
    """A running router and where it is reached; `prefill_port` is the fake prefill worker's own."""

    http_port: int
    grpc_port: int
    prefill_port: int
    prefill_ref: tuple[str, int]
    pid: int
    manner: Manner  # in which it must be asked

    def port(self, door: Door) -> int:
        """Where requests of this door go."""
        return {Door.SSE: self.http_port, Door.GRPC: self.grpc_port, Door.DIRECT: self.prefill_port}[door]

    def cpu_s(self) -> float:
        """CPU seconds of the router so far, all its threads, user and system."""
        spent = psutil.Process(self.pid).cpu_times()
        return float(spent.user + spent.system)

    def rss_bytes(self) -> int:
        """Memory of the router that is in RAM now."""
        return int(psutil.Process(self.pid).memory_info().rss)


def control_plane_files(model: Path, folder: Path) -> Path:
    """What a router reads of a model directory, in `folder`, with a context long enough for any prompt here."""
    folder.mkdir()
    for name in _FILES:
        if (model / name).exists():
            (folder / name).write_bytes((model / name).read_bytes())
    config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, msgspec.Raw])
    config["max_position_embeddings"] = msgspec.Raw(str(_CONTEXT).encode())
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return folder


@contextmanager
def routed(model: Path, config: RoutedConfig) -> Iterator[Routed]:
    """A router for the tokenizer in the model directory `model`, and workers that answer at once. ClusterDidNotStart."""
    http, grpc_port, prefill, for_workers = free_ports(4)
    cores = available_cores()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log, ExitStack() as running:
        files = control_plane_files(model, Path(folder) / SERVED_NAME)
        exit_with = ("--exit-with", str(os.getpid()))
        router = ["-m", "cli", "router", *exit_with, "--model", str(files), "--served-name", SERVED_NAME]
        router += ["--http-port", str(http), "--grpc-port", str(grpc_port), "--canary-interval", "0"]
        router += ["--disaggregate", "always", "--max-running", str(config.max_running), *config.router_flags]
        router += ["--worker-port", str(for_workers)]
        manner, flags = _secured(Path(folder)) if config.secured else (PLAIN, [])
        router += flags
        fakes = ["-m", "bench", "fake-workers", *exit_with, "--router", f"{HOST}:{for_workers}"]
        fakes += ["--served-name", SERVED_NAME, "--step", str(config.step_s), "--prefill-port", str(prefill)]
        children = []
        for arguments, core in ((router, cores[:1]), (fakes, cores[1:] or cores)):
            with on_cores(core):
                command = [sys.executable, "-P", *arguments]
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            running.callback(stop_child, child)
            children.append(child)
        served = Routed(http, grpc_port, prefill, (FAKE_PREFILL, FAKE_EPOCH), children[0].pid, manner)
        try:
            _wait_answers(served, children)
        except ClusterDidNotStart as error:
            log.seek(0)
            raise ClusterDidNotStart(f"{error}; {log.read()[-2000:].decode('utf-8', 'replace')}") from error
        with on_cores(cores[1:] or cores):  # and with this process its load clients
            yield served


def _secured(folder: Path) -> tuple[Manner, list[str]]:
    """A key and a certificate, in `folder`: how to ask with them, and the router's flags."""
    authority, day = Authority.new("bench", Period.of_days(1)), Period.of_days(1)
    write_identity(folder, authority, authority.issue((HOST, "localhost"), day))
    key = new_key()
    keys = folder / "keys.json"
    keys.write_bytes(msgspec.json.encode({"keys": [{"name": "bench", "hash": hash_of(key)}]}))
    shown = ["--tls-user-cert", str(folder / CERT_FILE), "--tls-user-key", str(folder / KEY_FILE)]
    return Manner(api_key=key, ca=str(folder / CA_FILE)), ["--api-keys", str(keys), *shown]


def available_cores() -> list[int]:
    """The cores that this process may use, where the system says so; else none in particular."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Run on these cores, and start children there; all cores where none are named or there is no choice."""
    if sys.platform != "linux" or not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wait_answers(routed_: Routed, children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when a request over the hand-off has been answered."""
    give_up = time.monotonic() + START_TIMEOUT_S
    plan = RouterPlan(Door.GRPC, HOST, routed_.grpc_port, "one two three", 3, 1, 1, manner=routed_.manner)
    last = "no answer"
    while time.monotonic() < give_up:
        if any(child.poll() is not None for child in children):
            raise ClusterDidNotStart("a process has ended")
        try:
            asyncio.run(carry_out(plan))
            return
        except (LoadFailed, ExceptionGroup) as error:  # not there yet
            last = str(error)
            time.sleep(POLL_S)
    raise ClusterDidNotStart(f"does not answer within {START_TIMEOUT_S:g} s: {last}")
