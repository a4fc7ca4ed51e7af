"""A TCP proxy that a test looks through: it names who connects, reads along, holds, and cuts.

    client ──▶ Proxy ──▶ server        each connection is a Link; each of its two directions passes Units in order

A Unit is a piece that may be held before: one HTTP/2 frame with the gRPC message that it completes, or whatever came of
another protocol. A Trap looks at every Unit that passes; when its moment has come it acts at once, and, if it shall, holds
that direction there until `open`. DATA frames are cut so that one message is one Unit. Knows no message of ours.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _END_STREAM, _PADDED = 0, 0x1, 0x8
_RESET = struct.pack("ii", 1, 0)
_SOCK_DIAG, _BY_FAMILY = 4, 20  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY


class Direction(Enum):
    """Seen from the client."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes that pass together; `message` is the gRPC message that they complete."""

    raw: bytes
    message: bytes | None = None


class Cutter(Protocol):
    """Makes Units of what comes."""

    def feed(self, data: bytes) -> Iterable[Unit]:
        """Those that are whole now."""
        ...


class AnyBytes:
    """Whatever comes, as it comes."""

    def feed(self, data: bytes) -> Iterable[Unit]:
        """See Cutter."""
        return (Unit(data),)


class GrpcBytes:
    """HTTP/2 frames, and the gRPC messages in them."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False
        self._messages: dict[int, bytes] = {}  # stream → the part of a message that has come

    def feed(self, data: bytes) -> Iterable[Unit]:
        """See Cutter."""
        self._rest += data
        if not self._begun:
            if len(self._rest) < len(_PREFACE):
                return
            self._begun = True
            if self._rest.startswith(_PREFACE):
                self._rest = self._rest[len(_PREFACE) :]
                yield Unit(_PREFACE)
        while len(self._rest) >= 9:
            length = int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < 9 + length:
                return
            frame, self._rest = self._rest[: 9 + length], self._rest[9 + length :]
            yield from self._units(frame)

    def _units(self, frame: bytes) -> Iterable[Unit]:
        kind, flags, stream = frame[3], frame[4], int.from_bytes(frame[5:9], "big")
        if kind != _DATA or len(frame) == 9:
            yield Unit(frame)
            return
        assert not flags & _PADDED
        pieces = list(self._split(stream, frame[9:]))
        for i, (payload, message) in enumerate(pieces):
            kept = flags if i == len(pieces) - 1 else flags & ~_END_STREAM
            head = len(payload).to_bytes(3, "big") + bytes((_DATA, kept)) + stream.to_bytes(4, "big")
            yield Unit(head + payload, message)

    def _split(self, stream: int, payload: bytes) -> Iterable[tuple[bytes, bytes | None]]:
        while payload:
            have = self._messages.get(stream, b"")
            both = have + payload
            size = 5 + int.from_bytes(both[1:5], "big") if len(both) >= 5 else None
            if size is None or len(both) < size:
                self._messages[stream] = both
                yield payload, None
                return
            self._messages.pop(stream, None)
            taken = size - len(have)
            yield payload[:taken], both[5:size]
            payload = payload[taken:]


@dataclass(frozen=True, slots=True)
class Passing:
    """A Unit on its way."""

    link: Link
    direction: Direction
    unit: Unit


@dataclass(eq=False)
class Trap:
    """Springs at the first Unit for which `at` says yes: `act`, then, with `hold`, nothing more passes until `open`."""

    at: Callable[[Passing], bool]
    act: Callable[[Passing], None] = lambda _: None
    hold: bool = True
    passing: Passing | None = None
    sprung: asyncio.Event = field(default_factory=asyncio.Event)

    def looks(self, passing: Passing) -> bool:
        """Whether this Unit must wait."""
        if self.passing is not None or not self.at(passing):
            return False
        self.passing = passing
        self.act(passing)
        self.sprung.set()
        return self.hold

    def open(self) -> None:
        """Spring no more; let pass what was held."""
        if self.passing is None:
            self.at = lambda _: False
        elif self.hold:
            self.passing.link.release(self.passing.direction)


class _Pipe:
    """One direction of a link."""

    def __init__(self, cutter: Cutter) -> None:
        self.cutter = cutter
        self.waiting: deque[Unit] = deque()
        self.held = False
        self.to: asyncio.Transport | None = None


class _End(asyncio.Protocol):
    """One of the two sockets of a link."""

    def __init__(self, link: Link, direction: Direction) -> None:
        self._link = link
        self._direction = direction  # in which what is read here goes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._link.joined(self._direction, transport)

    def data_received(self, data: bytes) -> None:
        self._link.read(self._direction, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.left(self._direction)


class Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, cutter: Callable[[], Cutter]) -> None:
        self.proxy = proxy
        self._client = ""
        self._pipes = {direction: _Pipe(cutter()) for direction in Direction}
        self._ends: list[asyncio.Transport] = []
        self._over = False

    @property
    def client(self) -> str:
        """The process that made it; looked up when it is first asked for."""
        if not self._client and not self._over:
            self._client = self.proxy.name_of(self._ends[0])
        return self._client

    def joined(self, direction: Direction, transport: asyncio.Transport) -> None:
        """An end is connected: the client's first, then the server's."""
        self._ends.append(transport)
        self.proxy.ends.add(transport)
        other = Direction.DOWN if direction is Direction.UP else Direction.UP
        self._pipes[other].to = transport
        if direction is Direction.UP:
            transport.pause_reading()
            self.proxy.dial(self)
        else:
            self._ends[0].resume_reading()
            if self._over:
                transport.abort()

    def read(self, direction: Direction, data: bytes) -> None:
        """Pass on what may pass."""
        pipe = self._pipes[direction]
        pipe.waiting.extend(pipe.cutter.feed(data))
        self._pump(direction)

    def release(self, direction: Direction) -> None:
        """Hold it no longer."""
        self._pipes[direction].held = False
        self._pump(direction)

    def left(self, direction: Direction) -> None:
        """An end is closed for good."""
        other = Direction.DOWN if direction is Direction.UP else Direction.UP
        transport = self._pipes[other].to
        if transport is not None:
            self.proxy.ends.discard(transport)
        self.end()

    def end(self) -> None:
        """One end has gone: the other gets what was passed on already, and the end."""
        if not self._over:
            self._over = True
            self.proxy.links.discard(self)
            for end in self._ends:
                end.close()

    def cut(self) -> None:
        """Reset both ends at once."""
        for end in self._ends:
            sock = end.get_extra_info("socket")
            if sock is not None and not end.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.abort()
        self.end()

    def _pump(self, direction: Direction) -> None:
        pipe = self._pipes[direction]
        while pipe.waiting and not pipe.held and not self._over:
            passing = Passing(self, direction, pipe.waiting[0])
            if self.proxy.looks(passing):
                pipe.held = True
                return
            unit = pipe.waiting.popleft()
            if pipe.to is not None and not self._over:
                pipe.to.write(unit.raw)


class Proxy:
    """Listens on a port of its own and passes on to `port`. `pids` are the processes whose connections it can name."""

    def __init__(
        self,
        name: str,
        port: int,
        traps: list[Trap],
        pids: Callable[[], Mapping[str, int]],
        cutter: Callable[[], Cutter],
    ) -> None:
        self.name = name
        self.links: set[Link] = set()
        self.ends: set[asyncio.Transport] = set()  # sockets that are not closed yet, also of links that are over
        self.port = 0
        self._to = port
        self._traps = traps
        self._pids = pids
        self._cutter = cutter
        self._server: asyncio.Server | None = None
        self._dialling: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut everything and give the port back."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in tuple(self._dialling):
            await asyncio.wait((task,))
        while self.ends:
            for end in self.ends:
                end.abort()
            await asyncio.sleep(0)
        await self._server.wait_closed()

    def cut(self, client: str | None = None) -> int:
        """Cut the connections of this client, or all; how many they were."""
        links = [link for link in self.links if client is None or link.client == client]
        for link in links:
            link.cut()
        return len(links)

    def looks(self, passing: Passing) -> bool:
        """Whether a trap holds this unit."""
        looked = [trap.looks(passing) for trap in tuple(self._traps)]  # each of them, also after a yes
        return any(looked)

    def name_of(self, transport: asyncio.Transport) -> str:
        """The process at the other end of an accepted connection."""
        there, here = transport.get_extra_info("peername")[1], transport.get_extra_info("sockname")[1]
        inode = _inode_of(there, here)
        return next((name for name, pid in self._pids().items() if inode and _has_socket(pid, inode)), "")

    def dial(self, link: Link) -> None:
        """Connect a link to the server; one that cannot be reached ends it."""
        task = asyncio.ensure_future(self._dial(link))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    def _accept(self) -> asyncio.Protocol:
        link = Link(self, self._cutter)
        self.links.add(link)
        return _End(link, Direction.UP)

    async def _dial(self, link: Link) -> None:
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: _End(link, Direction.DOWN), "127.0.0.1", self._to
            )
        except OSError:
            link.end()


def _inode_of(local: int, remote: int) -> int:
    """The socket of the connection between two loopback ports, from the first one's side; 0 when it has gone.

    Asked of the kernel by sock_diag: to read /proc/net/tcp takes a tenth of a second on a machine that has seen a lot.
    """
    here = socket.inet_aton("127.0.0.1")
    for family, address in ((socket.AF_INET, here + bytes(12)), (socket.AF_INET6, bytes(10) + b"\xff\xff" + here)):
        wanted = struct.pack("!HH", local, remote) + address + address + struct.pack("=I", 0) + b"\xff" * 8
        request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + wanted
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.sendto(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, 1, 1, 0) + request, (0, 0))
            answer = kernel.recv(8192)
        if struct.unpack_from("=IH", answer)[1] == _BY_FAMILY:
            return int(struct.unpack_from("=I", answer, 84)[0])
    return 0


def _has_socket(pid: int, inode: int) -> bool:
    return f"socket:[{inode}]" in links_of(pid)


def links_of(pid: int) -> set[str]:
    """What the descriptors of a process are; nothing for one that has ended."""
    found = set()
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):  # closed a moment ago
                found.add(os.readlink(entry.path))
    return found


def open_all(traps: Iterable[Trap]) -> None:
    """Let everything pass again."""
    for trap in traps:
        trap.open()
