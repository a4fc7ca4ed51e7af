"""The HTTP door over TLS, by real handshakes: who is let in, what is said of who is not, and certificates that are renewed."""

import asyncio
import logging
import re
import socket
import ssl
import time
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace

import httpx
import pytest
import uvloop

from router.config import HttpConfig
from router.http.server import HttpServer
from rpc.tls import TlsConfig
from rpc.tls_context import client_context
from tests.identities import EXPIRED, Identities
from tests.integration.router_harness import MODEL, router_config, running_router

BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4}


@pytest.fixture
def known(tmp_path) -> Identities:
    return Identities(tmp_path / "known")


@pytest.fixture
def strangers(tmp_path) -> Identities:
    return Identities(tmp_path / "strangers")


@asynccontextmanager
async def serving(tmp_path, tls: TlsConfig):
    config = router_config(tmp_path)
    async with running_router(replace(config, http=HttpConfig(port=0, tls=tls))) as running:
        await running.cluster.pools(1, 1)
        yield running


def client(running, tls: TlsConfig, name: str = "localhost") -> httpx.AsyncClient:
    url = f"https://{name}:{running.ports.http}"
    return httpx.AsyncClient(base_url=url, verify=client_context(tls), trust_env=False, timeout=10)


def serial_of(certificate: dict | None) -> str | None:
    return None if certificate is None else certificate["serialNumber"]


