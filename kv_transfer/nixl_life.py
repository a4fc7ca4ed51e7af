"""The worker's side of the process in which NIXL runs: one life of it, from its start until the kernel says that it is over.

    start ─▶ Ready ── orders ─▶ their outcomes …          its questions about windows ─▶ answers
      └─ Refused, or silence ─┐        └─ Finish ─┐  └─ it dies ─┐
                              └───────────────────┴──────────────┴─▶ reaped: every order has an outcome, nobody is in a window

A process that is reaped has no thread, socket or queue any more: nothing of it can land. Does not know NIXL, nor whether there
will be another life.
"""

from __future__ import annotations

import itertools
import logging
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack
from dataclasses import dataclass

from contracts.errors import TransferFailed
from kv_transfer.nixl_orders import (
    BEGINNINGS,
    DONES,
    QUESTIONS,
    Answer,
    Ask,
    Begin,
    Enter,
    Entered,
    Finish,
    Left,
    Order,
    Question,
    Ranges,
    Ready,
    Refused,
    pack,
    receive,
)
from kv_transfer.tcp_wire import wait_readable
from kv_transfer.windows import Window, WindowTable

logger = logging.getLogger(__name__)

_START_S = 60.0  # to import NIXL and register memory, on a machine that is busy
_SEND_TIMEOUT = struct.pack("ll", 2, 0)  # SO_SNDTIMEO: a process that takes nothing for two seconds is as good as dead
_MODULE = "kv_transfer.nixl_process"


@dataclass(frozen=True, slots=True)
class Start:
    """With what each life begins: what it is to be, the memory, and the socket at which sources knock."""

    begin: Begin
    region: int
    door: int


class Life:
    """Owns the process and the sockets to it. `serve` is for one thread, which gives all back; the rest is for any."""

    def __init__(self, start: Start, windows: WindowTable) -> None:
        """OSError when the machine has no process to give."""
        self._windows = windows
        self._inside: dict[int, list[Window]] = {}
        self._lock, self._talking = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._orders: dict[int, Future[None]] = {}
        self._ready = False
        self._over = False
        with ExitStack() as theirs:
            self._talk, talk = _pair(theirs)
            self._answers, questions = _pair(theirs)
            self._talk.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
            lent = (talk.fileno(), questions.fileno(), start.region, start.door)
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *map(str, lent)], pass_fds=lent, stdin=subprocess.DEVNULL
            )
        self._asked = threading.Thread(target=self._answer, name="kv-nixl-windows", daemon=True)
        self._asked.start()
        self.tell(start.begin)

    def await_ready(self) -> None:
        """Until it takes orders. TransferFailed when it will not; then, too, `serve` must be called."""
        raw = receive(self._talk) if wait_readable(self._talk, _START_S) else None
        said = None if raw is None else BEGINNINGS.decode(raw)
        if isinstance(said, Refused):
            raise TransferFailed(said.reason)
        if not isinstance(said, Ready):
            self.kill()
            raise TransferFailed("nixl: its process does not start")
        with self._lock:
            self._ready = True

    def serve(self) -> str:
        """Take in outcomes until the process is over and reaped; says how it ended."""
        while (raw := receive(self._talk)) is not None:
            done = DONES.decode(raw)
            with self._lock:
                waiting = self._orders.pop(done.number)
            _settle(waiting, done.failed)
        self.kill()
        ended = _ending(self._process.wait())
        self._asked.join()
        for entered in self._inside.values():
            for window in entered:
                window.leave()
        with self._lock:
            self._over = True
            left = tuple(self._orders.values())
            self._orders.clear()
        for waiting in left:
            _settle(waiting, f"nixl: its process {ended}")
        self._talk.close()
        self._answers.close()
        return ended

    def order(self, make: Callable[[int], Order]) -> tuple[int, Future[None]]:
        """Have an order, made for a number, carried out. Its future fails with TransferFailed; no life leaves one open."""
        number, waiting = next(self._numbers), Future[None]()
        with self._lock:
            if not self._ready or self._over:
                raise TransferFailed("nixl: its process is being started")
            self._orders[number] = waiting
        self.tell(make(number))
        return number, waiting

    def tell(self, said: Begin | Order) -> None:
        """Say what has no outcome of its own. A process that takes nothing is killed."""
        try:
            with self._talking:
                self._talk.sendall(pack(said))
        except OSError as error:
            logger.warning("nixl: its process takes no orders: %s", error)
            self.kill()

    def finish(self) -> None:
        """Have it close and end."""
        with self._lock:
            ready = self._ready
        if ready:
            self.tell(Finish())
        else:
            self.kill()

    def kill(self) -> None:
        """End it at once, whatever it is doing. Nothing where it has ended."""
        self._process.kill()

    def _answer(self) -> None:
        """Until it has ended."""
        try:
            while (raw := receive(self._answers)) is not None:
                self._answers.sendall(pack(self._look(QUESTIONS.decode(raw))))
        except OSError as error:  # it has ended between question and answer
            logger.debug("nixl: %s", error)

    def _look(self, question: Question) -> Answer:
        window = self._windows.get(question.key)
        match question:
            case Ask():
                return Ranges(None if window is None else [(r.offset, r.length) for r in window.ranges])
            case Enter():
                may = window is not None and window.enter()
                if window is not None and may:
                    self._inside.setdefault(question.key, []).append(window)
                return Entered(may)
            case _:
                self._left(question.key)
                return Left()

    def _left(self, key: int) -> None:
        entered = self._inside[key]
        entered.pop().leave()
        if not entered:
            del self._inside[key]


def _pair(theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, other = socket.socketpair()
    theirs.callback(other.close)
    return ours, other


def _settle(waiting: Future[None], failed: str | None) -> None:
    try:
        if failed is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(TransferFailed(failed))
    except InvalidStateError:  # whoever waited has gone, with its event loop
        return


def _ending(status: int) -> str:
    """A process's status in words."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"
