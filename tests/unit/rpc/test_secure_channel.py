"""Real handshakes between our servers and our channels: who is believed, who is refused, and certificates that are renewed."""

import asyncio
import ssl
import warnings
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.errors import WorkerLost
from rpc.channel import ChannelConfig, open_channel, wait_connected
from rpc.errors import from_rpc_error
from rpc.secure_channel import SecureChannel, opener_for
from rpc.server import RpcServer, ServerConfig
from rpc.tls import TlsConfig, TlsFiles
from tests.identities import EXPIRED, Identities

QUICK = ChannelConfig(connect_timeout_s=2.0)


@pytest.fixture
def known(tmp_path) -> Identities:
    return Identities(tmp_path / "known")


@pytest.fixture
def strangers(tmp_path) -> Identities:
    return Identities(tmp_path / "strangers")


@asynccontextmanager
async def serving(tls: TlsConfig | None):
    server = RpcServer(ServerConfig(tls=tls), ())
    port = await server.start()
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def check(channel: grpc.aio.Channel) -> bool:
    """Raises DiptychError."""
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "the server") from error
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def ask(address: str, tls: TlsConfig | None) -> bool:
    async with opener_for(tls)(address, QUICK) as channel:
        return await check(channel)


async def refused(address: str, tls: TlsConfig | None) -> str:
    with pytest.raises(WorkerLost) as caught:
        await ask(address, tls)
    return caught.value.message


async def test_both_ends_show_who_they_are(known):
    async with serving(known.config("server", demand=True)) as address:
        assert await ask(address, known.config("client"))


async def test_who_does_not_talk_tls_is_refused_and_the_server_goes_on(known):
    config = known.config("server")
    async with serving(config) as address:
        assert "it may want TLS" in await refused(address, None)
        _, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        writer.close()
        assert await ask(address, config)
    async with serving(None) as address:
        assert "it does not talk TLS" in await refused(address, config)
        assert await ask(address, None)


async def test_a_server_of_another_authority_is_not_believed(known, strangers):
    async with serving(strangers.config("server")) as address:
        assert "not of an authority in --tls-ca" in await refused(address, known.config("client"))


async def test_a_client_of_another_authority_and_one_without_a_certificate_are_refused(known, strangers):
    config = known.config("server", demand=True)
    stranger = strangers.config("client")
    async with serving(config) as address:
        assert "a certificate of ours" in await refused(address, TlsConfig(ca=config.ca))
        await refused(address, TlsConfig(ca=config.ca, cert=stranger.cert, key=stranger.key))
        assert await ask(address, config)


async def test_a_server_with_another_name_is_not_believed_unless_that_name_is_meant(known):
    async with serving(known.config("server", names=("workers.example",))) as address:
        assert "see --tls-server-name" in await refused(address, known.config("client"))
        assert await ask(address, known.config("client", server_name="workers.example"))
        await refused(address, known.config("client", server_name="others.example"))


async def test_a_certificate_that_expired_while_its_process_ran_is_refused_at_both_ends(known, monkeypatch):
    monkeypatch.setattr("rpc.tls._check_dates", lambda *_: None)  # as if the check at the start was long ago
    good, old = known.config("good", demand=True), known.config("old", period=EXPIRED)
    async with serving(old) as address:
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(address, good)
    async with serving(good) as address:
        await refused(address, old)


async def test_a_server_shows_what_is_renewed_and_connections_that_stand_go_on(known, strangers):
    config = known.config("server", demand=True)
    old = known.config("client")
    async with serving(config) as address, opener_for(old)(address, QUICK) as standing:
        assert await check(standing)
        strangers.issue("server")  # another authority altogether, as after its own renewal
        for path in (config.key, config.cert, config.ca):
            (strangers.folder / "server" / path.name).replace(path)
        assert await ask(address, strangers.config("client"))
        await refused(address, old)
        assert await check(standing)


async def test_a_channel_that_lost_its_connection_comes_back_with_what_is_renewed(known, strangers):
    """gRPC's own channel would show for ever what it was made with."""
    client = known.config("client")
    server = RpcServer(ServerConfig(tls=known.config("server", demand=True)), ())
    port = await server.start()
    await server.set_serving(True)
    channel = SecureChannel(TlsFiles(client), f"127.0.0.1:{port}", QUICK)
    stub = health_pb2_grpc.HealthStub(channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)
    async with asyncio.timeout(5):
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.01)
    waiting = asyncio.ensure_future(channel.wait_for_state_change(channel.get_state()))
    strangers.issue("client")
    for path in (client.key, client.cert, client.ca):
        (strangers.folder / "client" / path.name).replace(path)
    again = RpcServer(ServerConfig(port=port, tls=strangers.config("server", demand=True)), ())
    await again.start()
    await again.set_serving(True)
    try:
        await wait_connected(channel, f"127.0.0.1:{port}", 5)
        assert await check(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(5):
            await waiting  # whoever watches the old connection hears that it is over
    finally:
        await channel.close()
        await again.stop(0)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_grpc_ports_speak_no_older_tls_and_no_suite_without_forward_secrecy(known, newest):
    config = known.config("server")
    context = ssl.create_default_context(cafile=config.ca)
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.maximum_version = newest
    async with serving(config) as address:
        host, port = address.split(":")
        if newest is ssl.TLSVersion.TLSv1_1:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(host, port, ssl=context)
            return
        _, writer = await asyncio.open_connection(host, port, ssl=context)
        suite = writer.get_extra_info("cipher")[0]
        assert suite.startswith(("ECDHE", "TLS_"))
        writer.close()


async def test_without_an_authority_channels_are_plain(known):
    config = known.config("server")
    assert opener_for(None) is open_channel
    assert opener_for(TlsConfig(cert=config.cert, key=config.key)) is open_channel


async def test_a_closed_channel_opens_nothing(known):
    channel = opener_for(known.config("client"))("127.0.0.1:1", QUICK)
    await channel.close()
    known.issue("client")
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    with pytest.raises(WorkerLost, match="closed"):
        await wait_connected(channel, "127.0.0.1:1", 1)