async def shown(running, context: ssl.SSLContext) -> str:
    """Serial number of the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", running.ports.http, ssl=context, server_hostname="localhost")
    try:
        return serial_of(writer.get_extra_info("peercert"))
    finally:
        writer.close()
        await writer.wait_closed()


async def test_an_answer_whole_and_streamed(tmp_path, known):
    async with serving(tmp_path, known.config("server")) as running, client(running, known.config("me")) as http:
        assert (await http.post("/v1/completions", json=BODY)).json()["usage"]["completion_tokens"] == 4
        streamed = await http.post("/v1/completions", json={**BODY, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        (expires,) = re.findall(
            r"^diptych_tls_certificate_expires_seconds (\S+)$", (await http.get("/metrics")).text, re.M
        )
        assert abs(float(expires) - (time.time() + 86400)) < 3600
        async with client(running, known.config("me"), "127.0.0.1") as by_address:
            assert (await by_address.get("/version")).status_code == 200


BOTH_LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@BOTH_LOOPS
def test_who_does_not_talk_tls_is_cut_off_and_it_is_said(tmp_path, known, caplog, run):
    async def scene():
        async with serving(tmp_path, known.config("server")) as running:
            with pytest.raises(httpx.TransportError):
                await running.http.get("/health")
            async with client(running, known.config("me")) as http:
                assert (await http.get("/version")).status_code == 200

    with caplog.at_level(logging.INFO, "rpc.tls_context"):
        run(scene())
    assert "TLS handshake refused" in caplog.text


async def test_a_stranger_does_not_believe_us_nor_we_him(tmp_path, known, strangers):
    stranger = strangers.config("stranger")
    async with serving(tmp_path, known.config("server", demand=True)) as running:
        async with client(running, stranger) as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get("/version")
        server = known.config("me")
        for wrong in (
            TlsConfig(ca=server.ca),
            TlsConfig(ca=server.ca, cert=stranger.cert, key=stranger.key),
        ):
            async with client(running, wrong) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/version")
        async with client(running, server) as http:
            assert (await http.get("/version")).status_code == 200


async def test_another_name_and_a_client_that_is_over_are_refused(tmp_path, known, monkeypatch):
    monkeypatch.setattr("rpc.tls._check_dates", lambda *_: None)
    async with serving(tmp_path, known.config("server", demand=True, names=("router.example",))) as running:
        async with client(running, known.config("me")) as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get("/version")
            named = {"sni_hostname": "router.example"}
            assert (await http.get("/version", extensions=named)).status_code == 200
        async with client(running, known.config("old", period=EXPIRED)) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/version", extensions=named)


def visited(running, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession, bool]:
    """A request over a connection that offers to resume `session`: the connection's own, and whether it was answered."""
    with (
        socket.create_connection(("127.0.0.1", running.ports.http), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
    ):
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return connection.session, connection.recv(64).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@BOTH_LOOPS
def test_who_was_let_in_once_does_not_come_back_after_his_authority_was_dismissed(
    tmp_path, known, strangers, run, version
):
    """A session that is resumed shows no certificate again."""

    async def scene():
        tls = known.config("server", demand=True)
        async with serving(tmp_path, tls) as running:
            mine = client_context(known.config("me"))
            mine.check_hostname, mine.verify_mode = False, ssl.CERT_NONE  # it is the server who is to refuse
            mine.maximum_version = version
            session, answered = await asyncio.to_thread(visited, running, mine, None)
            assert answered
            strangers.issue("server")
            for path in (tls.key, tls.cert, tls.ca):
                (strangers.folder / "server" / path.name).replace(path)
            for again in (session, None):
                try:
                    _, answered = await asyncio.to_thread(visited, running, mine, again)
                except (ssl.SSLError, ConnectionError):
                    answered = False
                assert not answered

    run(scene())


@BOTH_LOOPS
def test_who_connects_and_says_nothing_takes_no_more_places_than_others_do(tmp_path, known, run):
    """Before a handshake is over nobody but us knows that there is a connection."""

    async def scene():
        tls = known.config("server")
        config = replace(router_config(tmp_path), http=HttpConfig(port=0, tls=tls, max_connections=8))
        async with running_router(config) as running, client(running, known.config("me")) as standing:
            assert (await standing.get("/version")).status_code == 200
            with ExitStack() as held:
                silent = [held.enter_context(socket.socket()) for _ in range(40)]
                for each in silent:
                    each.setblocking(False)
                    each.connect_ex(("127.0.0.1", running.ports.http))
                async with asyncio.timeout(10):
                    while sum(map(ended, silent)) < 32:
                        await asyncio.sleep(0.01)
                async with client(running, known.config("me")) as newcomer:
                    assert (await newcomer.get("/version")).status_code == 200
                assert (await standing.get("/version")).status_code == 200
                began = time.monotonic()
                await running.router.stop()
                assert time.monotonic() - began < 5
                assert all(map(ended, silent))

    run(scene())


@BOTH_LOOPS
def test_nobody_is_kept_waiting_for_a_server_that_lets_its_last_answers_end(known, run):
    async def scene():
        asked, go = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            asked.set()
            await go.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        server = HttpServer(HttpConfig(port=0, tls=known.config("server")), app)
        url = f"https://localhost:{server.bind()}"
        await server.start()
        async with httpx.AsyncClient(verify=client_context(known.config("me")), trust_env=False) as http:
            answer = asyncio.ensure_future(http.get(url))
            await asked.wait()
            stopping = asyncio.ensure_future(server.stop(10))
            await asyncio.sleep(0.05)
            with pytest.raises(httpx.ConnectError):
                await http.get(url, timeout=2)
            go.set()
            assert (await answer).status_code == 204
            began = time.monotonic()
            await stopping  # also of connections that their clients keep for later
            assert time.monotonic() - began < 5

    run(scene())


@BOTH_LOOPS
def test_a_handshake_has_a_time(tmp_path, known, run, monkeypatch):
    monkeypatch.setattr("router.http.tls.HELLO_S", 0.2)

    async def scene():
        async with serving(tmp_path, known.config("server")) as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.ports.http)
            writer.write(b"\x16\x03\x01")  # as a hello begins
            async with asyncio.timeout(5):
                with suppress(ConnectionError):
                    assert not await reader.read()
            writer.close()

    run(scene())


def ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def test_old_protocols_are_refused(tmp_path, known):
    async with serving(tmp_path, known.config("server")) as running:
        context = client_context(known.config("me"))
        assert await shown(running, context)
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown(running, context)


@BOTH_LOOPS
def test_what_is_renewed_is_shown_and_asked_for_while_standing_connections_go_on(tmp_path, known, strangers, run):
    """uvloop, on which routers run, has a TLS of its own."""
    run(renew(tmp_path, known, strangers))


async def renew(tmp_path, known, strangers):
    tls = known.config("server", demand=True)
    before = client_context(known.config("me"))
    async with serving(tmp_path, tls) as running, client(running, known.config("me")) as standing:
        assert (await standing.get("/version")).status_code == 200
        first = await shown(running, before)
        known.issue("server")  # as an operator renews: same authority
        second = await shown(running, before)
        assert second != first
        assert await shown(running, before) == second
        tls.key.write_text("half")  # as one who is not done yet
        assert await shown(running, before) == second
        strangers.issue("server")  # another authority for both directions
        for path in (tls.key, tls.cert, tls.ca):
            (strangers.folder / "server" / path.name).replace(path)
        assert await shown(running, client_context(strangers.config("me"))) not in (first, second)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shown(running, before)
        assert (await standing.get("/version")).status_code == 200
