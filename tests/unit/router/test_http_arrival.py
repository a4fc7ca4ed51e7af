"""How long bytes have waited to be read is known on every loop, with TLS or without; what was read at once has not waited."""

import asyncio
import socket
import sys
import time

import pytest
import uvloop

from router.http.arrival import waited_s
from rpc.tls import TlsFiles
from rpc.tls_context import client_context, server_context
from tests.identities import Identities

BUSY_S = 0.1


class Heard(asyncio.Protocol):
    def __init__(self, waits):
        self.waits = waits

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.waits.append(waited_s(self.transport))
        self.transport.write(data)


async def waits(tls):
    """Of bytes that come while the loop is free, and of some that come while it is busy."""
    heard, loop = [], asyncio.get_running_loop()
    context = None if tls is None else server_context(TlsFiles(tls))
    server = await loop.create_server(lambda: Heard(heard), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    def in_thread():
        with socket.create_connection(("127.0.0.1", port)) as plain:
            sock = plain if tls is None else client_context(tls).wrap_socket(plain, server_hostname="localhost")
            with sock:
                sock.sendall(b"a")
                assert sock.recv(1) == b"a"
                loop.call_soon_threadsafe(time.sleep, BUSY_S)
                time.sleep(BUSY_S / 10)  # until it has begun
                sock.sendall(b"b")
                assert sock.recv(1) == b"b"

    await asyncio.to_thread(in_thread)
    server.close()
    return heard


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says it")
@pytest.mark.parametrize(("loop", "secured"), [(asyncio, False), (uvloop, False), (uvloop, True)])
def test_bytes_that_a_busy_loop_leaves_unread_have_waited(tmp_path, loop, secured):
    tls = Identities(tmp_path).config("one") if secured else None
    at_once, late = loop.run(waits(tls))
    assert at_once < BUSY_S / 2
    assert BUSY_S / 2 < late < 10 * BUSY_S


def test_where_nobody_says_nothing_has_waited():
    class Nameless:
        def get_extra_info(self, name):
            return None

    assert waited_s(Nameless()) == 0.0
