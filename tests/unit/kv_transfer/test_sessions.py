"""Connectors with a cluster secret: both ends prove that they know it before a byte moves, and who does not is soon gone."""

import asyncio
import os
import resource
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import TransferFailed
from contracts.secret import NONCE_BYTES, PROOF_BYTES, ClusterSecret, new_nonce
from contracts.worker import ConnectorAddress
from kv_transfer.choose import NetworkConfig, make_connectors
from kv_transfer.connector import ByteRange, Write
from kv_transfer.handshake import ANSWER_BYTES, SourceHandshake, TargetHandshake, session_key
from kv_transfer.listener import TargetLimits
from kv_transfer.region import SharedRegion
from kv_transfer.shm import ShmConnector
from kv_transfer.shm_door import Door, Terms, knock
from kv_transfer.tcp import TcpConnector
from kv_transfer.tcp_target import TcpTarget
from kv_transfer.tcp_wire import HELLO, HELLO_PROVEN, BadFrame, greet, pack_write, receive_exactly, shut
from kv_transfer.windows import WindowTable

SECRET, OTHER = ClusterSecret(b"the secret of one cluster"), ClusterSecret(b"the secret of another")
SIZE = 1 << 14
KEY = session_key(SECRET, "tcp")
QUICK = TargetLimits(stall_s=2.0, hello_s=0.6, max_strangers=3)


def connector(kind, secret):
    return ShmConnector(secret=secret) if kind == "shm" else TcpConnector(limits=QUICK, secret=secret)


class Pair:
    """A target and a source, each with a secret or none."""

    def __init__(self, kind, target, source):
        self.regions = SharedRegion(SIZE), SharedRegion(SIZE)
        self.target, self.source = connector(kind, target), connector(kind, source)

    async def __aenter__(self):
        for made, region in zip((self.target, self.source), self.regions, strict=True):
            made.expose(region)
        self.regions[1].buffer[:] = b"\x07" * SIZE
        return self

    async def __aexit__(self, *_):
        await self.source.close()
        await self.target.close()
        for region in self.regions:
            region.close()

    async def write(self, num_bytes=64):
        key = self.target.open_window([ByteRange(0, num_bytes)])
        try:
            await self.source.write(self.target.address(), key, [Write(0, 0, num_bytes)])
        finally:
            assert self.target.close_window(key)


@pytest.mark.parametrize("kind", ["tcp", "shm"])
async def test_who_has_the_secret_writes(kind):
    async with Pair(kind, SECRET, SECRET) as pair:
        await pair.source.connect(pair.target.address())
        await pair.write()
        assert bytes(pair.regions[0].buffer[:65]) == b"\x07" * 64 + b"\0"


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        (SECRET, OTHER, "does not accept our cluster secret"),
        (SECRET, None, "secret"),
        (None, SECRET, "secret"),
    ],
)
async def test_who_has_not_writes_nothing_and_hears_why(kind, target, source, said):
    async with Pair(kind, target, source) as pair:
        with pytest.raises(TransferFailed, match=said):
            await pair.source.connect(pair.target.address())
        with pytest.raises(TransferFailed, match=said):
            await pair.write()
        assert not any(pair.regions[0].buffer)


async def test_each_mismatch_is_named():
    for kind in ("tcp", "shm"):
        async with Pair(kind, SECRET, None) as pair:
            with pytest.raises(TransferFailed, match=r"the other$|and we have none"):
                await pair.source.connect(pair.target.address())
        async with Pair(kind, None, SECRET) as pair:
            with pytest.raises(TransferFailed, match=r"that is ours|and we have one"):
                await pair.source.connect(pair.target.address())


async def test_two_clusters_on_one_host_do_not_reach_each_other():
    made = {secret: make_connectors(("shm", "tcp"), NetworkConfig(secret=secret)) for secret in (SECRET, OTHER)}
    with SharedRegion(SIZE) as one, SharedRegion(SIZE) as other:
        for connectors, region in zip(made.values(), (one, other), strict=True):
            for each in connectors:
                each.expose(region)
        for ours, theirs in ((SECRET, OTHER), (OTHER, SECRET)):
            for source, target in zip(made[ours], made[theirs], strict=True):
                with pytest.raises(TransferFailed, match="secret"):
                    await source.connect(target.address())
            for source, target in zip(made[ours], made[ours], strict=True):
                await source.connect(target.address())
        for connectors in made.values():
            for each in connectors:
                await each.close()


# The handshake by itself


def test_proofs_are_of_one_session_one_side_one_kind_and_one_secret():
    target = TargetHandshake(KEY)
    source = SourceHandshake(KEY, target.nonce)
    welcome = target.welcome(source.answer)
    assert source.accepts(welcome)
    assert TargetHandshake(KEY).welcome(source.answer) is None, "heard in another session"
    assert not SourceHandshake(KEY, target.nonce).accepts(welcome)
    assert target.welcome(new_nonce() + welcome) is None
    assert target.welcome(source.answer[:NONCE_BYTES] + welcome) is None, "its own word, sent back"
    assert target.welcome(SourceHandshake(session_key(SECRET, "shm"), target.nonce).answer) is None
    assert target.welcome(SourceHandshake(session_key(OTHER, "tcp"), target.nonce).answer) is None
    assert session_key(None, "tcp") is None


