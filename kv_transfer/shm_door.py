"""How a process on the same host gets the descriptors of a worker's KV memory: over an abstract Unix socket.

    target: Door ── accepts, checks the user, sends (size, [memory, window table]) ──▶ source: knock → Keys
            with a cluster secret the two prove themselves first, and the descriptors come with the door's proof
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
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.errors import TransferFailed
from contracts.secret import NONCE_BYTES, PROOF_BYTES, ProofKey
from kv_transfer.handshake import ANSWER_BYTES, SourceHandshake, TargetHandshake
from observability.seldom import Seldom

logger = logging.getLogger(__name__)

_GREETING = struct.Struct("<8sQ")  # magic with version, bytes of memory
_MAGIC = b"DIPTSHM\x01"
_MAGIC_PROVEN = b"DIPTSHM\x02"  # a nonce follows it; then comes the greeting, with the door's proof behind it
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_KNOCK_TIMEOUT_S = 5.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Keys:
    """What a knock brings: descriptors that the receiver of this owns, and the connection that shows that the target lives."""

    connection: socket.socket
    memory_fd: int
    table_fd: int
    num_bytes: int


def _our_user() -> int:
    return os.geteuid()


@dataclass(frozen=True, slots=True)
class Terms:
    """Who is let in: processes of this user, who prove themselves within `hello_s`; of such at most so many wait at a time."""

    user: int = field(default_factory=_our_user)
    hello_s: float = 2.0
    max_strangers: int = 32


class Door:
    """Hands descriptors out to processes of `user` (by default our own), in a thread, until `close`. Keeps its own copies.

    With a `key` they prove themselves first, within `hello_s`.
    """

    def __init__(
        self, memory: tuple[int, int], table_fd: int, key: ProofKey | None = None, terms: Terms | None = None
    ) -> None:
        """`memory` is its descriptor and its bytes."""
        memory_fd, num_bytes = memory
        self._key = key
        self._terms = terms if terms is not None else Terms()
        self._fds = [os.dup(memory_fd), os.dup(table_fd)]
        self._greeting = _GREETING.pack(_MAGIC if key is None else _MAGIC_PROVEN, num_bytes)
        self.name = f"diptych-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._guests: set[socket.socket] = set()
        self._strangers: dict[socket.socket, tuple[TargetHandshake, float]] = {}  # and until when; the oldest first
        self._seldom = Seldom()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
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
        with self._selector as selector, self._listener, self._woken:
            while True:
                ready = [key.fileobj for key, _ in selector.select(self._patience_s())]
                if self._woken in ready:
                    break
                if self._listener in ready:
                    guest = self._admit()
                    if guest is not None:
                        self._guests.add(guest)
                        selector.register(guest, selectors.EVENT_READ)
                for guest in self._ending([g for g in self._guests if g in ready]):
                    selector.unregister(guest)
                    self._guests.discard(guest)
                    self._strangers.pop(guest, None)
                    guest.close()
            for guest in self._guests:
                guest.close()

    def _patience_s(self) -> float | None:
        """How long to wait for anything: until the oldest stranger's time is up."""
        if not self._strangers:
            return None
        return max(0.0, next(iter(self._strangers.values()))[1] - time.monotonic())

    def _ending(self, ready: Sequence[socket.socket]) -> list[socket.socket]:
        """Of the guests those that are to go: who says what is no proof, who says more, who is gone, who takes too long."""
        ending = [guest for guest in ready if guest not in self._strangers or not self._proven(guest)]
        now, room = time.monotonic(), self._terms.max_strangers
        for index, (guest, (_, until)) in enumerate(reversed(self._strangers.items())):
            if guest not in ending and (until <= now or index >= room):
                self._warn("it did not prove itself in time")
                ending.append(guest)
        return ending

    def _admit(self) -> socket.socket | None:
        try:
            guest, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, perhaps: others may be given back
            self._warn(error)
            time.sleep(_PAUSE_S)
            return None
        try:
            guest.setblocking(False)
            raw = guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, user, _ = _CREDENTIALS.unpack(raw)
            if user != self._terms.user:
                raise PermissionError(f"a process of user {user} knocked")
            if self._key is None:
                socket.send_fds(guest, [self._greeting], self._fds)
            else:
                handshake = TargetHandshake(self._key)
                guest.send(_MAGIC_PROVEN + handshake.nonce)
                self._strangers[guest] = handshake, time.monotonic() + self._terms.hello_s
        except OSError as error:
            self._warn(error)
            guest.close()
            return None
        return guest

    def _proven(self, guest: socket.socket) -> bool:
        """Whether what this guest says proves it; then it has got the descriptors."""
        handshake, _ = self._strangers.pop(guest)
        try:
            welcome = handshake.welcome(guest.recv(ANSWER_BYTES))  # so few bytes come at once on a Unix socket
            if welcome is None:
                raise PermissionError("it does not know our cluster secret")
            socket.send_fds(guest, [self._greeting + welcome], self._fds)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, why: object) -> None:
        more = self._seldom.due()
        if more is not None:
            logger.warning("shm: a peer was turned away: %s (%d more before)", why, more)


