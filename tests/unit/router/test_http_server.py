"""Connections that do not go on are cut, whatever they do not do; those that go on slowly are not."""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.config import HttpConfig
from router.http.protocol import BoundedHttp
from router.http.server import HttpServer, _Connection

STALL_S = 0.4
CHUNK = b"x" * 65536
REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"


class App:
    """Reads the body, then sends chunks until all are sent or the client has left."""

    def __init__(self, num_chunks: int = 256) -> None:
        self.num_chunks = num_chunks
        self.bodies: list[bytes] = []
        self.left = asyncio.Event()
        self.sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if message["type"] == "http.disconnect":
            self.left.set()
            return
        self.bodies.append(body)
        sending = asyncio.ensure_future(self._send(send))
        if (await receive())["type"] == "http.disconnect" and not self.sent:
            self.left.set()
        sending.cancel()
        await asyncio.wait((sending,))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self.num_chunks):
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            if self.left.is_set():
                return
            await asyncio.sleep(0)
        self.sent = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    server = HttpServer(HttpConfig(port=0, stall_s=STALL_S, keep_alive_s=30), app)
    port = server.bind()
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.0)


def connected(port: int, buffer_bytes: int = 4096) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    return client


async def cut(client: socket.socket) -> None:
    """Read until the server has cut the connection."""
    loop = asyncio.get_running_loop()
    try:
        while await loop.sock_recv(client, 65536):
            pass
    except ConnectionResetError:
        pass


async def test_a_client_that_does_not_read_is_one_that_has_left() -> None:
    app = App()
    async with serving(app) as port:
        with connected(port) as client:
            await asyncio.get_running_loop().sock_sendall(client, REQUEST)
            await asyncio.wait_for(app.left.wait(), 20 * STALL_S)
            await asyncio.wait_for(cut(client), 20 * STALL_S)


@pytest.mark.parametrize("sent", [b"", REQUEST[:20], REQUEST[:-2]], ids=["nothing", "half a head", "half a body"])
async def test_a_request_that_does_not_arrive_is_given_up(sent: bytes) -> None:
    app = App()
    async with serving(app) as port:
        with connected(port) as client:
            await asyncio.get_running_loop().sock_sendall(client, sent)
            await asyncio.wait_for(cut(client), 20 * STALL_S)
    assert app.bodies == []


async def test_the_second_request_of_a_connection_must_arrive_too() -> None:
    app = App(num_chunks=1)
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST + REQUEST[:30])
        await asyncio.wait_for(reader.read(), 20 * STALL_S)
        writer.close()
    assert app.bodies == [b"body"]


async def test_an_answer_that_is_one_piece_may_be_read_slowly() -> None:
    """It is in our buffer at once, and stays above what asyncio calls read for longer than the limit."""
    whole = b"x" * (8 << 20)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": whole})

    async with serving(app) as port:
        with connected(port, 65536) as client:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, REQUEST)
            size = 0
            while size < len(whole):
                read = await asyncio.wait_for(loop.sock_recv(client, 512 * 1024), 20 * STALL_S)
                assert read, "cut off"
                size += len(read)
                await asyncio.sleep(0.01)


async def test_a_client_that_reads_slowly_and_an_idle_connection_are_left_alone() -> None:
    """Its pauses are shorter than the limit, its whole answer takes longer; then it is idle for longer than the limit."""
    app = App()
    async with serving(app) as port:
        with connected(port, 65536) as client:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, REQUEST)
            size, began = 0, loop.time()
            while size < app.num_chunks * len(CHUNK):
                read = await asyncio.wait_for(loop.sock_recv(client, len(CHUNK)), 20 * STALL_S)
                assert read, "cut off"
                size += len(read)
                await asyncio.sleep(STALL_S / 100)
            assert loop.time() - began > STALL_S
            await asyncio.sleep(1.5 * STALL_S)
            await loop.sock_sendall(client, REQUEST)
            assert await asyncio.wait_for(loop.sock_recv(client, 65536), 20 * STALL_S)
            assert len(app.bodies) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="how a vanished host is noticed is Linux's")
def test_a_client_whose_host_vanished_is_noticed_within_the_limit() -> None:
    server = HttpServer(HttpConfig(port=0, stall_s=60.0), App())
    port = server.bind()
    assert server._socket is not None
    server._socket.listen()
    with socket.create_connection(("127.0.0.1", port)), server._socket, server._socket.accept()[0] as accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count, unacknowledged_ms = (
            accepted.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )
    assert idle + interval * count == 60, "while nothing is sent"
    assert unacknowledged_ms == 60_000, "while something is"


async def test_a_request_that_we_do_not_read_is_not_taken_for_one_that_does_not_come():
    """Behind one that is still being served, in the same connection, half of it on the way."""
    hold, served = asyncio.Event(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        served.append(scope["path"])
        await hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        second = REQUEST.replace(b"/", b"/second", 1)
        writer.write(REQUEST + second[:-2])
        await asyncio.sleep(2.5 * STALL_S)
        hold.set()
        writer.write(second[-2:])
        for _ in range(2):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert served == ["/", "/second"]


async def test_uvicorn_has_what_this_door_leans_on_beside_its_interface():
    """Names that uvicorn may change in any version: which one is meant says its pin in pyproject.toml (ADR 0010)."""
    config = uvicorn.Config(App(), http=HttpToolsProtocol, lifespan="off", log_config=None)
    config.load()
    connection = HttpToolsProtocol(config, uvicorn.Server(config).server_state, {})
    assert connection.cycle is None
    assert (connection.pipeline, connection.timeout_keep_alive_task) == (deque(), None)
    for name in ("loop", "transport", "scope", "client", "flow"):
        assert name in vars(connection)
    ours = {name for base in (BoundedHttp, _Connection) for name in vars(base) if not name.startswith("_")}
    added = {"stall_s", "guests", "knock", "refuse", "make_room"}
    assert [name for name in ours - added if not callable(getattr(HttpToolsProtocol, name, None))] == []
    transport = asyncio.Transport()
    flow = FlowControl(transport)
    assert flow.read_paused is False
    flow.resume_reading()
    cycle_takes = inspect.signature(RequestResponseCycle.__init__).parameters
    assert {"message_event", "on_response", "flow"} <= set(cycle_takes)
    source = inspect.getsource(RequestResponseCycle.__init__)
    assert [
        name for name in ("disconnected", "response_complete", "message_event") if f"self.{name} = " not in source
    ] == []
    assert callable(uvicorn.Server.capture_signals)
    assert {"started", "should_exit", "server_state"} <= vars(uvicorn.Server(config)).keys()
    assert {"timeout_graceful_shutdown", "proxy_headers"} <= vars(config).keys()
