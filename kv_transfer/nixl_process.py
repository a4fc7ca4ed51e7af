"""The process in which NIXL runs: one end of the `nixl` connector, over memory that a worker lends it, told what to do by that.

    python -m kv_transfer.nixl_process ORDERS WINDOWS REGION DOOR      descriptors that the worker (`nixl_life.py`) has left it

UCX beneath NIXL ends its process where a peer dies at the wrong moment. This one may end: the worker fails the hand-offs that
were under way, and starts another. It ends at once when its worker has gone. Does not know blocks, requests, or who is told what.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import threading

import numpy as np

from contracts.errors import TransferFailed
from contracts.secret import ProofKey
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Write
from kv_transfer.endings import report
from kv_transfer.listener import TargetLimits
from kv_transfer.nixl_agent import Place
from kv_transfer.nixl_end import NixlEnd
from kv_transfer.nixl_orders import (
    BEGINS,
    ENTERED,
    LEFT,
    LENGTH,
    ORDERS,
    RANGES,
    Ask,
    Cancel,
    Carry,
    Connect,
    Done,
    Enter,
    Finish,
    Leave,
    Question,
    Ready,
    Refused,
    pack,
    receive,
)
from observability.log import configure_logging

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_CLOSING_S = 4  # after that it ends all the same


class _WorkersWindows:
    """The worker's windows, asked over a socket. Used from the threads of the target; each question has its answer first."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def get(self, key: int) -> _WorkersWindow | None:
        """See Gates."""
        ranges = RANGES.decode(self.ask(Ask(key))).ranges
        return None if ranges is None else _WorkersWindow(self, key, tuple(ByteRange(*pair) for pair in ranges))

    def ask(self, question: Question) -> bytes:
        """The answer."""
        with self._lock:
            self._socket.sendall(pack(question))
            answer = receive(self._socket)
        if answer is None:
            raise OSError("the worker has gone")
        return answer


class _WorkersWindow:
    """See Gate."""

    def __init__(self, windows: _WorkersWindows, key: int, ranges: tuple[ByteRange, ...]) -> None:
        self.ranges = ranges
        self._windows = windows
        self._key = key

    def enter(self) -> bool:
        """See Window."""
        return ENTERED.decode(self._windows.ask(Enter(self._key))).may

    def leave(self) -> None:
        """See Window."""
        LEFT.decode(self._windows.ask(Leave(self._key)))


class _Clerk:
    """Carries out the orders of one worker."""

    def __init__(self, end: NixlEnd, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._end = end
        self._reader = reader
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def work(self) -> None:
        """Until the worker says that it is enough. When the worker has gone, nothing is left to be tidy for."""
        while True:
            try:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                order = ORDERS.decode(await self._reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                os._exit(0)
            match order:
                case Finish():
                    break
                case Cancel(number=number):
                    if number in self._tasks:  # else it is over, and its Done on the way
                        self._tasks[number].cancel()
                case Connect() | Carry():
                    self._tasks[order.number] = asyncio.create_task(self._carry_out(order))
                    report(self._tasks[order.number], _crash)
        signal.alarm(_CLOSING_S)
        await self._end.close()

    async def _carry_out(self, order: Connect | Carry) -> None:
        address, failed = ConnectorAddress(order.kind, order.address), None
        try:
            if isinstance(order, Connect):
                await self._end.connect(address)
            else:
                await self._end.write(address, order.key, [Write(*row) for row in order.writes])
        except TransferFailed as error:
            failed = error.message
        except asyncio.CancelledError:
            failed = "given up by the caller"
        del self._tasks[order.number]
        self._writer.write(pack(Done(order.number, failed)))


def _crash(error: BaseException) -> None:
    """A fault of ours: the worker hears of it as of any death, and starts another."""
    logger.critical("nixl: its process ends", exc_info=error)
    os._exit(1)


async def _work(end: NixlEnd, talk: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=talk)
    await _Clerk(end, reader, writer).work()


def main() -> None:
    """See the module."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the worker, who says Finish in its own time
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # with its worker, also while it is stopped
    os.dup2(2, 1)  # what libraries print is no answer to anybody
    orders, windows, region, door = (int(argument) for argument in sys.argv[1:])
    talk = socket.socket(fileno=orders)
    raw = receive(talk)
    if raw is None:
        return
    begin = BEGINS.decode(raw)
    configure_logging("nixl", begin.log_level)
    terms = TargetLimits(*begin.limits), None if begin.key is None else ProofKey(begin.key)
    lent = mmap.mmap(region, begin.num_bytes)
    place = Place(np.frombuffer(lent, dtype=np.uint8).ctypes.data, begin.num_bytes)
    gates = _WorkersWindows(socket.socket(fileno=windows))
    try:
        end = NixlEnd(place, socket.socket(fileno=door), gates, terms)
    except TransferFailed as error:
        talk.sendall(pack(Refused(error.message)))
        return
    talk.sendall(pack(Ready()))
    asyncio.run(_work(end, talk))


if __name__ == "__main__":
    main()