def knock(name: str, key: ProofKey | None = None) -> Keys:
    """The descriptors behind the door called `name`, once both have proven themselves if there is a `key`.

    Blocks at most some seconds; TransferFailed when it does not open.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds = array.array("i")
    try:
        connection.settimeout(_KNOCK_TIMEOUT_S)
        connection.connect("\0" + name)
        num_bytes = _enter(connection, fds) if key is None else _prove(connection, key, fds)
    except OSError as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        raise TransferFailed(f"shm: no door {name} on this host: {error}") from error
    return Keys(connection, fds[0], fds[1], num_bytes)


def _enter(connection: socket.socket, fds: array.array[int]) -> int:
    """Take what the door hands out to everybody of this user; bytes of memory."""
    return _greeted(_received(connection, _GREETING.size, fds), _MAGIC, fds)


def _prove(connection: socket.socket, key: ProofKey, fds: array.array[int]) -> int:
    """The same of a door that asks for a proof, and gives one."""
    hello = _received(connection, len(_MAGIC_PROVEN) + NONCE_BYTES, fds)
    if hello.startswith(_MAGIC):
        raise OSError("it has no cluster secret, and we have one")
    if not hello.startswith(_MAGIC_PROVEN) or len(hello) != len(_MAGIC_PROVEN) + NONCE_BYTES:
        raise OSError("it is not a door of this version")
    handshake = SourceHandshake(key, hello[len(_MAGIC_PROVEN) :])
    connection.sendall(handshake.answer)
    answer = _received(connection, _GREETING.size + PROOF_BYTES, fds)
    if not answer:
        raise OSError("it does not accept our cluster secret")
    if not handshake.accepts(answer[_GREETING.size :]):
        raise OSError("it has another cluster secret")
    return _greeted(answer[: _GREETING.size], _MAGIC_PROVEN, fds)


def _received(connection: socket.socket, num_bytes: int, fds: array.array[int]) -> bytes:
    data, received, _, _ = socket.recv_fds(connection, num_bytes, 2, socket.MSG_CMSG_CLOEXEC)
    fds.extend(received)
    return data


def _greeted(greeting: bytes, expected: bytes, fds: array.array[int]) -> int:
    if greeting.startswith(_MAGIC_PROVEN) and expected == _MAGIC:
        raise OSError("it has a cluster secret, and we have none")
    if len(greeting) != _GREETING.size or len(fds) != 2:
        raise OSError("it was not opened to us")
    magic, num_bytes = _GREETING.unpack(greeting)
    if magic != expected:
        raise OSError("it is not a door of this version")
    return int(num_bytes)


def is_alive(connection: socket.socket) -> bool:
    """Whether the other side of a door's connection still lives: it says nothing more until it is gone."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)
