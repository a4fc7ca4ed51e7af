"""The target side of the `nixl` connector: reads from its sources' memory what they ask it to, where windows allow it.

    introduction ─▶ a few bytes are read: reachable ─▶ ask ─▶ in the window, piece by piece: read to its end ─▶ answer

A piece that has been started is awaited to its end inside the window, whatever becomes of its source: only then can nothing
land any more. A source that is stopped keeps its window fenced until it goes on or dies. Between two pieces the target looks
whether the window is still open and its source still wants it. Does not know blocks or requests.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from contracts.errors import TransferFailed
from contracts.secret import ProofKey
from kv_transfer.connector import ByteRange, Write
from kv_transfer.listener import Listener, TargetLimits, frame_begins
from kv_transfer.nixl_agent import Agent, Pause, Transfer
from kv_transfer.nixl_wire import Introduction, receive_ask, receive_introduction
from kv_transfer.tcp_wire import BadFrame, Status, pack_ack, wait_readable
from kv_transfer.windows import check_source, check_target

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20  # between two looks at the window: about a millisecond
_PIECE_WRITES = 1024
_LONGEST_PAUSE_S = 5e-3


class _Closing(OSError):
    """This side closes while a read is under way; it ends with the agent."""


class Gate(Protocol):
    """A window as its reader sees it (`windows.Window`): it enters before it touches a byte, and leaves after."""

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """What may be written, sorted and merged."""
        ...

    def enter(self) -> bool:
        """Whether a piece may begin."""
        ...

    def leave(self) -> None:
        """It has ended."""
        ...


class Gates(Protocol):
    """All windows by key."""

    def get(self, key: int) -> Gate | None:
        """The window under `key`; None when there is none."""
        ...


class NixlTarget:
    """Listens at `door`, whose it becomes, until `close`. Writes into the agent's region, which it does not own, where
    `gates` allow it.
    """

    def __init__(
        self, agent: Agent, gates: Gates, door: socket.socket, terms: tuple[TargetLimits, ProofKey | None]
    ) -> None:
        """`terms`: what sources may cost, and what they prove themselves with, if they must."""
        self._agent = agent
        self._gates = gates
        self._limits = terms[0]
        self._closing = threading.Event()
        self._listener = Listener("nixl", door, terms, self._serve)

    def close(self) -> None:
        """End every connection and wait for their threads. A read under way ends with the agent, which is closed next."""
        self._closing.set()
        self._listener.close()

    def _serve(self, connection: socket.socket, expires_at: float) -> None:
        who = receive_introduction(connection, self._limits.hello_s)
        try:
            self._agent.hold(who.name, who.metadata)
        except TransferFailed as error:
            raise BadFrame(error.message) from error
        try:
            self._reach(connection, who)
            connection.sendall(pack_ack(Status.LANDED, 0))
            while frame_begins(connection, expires_at):
                key, writes = receive_ask(connection, self._agent.place.num_bytes, self._limits.stall_s)
                status = self._fetch(connection, who, (key, writes))
                connection.sendall(pack_ack(status, key))
                if status is Status.FAILED:
                    raise BadFrame("its memory could not be read")
        finally:
            self._agent.let_go(who.name)

    def _reach(self, connection: socket.socket, who: Introduction) -> None:
        """Read a few bytes, into none of the region: so this may be given up before it has ended."""
        pause, until = Pause(_LONGEST_PAUSE_S), time.monotonic() + self._limits.stall_s
        try:
            transfer = self._agent.probe(who.name, who.place)
            try:
                while not transfer.look():
                    if wait_readable(connection, 0) or self._closing.is_set() or time.monotonic() > until:
                        raise BadFrame("its memory cannot be reached")
                    pause.wait()
            finally:
                transfer.release()
        except TransferFailed as error:
            raise BadFrame(error.message) from error

    def _fetch(self, connection: socket.socket, who: Introduction, ask: tuple[int, Sequence[Write]]) -> Status:
        key, writes = ask
        window = self._gates.get(key)
        if window is None:
            return Status.CLOSED
        try:
            check_source(writes, who.place.num_bytes)
            for write in writes:
                check_target(window.ranges, write.target_offset, write.length)
        except (TransferFailed, ValueError):
            return Status.OUTSIDE
        if not any(write.length for write in writes):
            if not window.enter():
                return Status.CLOSED
            window.leave()
            return Status.LANDED
        for piece in pieces(writes):
            # What comes before the answer, bytes or an end, means that the source has given up.
            if wait_readable(connection, 0) or not window.enter():
                return Status.CLOSED
            try:
                self._to_end(self._agent.read(who.name, who.place, piece))
            except TransferFailed as error:
                window.leave()
                logger.warning("nixl: a read from %s failed: %s", who.name, error)
                return Status.FAILED
            window.leave()
        return Status.LANDED

    def _to_end(self, transfer: Transfer) -> None:
        """Wait for it; _Closing alone leaves before, without leaving the window: it ends with the agent."""
        pause = Pause(_LONGEST_PAUSE_S)
        try:
            while not transfer.look():
                if self._closing.is_set():
                    raise _Closing("closed in mid-read")
                pause.wait()
        finally:
            transfer.release()


def pieces(writes: Sequence[Write]) -> Iterator[tuple[Write, ...]]:
    """`writes` in groups of at most PIECE_BYTES and so many writes, large ones cut; empty ones left out."""
    piece: list[Write] = []
    room = PIECE_BYTES
    for write in writes:
        at = 0
        while at < write.length:
            now = min(room, write.length - at)
            piece.append(Write(write.source_offset + at, write.target_offset + at, now))
            at, room = at + now, room - now
            if not room or len(piece) == _PIECE_WRITES:
                yield tuple(piece)
                piece, room = [], PIECE_BYTES
    if piece:
        yield tuple(piece)
