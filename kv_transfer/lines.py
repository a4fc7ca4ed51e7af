"""The source half of connectors that write over connections of their own: who is reached, and one write at a time per line.

    write ─▶ a turn at the target (few at a time) ─▶ a thread ─▶ an idle line, or a new one ─▶ carry ─▶ kept for the next

A line that failed is closed, and so are the others whose end has gone, once somebody asks for a new target. Cancelling cuts
the line of that write and waits for its thread. Does not know what a line sends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from contracts.errors import TransferFailed
from contracts.worker import ConnectorAddress
from kv_transfer.connector import Write
from kv_transfer.endings import run_to_end, until_done

_MAX_THREADS = 32  # writes under way; further ones wait
_PER_TARGET = 4  # so that one target that has stopped cannot take all threads


class Line(Protocol):
    """One connection to a target, used by one thread at a time; `cut` may come from another."""

    @property
    def idle(self) -> bool:
        """Whether it can carry a frame. Does not block."""
        ...

    def carry(self, key: int, writes: Sequence[Write]) -> None:
        """One frame and its answer; TransferFailed when refused, OSError when the line is broken."""
        ...

    def cut(self) -> None:
        """End whatever it is doing, from any thread."""
        ...

    def close(self, *, reset: bool = False) -> None:
        """Give it back; with `reset`, bytes not sent yet are thrown away."""
        ...


OpenLine = Callable[[], Line]
Route = Callable[[ConnectorAddress], OpenLine]


class _Job:
    """One write in a thread, which the event loop may stop at any moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._stopped = False

    def begin(self, line: Line) -> bool:
        """From now on `stop` cuts this line; False when it was stopped already."""
        with self._lock:
            self._line = line
            return not self._stopped

    def end(self) -> None:
        """The line is not this job's any more."""
        with self._lock:
            self._line = None

    def stop(self) -> None:
        """Called by the event loop."""
        with self._lock:
            self._stopped = True
            if self._line is not None:
                self._line.cut()


class _Target:
    """The lines to one address; methods run in threads unless said otherwise. `turns` and `users` belong to the event loop."""

    def __init__(self, name: str, open_line: OpenLine) -> None:
        self._name = name
        self._open = open_line
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self.turns = asyncio.Semaphore(_PER_TARGET)
        self.users = 0

    def connect(self) -> None:
        """Make sure of a line; TransferFailed when there can be none."""
        self._keep(self._take())

    def write(self, key: int, writes: Sequence[Write], job: _Job) -> None:
        """See Connector.write."""
        line = self._take()
        if not job.begin(line):
            self._keep(line)
            raise TransferFailed(f"{self._name}: given up by the caller")
        try:
            line.carry(key, writes)
        except TransferFailed:
            job.end()
            self._keep(line)
            raise
        except OSError as error:
            job.end()
            line.close(reset=True)
            raise TransferFailed(f"{self._name}: {error}") from error
        job.end()
        self._keep(line)

    def close_ended(self) -> bool:
        """Close the lines whose other end has gone; whether no idle one is left. Does not block: for the event loop."""
        with self._lock:
            ended = [line for line in self._idle if not line.idle]
            self._idle = [line for line in self._idle if line not in ended]
            for line in ended:
                line.close()
            return not self._idle

    def close(self) -> None:
        """Not while a thread uses a line."""
        for line in self._idle:
            line.close()
        self._idle.clear()

    def _take(self) -> Line:
        while True:
            with self._lock:
                line = self._idle.pop() if self._idle else None
            if line is None:
                break
            if line.idle:
                return line
            line.close()
        try:
            return self._open()
        except OSError as error:
            raise TransferFailed(f"{self._name}: {error}") from error

    def _keep(self, line: Line) -> None:
        with self._lock:
            self._idle.append(line)


class Lines:
    """All targets of one connector of this `kind`. Used from one event loop. Owns the lines and the threads that use them.

    `route` says how lines to an address are opened, and raises TransferFailed where that is none. A frame has at most
    `max_ranges` writes.
    """

    def __init__(self, kind: str, route: Route, max_ranges: int) -> None:
        self._kind = kind
        self._route = route
        self._max_ranges = max_ranges
        self._reached: dict[ConnectorAddress, _Target] = {}
        self._working: set[asyncio.Future[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=_MAX_THREADS, thread_name_prefix=f"kv-{kind}-write")

    @property
    def reached(self) -> tuple[ConnectorAddress, ...]:
        """The targets that are known, the one known longest first."""
        return tuple(self._reached)

    @property
    def num_working(self) -> int:
        """Threads that are at work."""
        return len(self._working)

    async def connect(self, address: ConnectorAddress) -> None:
        """See Connector."""
        async with self._turn(address) as target:
            await self._in_thread(target.connect, _Job())

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """See Connector. Cancelling cuts the line, so that a target that has stopped does not hold the caller."""
        async with self._turn(address) as target:
            for first in range(0, max(1, len(writes)), self._max_ranges):
                job = _Job()
                frame = writes[first : first + self._max_ranges]
                await self._in_thread(partial(target.write, key, frame, job), job)

    async def finish(self) -> None:
        """Wait for what is under way, and close every line. Nothing can be written afterwards."""
        for work in tuple(self._working):
            await until_done(work)
        self._threads.shutdown()
        for target in self._reached.values():
            target.close()
        self._reached.clear()

    @asynccontextmanager
    async def _turn(self, address: ConnectorAddress) -> AsyncIterator[_Target]:
        if address not in self._reached:
            open_line = self._route(address)
            self._forget_ended()
            self._reached[address] = _Target(f"{self._kind}:{address.address}", open_line)
        target = self._reached[address]
        target.users += 1
        try:
            async with target.turns:
                yield target
        finally:
            target.users -= 1

    def _forget_ended(self) -> None:
        """Let go of targets that have ended: each life of a peer has an address of its own, which nobody asks for again."""
        for address, target in list(self._reached.items()):
            if target.close_ended() and not target.users:
                del self._reached[address]

    async def _in_thread(self, work: Callable[[], None], job: _Job) -> None:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._working.add(running)
        running.add_done_callback(self._working.discard)
        await run_to_end(running, job.stop)


def split_address(address: ConnectorAddress, kind: str) -> tuple[str, int]:
    """Host and port; TransferFailed when it is not an address of this kind."""
    host, _, port = address.address.rpartition(":")
    if address.kind != kind or not host or not port.isdigit() or int(port) > 65_535:
        raise TransferFailed(f"{kind}: {address.kind}:{address.address} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(kind: str, host: str, port: int) -> ConnectorAddress:
    """The address of this kind that is split so: an IPv6 host stands in brackets."""
    return ConnectorAddress(kind, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
