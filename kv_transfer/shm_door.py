"""How a process on the same host gets the descriptors of a worker's KV memory: over an abstract Unix socket.

    target: Door ── accepts, checks the user, sends (size, [memory, window table]) ──▶ source: knock → Keys
            the connection stays open: its end tells each side that the other is gone

Abstract names live in the network namespace and vanish with the process: nothing is left behind, and a peer on another
host or in another namespace cannot connect. Does not know windows or copies.
"""

from __future__ import annotations

import array
import logging
import os
import secrets
import select
import selectors
import socket
import struct
import threading
from dataclasses import dataclass

from contracts.errors import TransferFailed

logger = logging.getLogger(__name__)

_GREETING = struct.Struct("<8sQ")  # magic with version, bytes of memory
_MAGIC = b"DIPTSHM\x01"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_KNOCK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Keys:
    """What a knock brings: descriptors that the receiver of this owns, and the connection that shows that the target lives."""

    connection: socket.socket
    memory_fd: int
    table_fd: int
    num_bytes: int


class Door:
    """Hands descriptors out to processes of `user` (by default our own), in a thread, until `close`. Keeps its own copies."""

    def __init__(self, memory_fd: int, table_fd: int, num_bytes: int, user: int | None = None) -> None:
        self._user = os.geteuid() if user is None else user
        self._fds = [os.dup(memory_fd), os.dup(table_fd)]
        self._greeting = _GREETING.pack(_MAGIC, num_bytes)
        self.name = f"diptych-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="kv-shm-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; every connection ends, by which the sources learn that this target is gone."""
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        for fd in self._fds:
            os.close(fd)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            guests: set[socket.socket] = set()
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    break
                if self._listener in ready:
                    guest = self._admit()
                    if guest is not None:
                        guests.add(guest)
                        selector.register(guest, selectors.EVENT_READ)
                for guest in [g for g in guests if g in ready]:  # they never speak: gone, or a stranger
                    selector.unregister(guest)
                    guests.discard(guest)
                    guest.close()
            for guest in guests:
                guest.close()

    def _admit(self) -> socket.socket | None:
        guest, _ = self._listener.accept()
        try:
            guest.setblocking(False)
            raw = guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, user, _ = _CREDENTIALS.unpack(raw)
            if user != self._user:
                raise PermissionError(f"a process of user {user} knocked")
            socket.send_fds(guest, [self._greeting], self._fds)
        except OSError as error:
            logger.warning("shm: a peer was turned away: %s", error)
            guest.close()
            return None
        return guest


def knock(name: str) -> Keys:
    """The descriptors behind the door called `name`. Blocks at most some seconds; TransferFailed when it does not open."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds = array.array("i")
    try:
        connection.settimeout(_KNOCK_TIMEOUT_S)
        connection.connect("\0" + name)
        greeting, received, _, _ = socket.recv_fds(connection, _GREETING.size, 2, socket.MSG_CMSG_CLOEXEC)
        fds.extend(received)
        if len(greeting) != _GREETING.size or len(fds) != 2:
            raise OSError("it was not opened to us")
        magic, num_bytes = _GREETING.unpack(greeting)
        if magic != _MAGIC:
            raise OSError("it is not a door of this version")
    except OSError as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        raise TransferFailed(f"shm: no door {name} on this host: {error}") from error
    return Keys(connection, fds[0], fds[1], num_bytes)


def is_alive(connection: socket.socket) -> bool:
    """Whether the other side of a door's connection still lives: it says nothing more until it is gone."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)
