"""One end of the `nixl` connector, in the process that has the agent: what it reads from others, and what others read from it.

    source: Lines ── asks, over a control connection ──▶ target: reads the source's memory in the window (`nixl_target.py`)
            makes progress while it waits                        answers when all is there

It reads, where others write: a write of NIXL's lands whenever its writer's machine gets to it, and no target can take its leave
back. What the target reads itself, it knows the end of.

The control connection is greeted as `tcp`'s is, with a proof where there is a secret. UCX's own sockets and queues prove
nothing (docs/security.md). Does not know whose windows these are, blocks or requests.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence

from contracts.secret import ProofKey
from contracts.worker import ConnectorAddress
from kv_transfer.connector import Write
from kv_transfer.lines import Lines, OpenLine, split_address
from kv_transfer.listener import TargetLimits
from kv_transfer.nixl_agent import Agent, Pause, Place
from kv_transfer.nixl_target import Gates, NixlTarget
from kv_transfer.nixl_wire import MAX_WRITES, Introduction, pack_ask, pack_introduction
from kv_transfer.sessions import open_session
from kv_transfer.tcp_wire import ACK_BYTES, BadFrame, check_ack, receive_exactly, wait_readable

KIND = "nixl"
_CUT_PATIENCE_S = 2.0  # how long a write that was given up waits for the target to have stopped
_LONGEST_PAUSE_S = 200e-6


class _Line:
    """One control connection to a target, used by one thread at a time; `cut` may come from another."""

    def __init__(self, where: tuple[str, int], agent: Agent, limits: TargetLimits, key: ProofKey | None) -> None:
        self._agent = agent
        self._stall_s = limits.stall_s
        self._old_at = time.monotonic() + limits.session_s / 2
        self._cut = threading.Event()
        self._socket = open_session(where, key, limits.stall_s)
        try:
            self._socket.sendall(pack_introduction(Introduction(agent.name, agent.metadata, agent.place)))
            self._answer(0)
        except BaseException:
            self.close(reset=True)
            raise

    @property
    def idle(self) -> bool:
        """See Line; a line that was cut, or is old, is not used any more."""
        return time.monotonic() < self._old_at and not self._cut.is_set() and not wait_readable(self._socket, 0)

    def carry(self, key: int, writes: Sequence[Write]) -> None:
        """See Line."""
        self._socket.sendall(pack_ask(key, writes))
        self._answer(key)

    def cut(self) -> None:
        """See Line: says that nobody wants the rest. The answer is still waited for, for a while."""
        self._cut.set()
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # the other side was faster
            return

    def close(self, *, reset: bool = False) -> None:
        """See Line. After a failure the target may still be reading: it gets to the end of it if we go on making progress."""
        self._socket.close()
        if reset:
            self._agent.linger(self._stall_s)

    def _answer(self, key: int) -> None:
        """Wait for it, making progress meanwhile."""
        pause, began = Pause(_LONGEST_PAUSE_S), time.monotonic()
        cut_at: float | None = None
        while not wait_readable(self._socket, 0):
            self._agent.progress()
            now = time.monotonic()
            if cut_at is None and self._cut.is_set():
                cut_at = now
            if now - began > self._stall_s or (cut_at is not None and now - cut_at > _CUT_PATIENCE_S):
                raise BadFrame("no answer in time")
            pause.wait()
        check_ack(receive_exactly(self._socket, ACK_BYTES, self._stall_s), key)


class NixlEnd:
    """Owns an agent over `place`, the lines to others, and a target that takes control connections at `door`, whose it becomes.

    UCX picks ports of its own. Raises TransferFailed when NIXL does not take the memory.
    """

    def __init__(
        self, place: Place, door: socket.socket, gates: Gates, terms: tuple[TargetLimits, ProofKey | None]
    ) -> None:
        self._limits, self._key = terms
        self.agent = Agent(place)
        self.target = NixlTarget(self.agent, gates, door, terms)
        self._lines = Lines(KIND, self._route, MAX_WRITES)

    async def connect(self, address: ConnectorAddress) -> None:
        """See Connector. Also that the target can read a few bytes from here has been seen then."""
        await self._lines.connect(address)

    async def write(self, address: ConnectorAddress, key: int, writes: Sequence[Write]) -> None:
        """See Connector. A target that does not answer may still read from us what we reuse: nobody believes that any more."""
        await self._lines.write(address, key, writes)

    async def close(self) -> None:
        """Let go of everything; what was still being read has ended with the agent. Idempotent."""
        await self._lines.finish()
        await asyncio.to_thread(self.target.close)
        await asyncio.to_thread(self.agent.close)

    def _route(self, address: ConnectorAddress) -> OpenLine:
        where = split_address(address, KIND)
        return lambda: _Line(where, self.agent, self._limits, self._key)
