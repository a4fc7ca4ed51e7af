"""One supervised process: started, watched until it is ready, started again when it dies, stopped for good when told to.

    STARTING ──ready──▶ READY ──died──▶ RESTARTING ──pause over──▶ STARTING
        │ died                             ▲    │
        ├──────────────────────────────────┘    └──too many in a row──▶ DEAD
        └──exit code 2: its arguments are wrong, trying again cannot help──▶ DEAD
    any but DEAD ──stop()──▶ STOPPING ──gone──▶ STOPPED

Owns the operating-system process and the pipe of its output; both are gone when `run` returns. Does not know what the
process does: readiness is a question that is handed in.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cli.config import RestartPolicy, child_environment
from contracts.clock import Clock

EXIT_WRONG_ARGUMENTS = 2
COMPLAINT = "error: "  # how our commands begin the one line with which they refuse their arguments
LAST_LINES = 15
PROBE_PAUSE_S = 0.2
HURRY_S = 2.0
KILL_WAIT_S = 5.0
MAX_LINE_BYTES = 8192


class ProcessState(StrEnum):
    """See the drawing above."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DEAD = "dead"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start. `address` is where it will be reached, for people and for its probe, `metrics` the URL of its metrics."""

    name: str
    kind: str
    argv: tuple[str, ...]
    address: str
    metrics: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # environment variables, besides ours


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process as others see it.

    `detail` says in words why it is not ready, where that is known; `last_lines` is the end of what its last life wrote.
    """

    name: str
    kind: str
    address: str
    state: ProcessState
    pid: int | None
    num_restarts: int
    detail: str
    metrics: str
    last_lines: tuple[str, ...] = ()


class ProcessListener(Protocol):
    """Whoever wants to know; called in the event loop, must not block."""

    def changed(self, status: ProcessStatus) -> None:
        """A process entered another state."""
        ...

    def line(self, name: str, text: str) -> None:
        """A process wrote a line to stdout or stderr."""
        ...


class SupervisedProcess:
    """Keeps one process alive between `run` and `stop`."""

    def __init__(
        self,
        spec: ProcessSpec,
        probe: Callable[[], Awaitable[bool]],
        policy: RestartPolicy,
        clock: Clock,
        listener: ProcessListener,
    ) -> None:
        self.spec = spec
        self.wrong_arguments = False  # it is DEAD because it was started wrongly; `detail` is its own complaint
        self._probe = probe
        self._policy = policy
        self._clock = clock
        self._listener = listener
        self._state = ProcessState.STARTING
        self._detail = ""
        self._num_restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()
        self._gone = asyncio.Event()
        self._changed = asyncio.Condition()
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def status(self) -> ProcessStatus:
        """How it is now."""
        pid = self._process.pid if self._process is not None and self._process.returncode is None else None
        return ProcessStatus(
            name=self.spec.name,
            kind=self.spec.kind,
            address=self.spec.address,
            state=self._state,
            pid=pid,
            num_restarts=self._num_restarts,
            detail=self._detail,
            metrics=self.spec.metrics,
            last_lines=tuple(self._last_lines),
        )

    async def run(self) -> None:
        """Start it and keep it going; returns once it is STOPPED or DEAD, with nothing of it left."""
        try:
            deaths = 0
            while not self._stop.is_set():
                await self._spawn()
                stable = await self._live()
                if self._stop.is_set():
                    break
                deaths = 1 if stable else deaths + 1
                if await self._give_up(deaths):
                    return
                await self._pause(deaths)
            await self._enter(ProcessState.STOPPED)
        finally:
            self._signal(signal.SIGKILL)
            self._gone.set()

    async def wait_settled(self) -> ProcessStatus:
        """Return when it is READY, DEAD or STOPPED."""
        settled = (ProcessState.READY, ProcessState.DEAD, ProcessState.STOPPED)
        async with self._changed:
            await self._changed.wait_for(lambda: self._state in settled)
        return self.status

    async def stop(self, timeout_s: float, hurry_s: float = HURRY_S) -> None:
        """Ask it to end (SIGTERM), ask again after `timeout_s`, which means at once, kill it after `hurry_s` more.

        Returns when `run` has ended. Idempotent.
        """
        first = not self._stop.is_set()
        self._stop.set()
        if self._gone.is_set():
            return
        await self._enter(ProcessState.STOPPING)
        if first:
            self._signal(signal.SIGTERM)
        for limit_s, number, how in ((timeout_s, signal.SIGTERM, "hurried"), (hurry_s, signal.SIGKILL, "killed")):
            try:
                async with asyncio.timeout(limit_s):
                    await self._gone.wait()
            except TimeoutError:
                self._detail = f"did not stop within {timeout_s:g} s, {how}"
                self._signal(number)
            else:
                return
        async with asyncio.timeout(KILL_WAIT_S):
            await self._gone.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _spawn(self) -> None:
        self._last_lines.clear()
        self._detail = ""
        # A session of its own: the terminal's Ctrl-C reaches the supervisor alone, which then stops children in order.
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=child_environment(self.spec.secrets),
        )
        if self._stop.is_set():  # told to stop while the process was being made
            self._signal(signal.SIGTERM)
            return
        await self._enter(ProcessState.STARTING)

    async def _live(self) -> bool:
        """Watch one life to its end; whether it was ready for long enough to count as stable."""
        process = self._process
        assert process is not None and process.stdout is not None
        reading = asyncio.create_task(_read_lines(process.stdout, self._hear))
        probing = asyncio.create_task(self._become_ready())
        await process.wait()
        probing.cancel()
        await asyncio.wait([probing])
        # Everything it wrote is in the pipe by now; a grandchild that keeps the pipe open must not keep us.
        await asyncio.wait([reading], timeout=1.0)
        reading.cancel()
        await asyncio.wait([reading])
        ready_at = None if probing.cancelled() else probing.result()
        return ready_at is not None and self._clock.now() - ready_at >= self._policy.stable_s

    async def _become_ready(self) -> float | None:
        """The instant at which it was ready; kills it, and returns None, when that takes too long."""
        give_up_at = self._clock.now() + self._policy.start_timeout_s
        while not await self._probe():
            if self._clock.now() >= give_up_at:
                self._detail = f"not ready within {self._policy.start_timeout_s:g} s, killed"
                self._signal(signal.SIGKILL)
                return None
            await self._clock.sleep(PROBE_PAUSE_S)
        ready_at = self._clock.now()
        if not self._stop.is_set():
            await self._enter(ProcessState.READY)
        return ready_at

    def _hear(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if text:
            self._last_lines.append(text)
            self._listener.line(self.spec.name, text)

    async def _give_up(self, deaths: int) -> bool:
        code = self._process.returncode if self._process is not None else None
        self.wrong_arguments = code == EXIT_WRONG_ARGUMENTS
        why = self._detail or describe_exit(code)
        if self.wrong_arguments:
            self._detail = self._last_lines[-1].removeprefix(COMPLAINT) if self._last_lines else why
        elif deaths < self._policy.max_deaths:
            self._detail = why
            return False
        else:
            self._detail = f"{why}; gave up after {deaths} deaths in a row"
        await self._enter(ProcessState.DEAD)
        return True

    async def _pause(self, deaths: int) -> None:
        pause_s = min(self._policy.backoff_s * 2 ** (deaths - 1), self._policy.max_backoff_s)
        self._num_restarts += 1
        await self._enter(ProcessState.RESTARTING)
        stopped = asyncio.create_task(self._stop.wait())
        slept = asyncio.ensure_future(self._clock.sleep(pause_s))
        _, pending = await asyncio.wait([stopped, slept], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    async def _enter(self, state: ProcessState) -> None:
        async with self._changed:
            self._state = state
            self._changed.notify_all()
        self._listener.changed(self.status)


async def _read_lines(stream: asyncio.StreamReader, hear: Callable[[bytes], None]) -> None:
    """Hand on every line until the pipe ends; a line longer than MAX_LINE_BYTES comes in pieces."""
    tail = b""
    while chunk := await stream.read(65536):
        *lines, tail = (tail + chunk).split(b"\n")
        if len(tail) > MAX_LINE_BYTES:
            lines.append(tail)
            tail = b""
        for line in lines:
            hear(line)
    if tail:
        hear(tail)


def describe_exit(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "still running"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exited with code {code}"