@given(
    st.integers(0, ANSWER_BYTES - 1),
    st.integers(0, 7),
    st.integers(0, PROOF_BYTES - 1),
    st.integers(0, ANSWER_BYTES - 1),
)
def test_no_bit_of_a_proof_may_be_altered(at, bit, there, cut):
    target = TargetHandshake(KEY)
    source = SourceHandshake(KEY, target.nonce)
    answer = bytearray(source.answer)
    welcome = bytearray(target.welcome(bytes(answer)))
    answer[at] ^= 1 << bit
    welcome[there] ^= 1 << bit
    assert target.welcome(bytes(answer)) is None
    assert not source.accepts(bytes(welcome))
    assert target.welcome(source.answer[:cut]) is None


# tcp


@pytest.fixture
def tcp():
    with SharedRegion(SIZE) as region:
        windows = WindowTable()
        made = TcpTarget(region.buffer, windows, ("127.0.0.1", 0), (QUICK, KEY))
        made.region, made.windows = region, windows
        yield made
        made.close()
        windows.close_all()


def stranger(target, first=b""):
    sock = socket.create_connection(("127.0.0.1", target.port), timeout=5)
    sock.sendall(first)
    return sock


def over(sock, within_s=2.0):
    """How long it takes until the target has ended this connection; what it says before is thrown away."""
    began = time.monotonic()
    sock.settimeout(within_s)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


def test_a_window_key_alone_opens_nothing(tcp):
    """Whoever reads a grant on the wire has its key."""
    key = tcp.windows.open((ByteRange(0, 8),))
    frame = pack_write(key, [ByteRange(0, 8)]) + b"intruder"
    for first in (frame, HELLO + frame, HELLO_PROVEN + frame, HELLO_PROVEN + b"x" * ANSWER_BYTES + frame):
        with stranger(tcp, first) as sock:
            over(sock)
    assert not any(tcp.region.buffer)


def test_a_session_that_was_heard_is_worth_nothing_again(tcp):
    heard = bytearray()
    with socket.create_connection(("127.0.0.1", tcp.port), timeout=5) as sock:
        sock.sendall(HELLO_PROVEN)
        nonce = bytes(receive_exactly(sock, len(HELLO_PROVEN) + NONCE_BYTES, 2)[len(HELLO_PROVEN) :])
        heard += SourceHandshake(KEY, nonce).answer
        sock.sendall(heard)
        assert len(receive_exactly(sock, PROOF_BYTES, 2)) == PROOF_BYTES
    with stranger(tcp, HELLO_PROVEN + bytes(heard)) as sock:
        assert over(sock) < 0.5, "at once"


def test_a_session_that_has_expired_carries_nothing():
    """Both have proven themselves, and the window is open."""
    with SharedRegion(SIZE) as region:
        windows = WindowTable()
        target = TcpTarget(region.buffer, windows, ("127.0.0.1", 0), (replace(QUICK, session_s=0.0), KEY))
        key = windows.open((ByteRange(0, 8),))
        with socket.create_connection(("127.0.0.1", target.port), timeout=5) as sock:
            greet(sock, KEY, 2.0)
            with suppress(ConnectionError):
                sock.sendall(pack_write(key, [ByteRange(0, 8)]) + b"too late")
            assert over(sock) < 1.0
        target.close()
        assert not any(region.buffer)
        windows.close_all()


def test_a_session_expires_while_nothing_is_said():
    with SharedRegion(SIZE) as region:
        target = TcpTarget(region.buffer, WindowTable(), ("127.0.0.1", 0), (replace(QUICK, session_s=0.2), KEY))
        with socket.create_connection(("127.0.0.1", target.port), timeout=5) as sock:
            greet(sock, KEY, 2.0)
            assert 0.1 < over(sock) < 1.5
        target.close()


@pytest.mark.parametrize(("session_s", "sessions"), [(3600.0, 1), (0.0, 3)])
async def test_a_source_takes_a_new_session_before_the_old_one_expires(monkeypatch, session_s, sessions):
    async with Pair("tcp", SECRET, SECRET) as pair:
        greeted = []
        monkeypatch.setattr("kv_transfer.sessions.greet", lambda *line: greeted.append(greet(*line)))
        pair.source._limits = replace(QUICK, session_s=session_s)
        for _ in range(3):
            await pair.write()
        assert len(greeted) == sessions


def test_who_does_not_introduce_himself_is_soon_gone_and_many_make_room(tcp):
    slow = [stranger(tcp, HELLO_PROVEN[:i]) for i in (0, 3)] + [stranger(tcp, HELLO_PROVEN + b"half")]
    assert all(0.3 < over(sock) < 1.5 for sock in slow[:1])
    for sock in slow:
        over(sock)
        sock.close()
    crowd = [stranger(tcp) for _ in range(QUICK.max_strangers + 4)]
    assert over(crowd[0]) < 0.5, "the oldest makes room"
    with socket.create_connection(("127.0.0.1", tcp.port), timeout=5) as sock:
        greet(sock, KEY, 1.0)  # who knows the secret comes through all the same
    for sock in crowd:
        sock.close()


