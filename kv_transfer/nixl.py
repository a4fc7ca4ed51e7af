"""The `nixl` connector: NIXL over UCX, for networks with RDMA; over sockets `tcp` is faster.

    worker: NixlConnector ── orders ─▶ its process (`nixl_process.py`): NixlEnd (`nixl_end.py`) ◀─ reads ─ another worker's
            windows, door ◀── asks ──            the same memory, mapped twice

UCX ends its process where a peer dies at the wrong moment (ADR 0039). So NIXL is in a process of its own, a life of which may end
without harm: what was under way fails, nobody is in a window any more, and the next life takes sources in at the same door,
which is this process's. Keys of windows outlive it; an order does not. Does not know blocks or requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from contracts.errors import ConfigError, TransferFailed
from contracts.secret import ClusterSecret
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Capabilities, Region, Write
from kv_transfer.endings import run_to_end, until_done
from kv_transfer.handshake import session_key_bytes
from kv_transfer.listener import TargetLimits, listening
from kv_transfer.nixl_agent import has_rdma
from kv_transfer.nixl_end import KIND
from kv_transfer.nixl_life import Life, Start
from kv_transfer.nixl_orders import Begin, Cancel, Carry, Connect, Order, flat
from kv_transfer.sessions import Advertised, reached_at
from kv_transfer.windows import WindowTable, check_source, merge_ranges

logger = logging.getLogger(__name__)

_WITH_RDMA, _WITHOUT = 30, 5  # below `shm` always; above `tcp` where there is RDMA
_CANCEL_PATIENCE_S = 5.0  # beyond what the process itself grants a target: one that is silent then hangs, and is killed
_CLOSE_PATIENCE_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0  # between two lives


class _Lives:
    """One life after the other, until `close`. Owns the thread that waits for their ends."""

    def __init__(self, start: Start, windows: WindowTable) -> None:
        self._start = start
        self._windows = windows
        self._lock = threading.Lock()
        self._life: Life | None = None
        self._closing = threading.Event()
        self._pause_s = _FIRST_PAUSE_S
        self._first: Future[None] = Future()
        self._thread = threading.Thread(target=self._keep, name="kv-nixl", daemon=True)
        self._thread.start()

    def await_first(self) -> None:
        """Until the first takes orders. TransferFailed when it never will: then there is no other."""
        self._first.result()

    @property
    def life(self) -> Life:
        """The present one; TransferFailed between two."""
        with self._lock:
            if self._life is None:
                raise TransferFailed("nixl: its process has ended, and the next is being started")
            return self._life

    def close(self) -> None:
        """End the last. Blocks until it is reaped."""
        with self._lock:
            self._closing.set()
            life = self._life
        if life is not None:
            life.finish()
            self._thread.join(_CLOSE_PATIENCE_S)
            life.kill()
        self._thread.join()

    def _keep(self) -> None:
        while True:
            try:
                self._one()
            except (OSError, TransferFailed) as error:
                if not self._first.done():
                    self._first.set_exception(error)
                    return
                logger.error("nixl: cannot start: %s", error)
            if self._closing.wait(self._pause_s):
                return
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _one(self) -> None:
        life = Life(self._start, self._windows)
        with self._lock:
            self._life = life
            if self._closing.is_set():
                life.kill()
        try:
            life.await_ready()
            self._pause_s = _FIRST_PAUSE_S  # only what does not even start waits longer and longer
            if not self._first.done():
                self._first.set_result(None)
        finally:
            ended = life.serve()
            with self._lock:
                self._life = None
        if not self._closing.is_set():
            logger.error("nixl: its process %s; what it was doing has failed, and another is started", ended)


@dataclass(frozen=True, slots=True)
class _Exposed:
    """What there is while memory is exposed."""

    num_bytes: int
    port: int
    lives: _Lives
    close_door: Callable[[], None]


class NixlConnector:
    """See Connector. Listens for control connections at `where` (port 0: any free one); UCX picks ports of its own.

    Others reach it at `advertised`, as with `tcp`.
    """

    def __init__(
        self,
        where: tuple[str, int] = ("127.0.0.1", 0),
        advertised: Advertised = (None, None),
        limits: TargetLimits | None = None,
        secret: ClusterSecret | None = None,
    ) -> None:
        self._key = session_key_bytes(secret, KIND)
        self._where = where
        self._advertised = advertised
        self._limits = limits or TargetLimits()
        self._preference = _WITH_RDMA if has_rdma() else _WITHOUT
        self._windows = WindowTable()
        self._exposed: _Exposed | None = None
        self._working: set[asyncio.Future[None]] = set()

    @property
    def capabilities(self) -> Capabilities:
        """Any host; only RDMA makes it better than `tcp`."""
        return Capabilities(
            KIND, same_process_only=False, same_host_only=False, one_sided=False, preference=self._preference
        )

    def expose(self, region: Region) -> None:
        """See Connector. ConfigError when NIXL does not take the memory, or it cannot listen where it was told to."""
        if region.fd is None:
            raise ConfigError("connector: nixl needs memory that another process can map (memfd), which is not here")
        host, port = self._where
        try:
            door = listening(self._where)
        except OSError as error:
            raise ConfigError(f"connector: nixl cannot listen on {host}:{port}: {error}") from error
        limits, num_bytes = self._limits, len(region.buffer)
        terms = (limits.max_connections, limits.max_strangers, limits.stall_s, limits.hello_s, limits.session_s)
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        lives = _Lives(Start(Begin(num_bytes, terms, self._key, level), region.fd, door.fileno()), self._windows)
        try:
            lives.await_first()
        except (OSError, TransferFailed) as error:
            door.close()
            raise ConfigError(f"connector: {error}") from error
        self._exposed = _Exposed(num_bytes, door.getsockname()[1], lives, door.close)

    def address(self) -> ConnectorAddress:
        """See Connector; that of the control connection, which is the same in every life of its process."""
        return reached_at(KIND, (self._where[0], self._open().port), self._advertised)

    def open_window(self, ranges: Sequence[ByteRange]) -> int:
        """See Connector."""
        return self._windows.open(merge_ranges(ranges, self._open().num_bytes))

    def close_window(self, key: int) -> bool:
        """See Connector."""
        return self._windows.close(key)

    async def connect(self, address: ConnectorAddress) -> None:
        """See Connector. Also that the target can read a few bytes from here has been seen then."""
        await self._have_done(lambda number: Connect(number, address.kind, address.address))

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """See Connector. A target that does not answer may still read from us what we reuse: nobody believes that any more."""
        check_source(writes, self._open().num_bytes)
        await self._have_done(lambda number: Carry(number, address.kind, address.address, key, flat(writes)))

    async def close(self) -> None:
        """See Connector."""
        exposed, self._exposed = self._exposed, None
        for work in tuple(self._working):
            await until_done(work)
        self._windows.close_all()
        if exposed is not None:
            await asyncio.to_thread(exposed.lives.close)
            exposed.close_door()
            self._windows = WindowTable()

    def _open(self) -> _Exposed:
        if self._exposed is None:
            raise TransferFailed("nixl: closed, or exposes no memory")
        return self._exposed

    async def _have_done(self, order: Callable[[int], Order]) -> None:
        life = self._open().lives.life
        number, outcome = life.order(order)
        loop, work = asyncio.get_running_loop(), asyncio.wrap_future(outcome)
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        timers: list[asyncio.TimerHandle] = []

        def give_up() -> None:
            life.tell(Cancel(number))
            timers.append(loop.call_later(_CANCEL_PATIENCE_S, life.kill))

        try:
            await run_to_end(work, give_up)
        finally:
            for timer in timers:
                timer.cancel()
