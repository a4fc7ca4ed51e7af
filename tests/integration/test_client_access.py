"""Both clients and every example at a router with keys and TLS: who is let in, and what those hear who are not."""

import asyncio

import pytest

from diptych_client import AsyncClient, Client, RpcFailed, Tls, Unauthenticated, Unavailable
from router.config import AccessConfig, HttpConfig
from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE
from rpc.server import ServerConfig
from tests.identities import Identities
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.test_api_keys import ALICE, key_file
from tests.integration.test_examples import examples_say
from tests.integration.test_router_grpc import PROMPT, TOKENS


@pytest.fixture
def known(tmp_path) -> Identities:
    return Identities(tmp_path / "known")


def config(tmp_path, known, **tls):
    listens = known.config("router", **tls)
    access = AccessConfig(api_keys=key_file(tmp_path), workers=ServerConfig(port=0))
    doors = {"http": HttpConfig(port=0, tls=listens), "grpc": ServerConfig(port=0, tls=listens)}
    return router_config(tmp_path, access=access, **doors)


@pytest.fixture
async def served(tmp_path, known):
    async with running_router(config(tmp_path, known)) as running:
        await running.cluster.pools(1, 1)
        yield running


def ca_of(identities) -> bytes:
    return (identities.issue("someone") / CA_FILE).read_bytes()


async def asked(target: str, api_key: str | None, tls: Tls | None) -> list[list[int]]:
    """The tokens that each client is given, asyncio's and the one for threads."""
    async with AsyncClient(target, api_key=api_key, tls=tls) as client:
        assert [model.name for model in await client.models(timeout_s=5)] == [MODEL]
        one = await client.generate(PROMPT, max_tokens=6, seed=3, timeout_s=5).answer()

    def ask():
        with Client(target, api_key=api_key, tls=tls) as client:
            assert client.tokenize("x", timeout_s=5).token_ids
            return client.generate(PROMPT, max_tokens=6, seed=3, timeout_s=5).answer()

    return [one.token_ids, (await asyncio.to_thread(ask)).token_ids]


async def refused(target: str, api_key: str | None, tls: Tls | None, kind: type[RpcFailed]) -> list[str]:
    """What each client says."""
    said = []
    async with AsyncClient(target, api_key=api_key, tls=tls) as client:
        for ask in (client.models(timeout_s=2), client.generate(PROMPT, timeout_s=2).answer()):
            with pytest.raises(kind) as caught:
                await ask
            said.append(caught.value.message)

    def ask():
        with Client(target, api_key=api_key, tls=tls) as client:
            for ask in (lambda: client.models(timeout_s=2), client.generate(PROMPT, timeout_s=2).answer):
                with pytest.raises(kind) as caught:
                    ask()
                said.append(caught.value.message)

    await asyncio.to_thread(ask)
    return said


async def test_the_key_and_the_authority_let_in(served, known):
    assert await asked(served.target, ALICE, Tls(ca=ca_of(known))) == [TOKENS, TOKENS]


@pytest.mark.parametrize("key", [None, "sk-diptych-wrong"])
async def test_without_the_key_both_clients_say_unauthenticated(served, known, key):
    for said in await refused(served.target, key, Tls(ca=ca_of(known)), Unauthenticated):
        assert "key" in said
        assert "sk-diptych-wrong" not in said


async def test_a_router_that_is_not_the_one_meant_gets_no_key(served, known, tmp_path):
    """Another's authority, another's name, and a client that speaks in the clear: no call is made, and each hears what to do."""
    strangers = Identities(tmp_path / "strangers")
    for tls, hint in (
        (Tls(ca=ca_of(strangers)), "its certificate is not of the authority in `tls=`"),
        (Tls(ca=ca_of(known), server_name="others.example"), "see `server_name` of Tls"),
        (None, "the port may speak TLS: give the client `tls="),
    ):
        for said in await refused(served.target, ALICE, tls, Unavailable):
            assert hint in said


async def test_a_client_with_tls_at_a_port_without_is_told_so(tmp_path, known):
    async with running_router(router_config(tmp_path)) as running:
        for said in await refused(running.target, None, Tls(ca=ca_of(known)), Unavailable):
            assert "does not speak TLS: leave `tls=` out" in said


async def test_a_certificate_of_ones_own_and_a_name_that_is_not_the_addresss(tmp_path, known):
    demanding = config(tmp_path, known, demand=True, names=("router.example",))
    async with running_router(demanding) as running:
        await running.cluster.pools(1, 1)
        mine = known.issue("mine")
        own = {"cert": (mine / CERT_FILE).read_bytes(), "key": (mine / KEY_FILE).read_bytes()}
        tls = Tls(ca=ca_of(known), server_name="router.example", **own)
        assert await asked(running.target, ALICE, tls) == [TOKENS, TOKENS]
        await refused(running.target, ALICE, Tls(ca=ca_of(known), server_name="router.example"), Unavailable)


async def test_every_example_with_a_key_and_an_authority(served, known):
    served.cluster.step_s = 0.001
    ca = str(known.issue("someone") / CA_FILE)
    url = f"https://127.0.0.1:{served.ports.http}"
    await examples_say(served, url, ("--api-key", ALICE, "--ca", ca), {"DIPTYCH_API_KEY": ALICE, "DIPTYCH_CA": ca})
