"""`diptych health` asks servers that are well, are not yet, are not there or do not answer; over TLS, too."""

import asyncio
import contextlib
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from cli.main import run
from router.config import HttpConfig
from router.http.server import HttpServer
from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE
from rpc.server import RpcServer, ServerConfig
from tests.identities import Identities

# A TLS handshake that is refused, a server that says goodbye: lines that gRPC's core writes itself.
GRPCS_OWN = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \w+\.cc:\d+\] ")


async def asked(capfd, *args: str) -> tuple[int, str]:
    """Exit code, and what it said."""
    code = await asyncio.to_thread(run, ["health", *args])
    shown = capfd.readouterr()
    assert (shown.out == "") == (code != 0)
    said = [line for line in shown.err.splitlines() if not GRPCS_OWN.match(line)]
    assert len(said) == (1 if code else 0)
    return code, shown.out + "".join(said)


@asynccontextmanager
async def grpc_server(tls=None):
    server = RpcServer(ServerConfig(tls=tls), ())
    port = await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def http_server(status: int, tls=None):
    async def health(request):
        return JSONResponse({"ready": {"decode": 0}}, status)

    server = HttpServer(HttpConfig(port=0, tls=tls), Starlette(routes=[Route("/health", health)]))
    port = server.bind()
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_grpc_server_is_well_when_it_says_so(capfd):
    async with grpc_server() as (server, address):
        code, said = await asked(capfd, address)
        assert (code, "NOT_SERVING" in said) == (1, True)
        await server.set_serving(True)
        assert await asked(capfd, address) == (0, f"{address} is well\n")
    code, said = await asked(capfd, address, "--timeout", "2")
    assert (code, address in said) == (1, True)


async def test_a_router_is_well_when_it_can_serve(capfd):
    async with http_server(200) as address:
        assert (await asked(capfd, f"http://{address}/"))[0] == 0
    async with http_server(503) as address:
        code, said = await asked(capfd, f"http://{address}")
        assert code == 1
        assert "503" in said and '"decode":0' in said
    code, said = await asked(capfd, f"http://{address}")
    assert (code, "refused" in said) == (1, True)


async def test_who_does_not_answer_in_time_is_not_well(capfd):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for target in (address, f"http://{address}"):
            assert (await asked(capfd, target, "--timeout", "0.2"))[0] == 1


def dripping(server: socket.socket, said: bytes) -> None:
    """Answers one caller, a byte at a time, for longer than he waits."""
    with server.accept()[0] as caller, contextlib.suppress(OSError):
        for byte in said.ljust(60, b"x"):
            caller.sendall(bytes([byte]))
            time.sleep(0.02)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
async def test_who_answers_for_ever_has_not_answered(capfd, said):
    """Each byte comes in time; the whole of them does not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        drips = asyncio.create_task(asyncio.to_thread(dripping, server, said))
        code, said_of_it = await asked(capfd, f"http://127.0.0.1:{server.getsockname()[1]}", "--timeout", "0.3")
        await drips
    assert (code, "no whole answer" in said_of_it) == (1, True)


async def test_a_status_that_nobody_knows_is_not_well(capfd):
    def check(request, context):
        return b"\x08\x4d"  # status: 77

    handler = grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )
    server = grpc.server(ThreadPoolExecutor(1), handlers=(handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    code, said = await asked(capfd, f"127.0.0.1:{port}")
    server.stop(0).wait()
    assert (code, "status 77" in said) == (1, True)


async def test_over_tls_the_name_is_checked_and_a_certificate_shown(capfd, tmp_path):
    known = Identities(tmp_path)
    mine, inside = known.issue("me"), {"names": ("worker.cluster",)}
    files = ["--tls-ca", str(mine / CA_FILE), "--tls-cert", str(mine / CERT_FILE), "--tls-key", str(mine / KEY_FILE)]
    named = [*files, "--tls-server-name", "worker.cluster"]
    async with grpc_server(known.config("worker", demand=True, **inside)) as (server, address):
        await server.set_serving(True)
        assert (await asked(capfd, address, *named))[0] == 0
        for wrong in (files, named[:2] + named[-2:], []):  # another name, no certificate, no TLS
            assert (await asked(capfd, address, *wrong, "--timeout", "1"))[0] == 1
    async with http_server(200, known.config("router", **inside)) as address:
        assert (await asked(capfd, f"https://{address}", *named))[0] == 0
        assert (await asked(capfd, f"https://{address}", *files))[0] == 1
        assert (await asked(capfd, f"https://{address}", *files, "--tls-server-name", ".x"))[0] == 2


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["localhost"], "HOST:PORT"),
        (["https://127.0.0.1:1"], "--tls-ca"),
        (["http://127.0.0.1:x"], "127.0.0.1:x"),
        (["http://127.0.0.1:0"], "1 to 65535"),
        (["http://"], "no host"),
        (["http:///"], "no host"),
        (["http://:8000"], "must be"),
        (["http://[::1"], "[::1"),
        (["http://a..b:1"], "a..b"),
        (["http://127.0.0.1:1/\N{LATIN SMALL LETTER E WITH ACUTE}"], "must be"),
        (["http://127.0.0.1:1?x=1"], "must be"),
        (["\udcff:80"], "characters"),
        (["127.0.0.1:" + "1" * 5000], "HOST:PORT"),
        (["127.0.0.1:\N{ARABIC-INDIC DIGIT ONE}"], "HOST:PORT"),
        (["127.0.0.1:1", "--tls-server-name", "a"], "--tls-ca"),
    ],
)
async def test_a_question_that_cannot_be_asked_is_a_bad_argument(args, named, capfd):
    code, said = await asked(capfd, *args)
    assert (code, named in said) == (2, True)
