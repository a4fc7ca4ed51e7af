"""`diptych up` as a child process: started, read through its ready file, disturbed by signals, ended, its logs kept.

    start ──▶ ready ──(signals to workers, restarts)──▶ end (SIGTERM) ──▶ exit code

Does not know requests.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.soak.plan import Kind

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "fixtures" / "tiny-austen"
START_S = 180.0
STOP_S = 60.0
POLL_S = 0.2
SETTLED_S = 11.0  # the supervisor counts a death after this long as the first of a row
_NUMBERS = {Kind.KILL: signal.SIGKILL, Kind.TERM: signal.SIGTERM, Kind.STOP: signal.SIGSTOP}
_ENDED = re.compile(r"^(\S+) +(?:restarting|dead) .*\((.*)\)$", re.M)


@dataclass(frozen=True, slots=True)
class Size:
    """Of every worker; `kv_mib` small enough that prompts wait for room and cached blocks are evicted."""

    prefill: int = 2
    decode: int = 2
    kv_mib: int = 6
    max_num_batched_tokens: int = 128
    max_num_seqs: int = 16
    drain_timeout_s: int = 20


class ProcessFacts(msgspec.Struct, frozen=True):
    """One line of the ready file."""

    name: str
    kind: str
    address: str
    state: str
    pid: int | None
    num_restarts: int


class Facts(msgspec.Struct, frozen=True):
    """The ready file."""

    http: str
    grpc: str
    model: str
    processes: tuple[ProcessFacts, ...]


class Cluster:
    """See the module's docstring. Owns the child."""

    def __init__(self, connector: str, size: Size, logs: Path, flags: Sequence[str] = ()) -> None:
        """`flags` are more of `diptych up`."""
        self._logs = logs
        self._ready_file = logs / "ready.json"
        up = [sys.executable, "-P", "-m", "cli", "up", "--model", str(MODEL), "--plain", "--http-port", "0"]
        up += ["--grpc-port", "0", "--prefill", str(size.prefill), "--decode", str(size.decode), "--threads", "1"]
        up += [
            "--disaggregate",
            "always",
            "--connector",
            connector,
            "--kv-memory",
            f"{size.kv_mib}MiB",
            "--dtype",
            "float32",
        ]
        up += ["--max-num-batched-tokens", str(size.max_num_batched_tokens), "--max-num-seqs", str(size.max_num_seqs)]
        up += ["--drain-timeout", str(size.drain_timeout_s), "--log-level", "info"]
        self._command = [*up, *flags, "--ready-file", str(self._ready_file)]
        self._child: asyncio.subprocess.Process | None = None
        self._asked: set[int] = set()  # processes that were ended or told to end
        self._ready_since: dict[int, float] = {}

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        assert self._child is not None
        return self._child.pid

    @property
    def facts(self) -> Facts:
        """As of now."""
        return msgspec.json.decode(self._ready_file.read_bytes(), type=Facts)

    async def start(self) -> None:
        """Return when it is ready. RuntimeError when it is not in time."""
        with (self._logs / "up.log").open("wb") as out, (self._logs / "workers.log").open("wb") as err:
            self._child = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        give_up = time.monotonic() + START_S
        while not self._ready_file.exists():
            if self._child.returncode is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the cluster did not start; see {self._logs}")
            await asyncio.sleep(POLL_S)

    def look(self) -> Facts:
        """The facts; call it often, for it notes since when each process is ready."""
        facts, now = self.facts, time.monotonic()
        ready = {p.pid for p in facts.processes if p.state == "ready" and p.pid is not None}
        self._ready_since = {pid: self._ready_since.get(pid, now) for pid in ready}
        return facts

    def settled(self, name: str) -> int | None:
        """The process id of this worker if it is ready for long enough and was not told to end."""
        (found,) = (p for p in self.look().processes if p.name == name)
        since = self._ready_since.get(found.pid or 0)
        if since is None or found.pid in self._asked or time.monotonic() - since < SETTLED_S:
            return None
        return found.pid

    def disturb(self, pid: int, kind: Kind) -> bool:
        """Send it the signal; False when it has ended by itself, which its supervisor reports."""
        try:
            os.kill(pid, _NUMBERS[kind])
        except ProcessLookupError:
            return False
        if kind is not Kind.STOP:
            self._asked.add(pid)
        return True

    def go_on(self, pid: int) -> None:
        """Continue a stopped process, if it still is."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def wait_all_ready(self, limit_s: float) -> bool:
        """Whether within this time every process is ready and none is on its way out."""
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up:
            processes = self.look().processes
            if all(p.state == "ready" and p.pid not in self._asked for p in processes):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def end(self) -> int | None:
        """Ask it to end; its exit code, None when it had to be killed."""
        assert self._child is not None
        if self._child.returncode is None:
            self._child.terminate()
        try:
            return await asyncio.wait_for(self._child.wait(), STOP_S)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
            return None

    def endings(self) -> list[tuple[str, str]]:
        """(name, how) of every end of a process that the supervisor reported, in order."""
        return _ENDED.findall((self._logs / "up.log").read_text())

    def complaints(self) -> list[str]:
        """What processes logged as errors, and tracebacks."""
        lines = (self._logs / "workers.log").read_text(errors="replace").splitlines()
        return [line for line in lines if " ERROR " in line or " CRITICAL " in line or "Traceback" in line]