def test_strangers_do_not_fill_the_log(tcp, caplog):
    for _ in range(20):
        with stranger(tcp, b"GET / HT") as sock:
            over(sock)
    assert 1 <= caplog.text.count("tcp: a connection was ended") <= 3


def test_no_more_threads_cost_a_connection_and_not_the_listener(tcp, monkeypatch, caplog):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "kv-tcp":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with stranger(tcp, HELLO_PROVEN) as sock:
        over(sock)
    assert "can't start new thread" in caplog.text
    monkeypatch.undo()
    with socket.create_connection(("127.0.0.1", tcp.port), timeout=5) as sock:
        greet(sock, KEY, 1.0)


def serving(says):
    """A target of our own: what it says after the hello, and then waits."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        with connection, listener:
            connection.recv(8)
            connection.sendall(says[0])
            connection.recv(ANSWER_BYTES)
            connection.sendall(says[1])
            connection.recv(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ((b"HTTP/1.1", b""), "not one of ours"),
        ((HELLO_PROVEN + bytes(NONCE_BYTES), bytes(PROOF_BYTES)), "another cluster secret"),
    ],
)
def test_a_target_that_does_not_prove_itself_gets_nothing(says, said):
    port, thread = serving(says)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        with pytest.raises(BadFrame, match=said):
            greet(sock, KEY, 1.0)
        shut(sock)
    thread.join(5)
    assert not thread.is_alive()


# shm


@pytest.fixture
def door():
    with SharedRegion(4096) as region:
        made = Door((region.fd, 4096), region.fd, session_key(SECRET, "shm"), Terms(hello_s=0.6, max_strangers=3))
        yield made
        made.close()


def guest(door, first=b""):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect("\0" + door.name)
    sock.sendall(first)
    return sock


def enter(door):
    keys = knock(door.name, session_key(SECRET, "shm"))
    assert keys.num_bytes == 4096
    keys.connection.close()
    os.close(keys.memory_fd)
    os.close(keys.table_fd)


def ended_with(sock):
    """What a guest gets until it is shown out: the bytes and the descriptors."""
    data, fds = b"", []
    try:
        while True:
            more, got, _, _ = socket.recv_fds(sock, 4096, 4)
            fds += got
            if not more:
                return data, fds
            data += more
    except ConnectionResetError:
        return data, fds


def test_descriptors_are_for_who_has_proven_himself(door):
    for first in (b"x" * ANSWER_BYTES, b"x", SourceHandshake(session_key(OTHER, "shm"), bytes(16)).answer):
        with guest(door, first) as sock:
            data, fds = ended_with(sock)
            assert fds == []
            assert len(data) <= 8 + NONCE_BYTES
    enter(door)


def test_no_descriptor_left_costs_a_guest_a_moment_and_not_the_door(door, caplog):
    early = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (early.fileno() + 1, limits[1]))
    try:
        early.connect("\0" + door.name)
        deadline = time.monotonic() + 5
        while "Too many open files" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    enter(door)
    early.close()


def test_guests_who_say_nothing_are_shown_out_and_many_make_room(door):
    with guest(door) as sock:
        began = time.monotonic()
        assert ended_with(sock)[1] == []
        assert 0.3 < time.monotonic() - began < 1.5
    crowd = [guest(door) for _ in range(5)]
    began = time.monotonic()
    ended_with(crowd[0])
    assert time.monotonic() - began < 0.5, "the oldest makes room"
    enter(door)
    for sock in crowd:
        sock.close()
    with guest(door):  # one who is there when it closes
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("hello", "answer", "said"),
    [
        (b"NOTADOOR" + bytes(16), b"", "not a door of this version"),
        (b"DIPTSHM\x02" + bytes(3), b"", "not a door of this version"),
        (b"DIPTSHM\x02" + bytes(16), bytes(16 + PROOF_BYTES), "another cluster secret"),
        (b"DIPTSHM\x02" + bytes(16), b"", "does not accept our cluster secret"),
    ],
)
def test_a_door_that_does_not_prove_itself_is_not_entered(hello, answer, said):
    name = f"diptych-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(1)

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(hello)
                connection.recv(ANSWER_BYTES)
                if answer:
                    socket.send_fds(connection, [answer], [listener.fileno()])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TransferFailed, match=said):
            knock(name, session_key(SECRET, "shm"))
        thread.join(5)
        assert len(os.listdir("/proc/self/fd")) == before, "what it handed out is closed"


async def test_an_address_of_another_kind_is_none():
    async with Pair("tcp", SECRET, SECRET) as pair:
        with pytest.raises(TransferFailed):
            await pair.source.connect(ConnectorAddress("shm", "x"))
        await asyncio.sleep(0)
