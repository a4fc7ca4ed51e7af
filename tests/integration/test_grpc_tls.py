"""The users' gRPC door with certificates of users, and the workers' port with those of the cluster: neither lets the other's in."""

from dataclasses import replace

import grpc
import pytest

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from diptych_client import AsyncClient, Tls, Unavailable
from router.config import AccessConfig, HttpConfig
from rpc.authority import CA_FILE
from rpc.server import ServerConfig
from rpc.tls import TlsConfig
from tests.identities import EXPIRED, Identities
from tests.integration.router_harness import MODEL, router_config, running_router

LONELY = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture
def users(tmp_path) -> Identities:
    return Identities(tmp_path / "users")


@pytest.fixture
def cluster(tmp_path) -> Identities:
    return Identities(tmp_path / "cluster")


@pytest.fixture
async def router(tmp_path, users, cluster):
    """Shows the cluster's certificate at both; asks for the users' authority at one and for the cluster's at the other."""
    shown = cluster.config("router", demand=True)
    door = replace(shown, client_ca=users.issue("anybody") / CA_FILE)
    doors = {"http": HttpConfig(port=0, tls=door), "grpc": ServerConfig(port=0, tls=door)}
    access = AccessConfig(workers=ServerConfig(port=0, tls=shown), tls=shown)
    async with running_router(router_config(tmp_path, access=access, **doors)) as running:
        yield running


def credentials(server: TlsConfig, own: TlsConfig | None) -> grpc.ChannelCredentials:
    """Believes who issued `server`; shows `own`."""
    assert server.ca is not None
    ca = server.ca.read_bytes()
    if own is None:
        return grpc.ssl_channel_credentials(ca)
    assert own.key is not None and own.cert is not None
    return grpc.ssl_channel_credentials(ca, own.key.read_bytes(), own.cert.read_bytes())


async def models(port: int, given: grpc.ChannelCredentials) -> list[str] | grpc.StatusCode:
    """What the users' door answers."""
    async with grpc.aio.secure_channel(f"localhost:{port}", given, LONELY) as channel:
        try:
            answer = await inference_pb2_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return [model.name for model in answer.models]


async def announced(port: int, given: grpc.ChannelCredentials) -> grpc.StatusCode:
    """What the workers' port answers to a message that says nothing."""
    async with grpc.aio.secure_channel(f"localhost:{port}", given, LONELY) as channel:
        try:
            await registry_pb2_grpc.RegistryStub(channel).Announce(registry_pb2.AnnounceRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_each_port_lets_in_its_own_and_nobody_else(router, users, cluster):
    server, user, worker = cluster.config("reader"), users.config("alice"), cluster.config("decode-0")
    assert await models(router.ports.grpc, credentials(server, user)) == [MODEL]
    assert await announced(router.ports.workers, credentials(server, worker)) is grpc.StatusCode.INVALID_ARGUMENT
    for stranger in (worker, None, users.config("late", period=EXPIRED)):
        assert await models(router.ports.grpc, credentials(server, stranger)) is grpc.StatusCode.UNAVAILABLE
    for stranger in (user, None, cluster.config("late", period=EXPIRED)):
        assert await announced(router.ports.workers, credentials(server, stranger)) is grpc.StatusCode.UNAVAILABLE


async def test_the_typed_client_shows_its_certificate(router, users, cluster):
    server, user = cluster.config("reader"), users.config("alice")
    assert server.ca is not None and user.cert is not None and user.key is not None
    tls = Tls(server.ca.read_bytes(), user.cert.read_bytes(), user.key.read_bytes())
    async with AsyncClient(f"localhost:{router.ports.grpc}", tls=tls) as client:
        assert [model.name for model in await client.models(timeout_s=5)] == [MODEL]
    async with AsyncClient(f"localhost:{router.ports.grpc}", tls=Tls(server.ca.read_bytes())) as client:
        with pytest.raises(Unavailable):
            await client.models(timeout_s=3)
