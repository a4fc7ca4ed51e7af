"""Which connector carries a pair, and that nothing is passed over in silence."""

import logging

import pytest

from contracts.clock import VirtualClock
from contracts.errors import ConfigError, TransferFailed
from contracts.worker import ConnectorAddress
from kv_transfer.choose import Backend, NetworkConfig, _nixl, _without_rdma, candidates, make_connectors, reach
from kv_transfer.local import LocalConnector, LocalHub
from kv_transfer.nixl import NixlConnector
from kv_transfer.region import SharedRegion
from kv_transfer.shm import ShmConnector
from kv_transfer.tcp import TcpConnector

NETWORK = NetworkConfig()
NO_SHM = (
    Backend("shm", lambda: "memfd and its locks: not here", lambda _: ShmConnector()),
    Backend("tcp", lambda: None, lambda network: TcpConnector(network.bind_host)),
)


def kinds(connectors):
    return [c.capabilities.kind for c in connectors]


def test_auto_is_all_that_works_best_first():
    made = kinds(make_connectors(("auto",), NETWORK))
    assert [kind for kind in made if kind != "nixl"] == ["shm", "tcp"]
    assert made[0] == "shm"


def test_named_ones_come_best_first_and_once():
    assert kinds(make_connectors(("tcp", "shm", "tcp"), NETWORK)) == ["shm", "tcp"]
    assert kinds(make_connectors(("tcp",), NETWORK)) == ["tcp"]


def test_auto_says_what_it_does_without(caplog):
    with caplog.at_level(logging.WARNING):
        assert kinds(make_connectors(("auto",), NETWORK, NO_SHM)) == ["tcp"]
    assert "connector shm cannot be used on this machine: memfd and its locks: not here" in caplog.text


RDMA = (*NO_SHM, Backend("nixl", lambda: None, lambda _: NixlConnector(), lambda: None))
SLOW = (*NO_SHM, Backend("nixl", lambda: None, lambda _: NixlConnector(), lambda: "slower here"))


def test_auto_leaves_out_what_is_slower_here_and_says_so(caplog):
    with caplog.at_level(logging.INFO):
        assert kinds(make_connectors(("auto",), NETWORK, SLOW)) == ["tcp"]
    assert "connector nixl is not taken: slower here" in caplog.text
    assert kinds(make_connectors(("nixl",), NETWORK, SLOW)) == ["nixl"]
    assert set(kinds(make_connectors(("auto",), NETWORK, RDMA))) == {"tcp", "nixl"}


def test_nixl_is_worth_it_with_rdma_only():
    assert _without_rdma(lambda: True) is None
    assert "shm and tcp are faster" in _without_rdma(lambda: False)


@pytest.mark.parametrize(
    ("port", "advertised", "want"), [(0, None, (0, None)), (7100, 9000, (7101, 9001)), (65_535, None, (0, None))]
)
def test_nixl_is_at_the_port_after_that_of_tcp(port, advertised, want):
    made = _nixl(NetworkConfig(port=port, advertise_port=advertised))
    assert (made._where[1], made._advertised[1]) == want


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("shm",), "shm cannot be used on this machine: memfd"),
        (("rdma",), "got 'rdma', must be one of auto, shm, tcp"),
        (("auto", "tcp"), "got 'auto'"),
        ((), "got none"),
    ],
)
def test_what_cannot_be_is_a_config_error(asked, message):
    with pytest.raises(ConfigError, match=message):
        make_connectors(asked, NETWORK, NO_SHM)


def test_candidates_are_what_both_have():
    shm, tcp = ShmConnector(), TcpConnector()
    theirs = (ConnectorAddress("tcp", "h:1"), ConnectorAddress("nixl", "x"), ConnectorAddress("shm", "n"))
    assert [(c, a.address) for c, a in candidates((tcp, shm), theirs)] == [(shm, "n"), (tcp, "h:1")]
    assert candidates((shm,), theirs[:2]) == ()


@pytest.fixture
async def tcp_pair():
    with SharedRegion(4096) as one, SharedRegion(4096) as other:
        source, target, shm = TcpConnector(), TcpConnector(), ShmConnector()
        source.expose(one)
        shm.expose(one)
        target.expose(other)
        yield source, target, shm
        for connector in (source, target, shm):
            await connector.close()


async def test_auto_falls_back_aloud_when_the_best_does_not_reach(tcp_pair, caplog):
    source, target, shm = tcp_pair
    theirs = (ConnectorAddress("shm", "diptych-of-another-host"), target.address())
    with caplog.at_level(logging.INFO):
        connector, address = await reach((shm, source), theirs, "decode-1")
    assert (connector, address) == (source, target.address())
    assert "connector shm does not reach decode-1: shm: no door diptych-of-another-host on this host" in caplog.text
    assert "KV for decode-1 goes through tcp (shm: no door" in caplog.text


async def test_nothing_reaches(tcp_pair):
    source, _, shm = tcp_pair
    with pytest.raises(TransferFailed, match=r"no connector reaches d \(ours: shm, tcp; theirs: shm; shm: no door x"):
        await reach((shm, source), (ConnectorAddress("shm", "x"),), "d")
    with pytest.raises(TransferFailed, match=r"ours: none; theirs: none"):
        await reach((), (), "d")


def test_preferences_are_in_order():
    ranked = [LocalConnector(LocalHub(), VirtualClock()), ShmConnector(), TcpConnector()]
    preferences = [c.capabilities.preference for c in ranked]
    assert preferences == sorted(preferences, reverse=True)
    assert [c.capabilities.one_sided for c in ranked] == [True, True, False]
    assert [c.capabilities.same_host_only for c in ranked] == [True, True, False]
    assert [c.capabilities.same_process_only for c in ranked] == [True, False, False]
