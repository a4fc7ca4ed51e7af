"""What a router's flags make of its doors: who is shown what, who is asked for what, and what cannot stand together."""

from pathlib import Path

import pytest

from cli.clustersecurity import SecurityOptions, cluster_security
from cli.commands.doorflags import doors, tls_config
from contracts.errors import ConfigError
from rpc.server import ServerConfig
from rpc.tls import TlsConfig, TlsFiles
from tests.identities import Identities

CERT, KEY, CA, CLIENTS = Path("c"), Path("k"), Path("ca"), Path("cca")
NOTHING = {
    "tls_cert": None,
    "tls_key": None,
    "tls_ca": None,
    "tls_client_ca": None,
    "tls_server_name": "",
    "api_keys": None,
    "protect_metrics": False,
    "worker_host": None,
    "worker_port": None,
    "tls_user_cert": None,
    "tls_user_key": None,
    "tls_user_ca": None,
    "cluster_secret_file": None,
}
CLUSTER = {"tls_cert": CERT, "tls_key": KEY, "tls_ca": CA, "tls_client_ca": CLIENTS}
SHOWN = TlsConfig(cert=CERT, key=KEY)
MUTUAL = TlsConfig(cert=CERT, key=KEY, ca=CA, client_ca=CLIENTS)


def opened(**flags):
    return doors({**NOTHING, **flags}, "10.0.0.1")


def test_without_flags_everything_is_as_it_was():
    found = opened()
    assert (found.http, found.grpc) == (None, None)
    assert found.access.tls is None and found.access.workers is None and found.access.api_keys is None
    assert tls_config(NOTHING) is None


def test_workers_apart_must_show_certificates_and_users_need_none():
    found = opened(**CLUSTER, worker_port=7, api_keys=Path("keys"))
    assert found.http == found.grpc == SHOWN
    assert found.access.workers == ServerConfig(host="10.0.0.1", port=7, tls=MUTUAL)
    assert found.access.tls == MUTUAL
    assert opened(**CLUSTER, worker_port=7, worker_host="10.1.0.1").access.workers.host == "10.1.0.1"


def test_where_users_and_workers_share_a_port_everybody_there_shows_a_certificate():
    found = opened(**CLUSTER)
    assert found.grpc == MUTUAL and found.http == SHOWN
    users = TlsConfig(cert=CERT, key=KEY, client_ca=Path("u"))
    found = opened(tls_cert=CERT, tls_key=KEY, tls_user_ca=Path("u"), cluster_secret_file=Path("secret"))
    assert found.grpc == found.http == users


def test_users_may_be_shown_and_asked_for_something_else():
    own = {"tls_user_cert": Path("uc"), "tls_user_key": Path("uk"), "tls_user_ca": Path("uca")}
    found = opened(**CLUSTER, **own, worker_port=7)
    assert found.http == found.grpc == TlsConfig(cert=Path("uc"), key=Path("uk"), client_ca=Path("uca"))
    assert found.access.workers.tls == MUTUAL
    public = opened(tls_user_cert=Path("uc"), tls_user_key=Path("uk"), worker_port=7)
    assert public.http == TlsConfig(cert=Path("uc"), key=Path("uk"))
    assert public.access.workers.tls is None and public.access.tls is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"api_keys": Path("keys")}, "--api-keys: users and workers share the gRPC port"),
        ({"tls_cert": CERT, "tls_key": KEY, "tls_user_ca": CA}, "--tls-user-ca: users and workers share the gRPC port"),
        ({"protect_metrics": True}, "--protect-metrics: needs --api-keys"),
        ({"worker_host": "h"}, "--worker-host: needs --worker-port"),
        ({"tls_user_cert": CERT, "worker_port": 1}, "each needs the other"),
        ({"tls_user_cert": CERT, "tls_user_key": KEY}, "--tls-user-cert: users and workers share"),
        ({"tls_user_ca": CA}, "--tls-user-ca: needs a certificate to show"),
        ({**CLUSTER, "tls_user_ca": CA}, "--tls-user-ca, --tls-client-ca: users and workers share"),
        ({"tls_cert": CERT}, "--tls-cert: needs --tls-key"),
        ({"tls_client_ca": CA}, "--tls-client-ca: needs --tls-cert"),
    ],
)
def test_flags_that_cannot_stand_together_are_named(flags, said):
    with pytest.raises(ConfigError, match=said):
        opened(**flags)


def test_a_file_for_users_is_complained_of_under_the_flag_that_named_it(tmp_path):
    own = {"tls_user_cert": tmp_path / "uc", "tls_user_key": tmp_path / "uk", "tls_user_ca": tmp_path / "uca"}
    with pytest.raises(ConfigError, match=r"^--tls-user-cert .*uc: No such file"):
        TlsFiles(opened(**own, worker_port=7).http)
    known = Identities(tmp_path / "known").config("server")
    own |= {"tls_user_cert": known.cert, "tls_user_key": known.key}
    with pytest.raises(ConfigError, match=r"^--tls-user-ca .*uca: No such file"):
        TlsFiles(opened(**own, worker_port=7).http)
    shared = {"tls_cert": known.cert, "tls_key": known.key, "tls_user_ca": tmp_path / "uca", "worker_port": 7}
    with pytest.raises(ConfigError, match=r"^--tls-user-ca .*uca: No such file"):
        TlsFiles(opened(**shared).http)


def test_keys_on_a_shared_port_are_no_key_to_the_registry():
    """A user's key must not be worth announcing a worker, which is sent users' prompts."""
    assert opened(api_keys=Path("keys"), worker_port=0).access.workers is not None
    assert opened(api_keys=Path("keys"), **CLUSTER).grpc.client_ca is not None
    assert opened(api_keys=Path("keys"), cluster_secret_file=Path("secret")).access.workers is None


def test_a_local_cluster_makes_what_it_needs_and_takes_it_away():
    with cluster_security("0.0.0.0", None, protect_metrics=False, tls=True, tls_dir=None) as made:
        assert TlsFiles(made.identity).current().key
        assert made.apart and made.scheme == "https"
        assert {"--tls-cert", "--tls-key", "--tls-ca", "--tls-client-ca"} <= set(made.process_argv())
        assert not any("PRIVATE" in path.read_text() for path in made.tls.iterdir() if path.name != "key.pem")
    assert not made.tls.exists()


def test_a_local_cluster_without_keys_and_tls_talks_as_before():
    with cluster_security("127.0.0.1", None, protect_metrics=False, tls=False, tls_dir=None) as made:
        assert made == SecurityOptions(secret=made.secret) and not made.apart
        assert made.scheme == "http" and made.identity is None
        assert not any("tls" in part or "api-keys" in part for part in made.router_argv(None))
    for flags, said in (
        ({"protect_metrics": True, "tls": False, "tls_dir": None}, "--protect-metrics: needs --api-keys"),
        ({"protect_metrics": False, "tls": False, "tls_dir": Path("d")}, "--tls-dir: needs --tls"),
    ):
        with pytest.raises(ConfigError, match=said), cluster_security("127.0.0.1", None, **flags):
            pass
