"""Flags about who may come in and how processes show themselves to each other, and the configurations they describe.

    every process   --tls-cert --tls-key --tls-ca --tls-client-ca --tls-server-name --cluster-secret-file
    a router        --api-keys --protect-metrics --worker-host --worker-port --tls-user-cert --tls-user-key --tls-user-ca

Does not know the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import click

from cli.options import PORT, Decorated, option
from contracts.errors import ConfigError
from contracts.secret import ClusterSecret
from router.config import AccessConfig
from rpc.secret_file import read_secret
from rpc.server import ServerConfig
from rpc.tls import TlsConfig

SECTION = "Security"
SECRET_FLAG = "--cluster-secret-file"
_FILE = click.Path(dir_okay=False, path_type=Path)


class TlsFlags(TypedDict):
    """What click hands over for every process."""

    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None
    tls_client_ca: Path | None
    tls_server_name: str
    cluster_secret_file: Path | None


class KeyFlags(TypedDict):
    """What click hands over where users come in."""

    api_keys: Path | None
    protect_metrics: bool


class DoorFlags(TlsFlags, KeyFlags):
    """What click hands over for a router."""

    worker_host: str | None
    worker_port: int | None
    tls_user_cert: Path | None
    tls_user_key: Path | None
    tls_user_ca: Path | None


def _file_option(flag: str, text: str) -> Callable[[Decorated], Decorated]:
    return option(flag, section=SECTION, type=_FILE, metavar="FILE.pem", help=text)


secret_option = option(
    SECRET_FLAG,
    section=SECTION,
    type=_FILE,
    metavar="FILE",
    help="Secret that all processes of the cluster share, at least 16 bytes. Calls between them, hand-offs and KV transfers "
    "must prove that both sides know it; without it whoever reaches a port is believed.",
)
TLS_OPTIONS: tuple[Callable[[Decorated], Decorated], ...] = (
    _file_option(
        "--tls-cert",
        "Certificate of this process, and its chain: who connects talks TLS and is shown it, and so is who is reached. "
        "Renewed files are taken without a restart.",
    ),
    _file_option("--tls-key", "Its private key, without a passphrase."),
    _file_option(
        "--tls-ca", "Reach other processes of the cluster over TLS, and believe those that this authority vouches for."
    ),
    _file_option(
        "--tls-client-ca",
        "Whoever connects to a worker, or to the port where workers announce themselves, must show a certificate of this "
        "authority.",
    ),
    option(
        "--tls-server-name",
        section=SECTION,
        default="",
        show_default=False,
        metavar="NAME",
        help="Name that must stand in the certificate of who is reached. [default: the host of its address]",
    ),
    secret_option,
)
KEY_OPTIONS: tuple[Callable[[Decorated], Decorated], ...] = (
    option(
        "--api-keys",
        section=SECTION,
        type=_FILE,
        metavar="FILE.json",
        help="Let in only who has a key of this file (`diptych key new`), over HTTP and gRPC. It is read again when it changes.",
    ),
    option("--protect-metrics", section=SECTION, is_flag=True, help="With --api-keys, /metrics needs a key too."),
)
DOOR_OPTIONS: tuple[Callable[[Decorated], Decorated], ...] = (
    *KEY_OPTIONS,
    option(
        "--worker-port",
        section="Addresses",
        type=PORT,
        metavar="PORT",
        help="Where workers announce themselves, apart from users; 0 takes a free port. [default: the gRPC port]",
    ),
    option(
        "--worker-host",
        section="Addresses",
        metavar="HOST",
        help="Where the worker port listens. [default: --host]",
    ),
    *TLS_OPTIONS,
    _file_option("--tls-user-cert", "Another certificate for users, HTTP and gRPC. [default: --tls-cert]"),
    _file_option("--tls-user-key", "Its private key."),
    _file_option("--tls-user-ca", "Users must show a certificate of this authority, over HTTP and gRPC."),
)


def tls_config(given: TlsFlags) -> TlsConfig | None:
    """None where nothing is given. Raises ConfigError naming a flag that another is missing for."""
    config = TlsConfig(
        cert=given["tls_cert"],
        key=given["tls_key"],
        ca=given["tls_ca"],
        client_ca=given["tls_client_ca"],
        server_name=given["tls_server_name"],
    )
    return config if config != TlsConfig() else None


def cluster_secret(given: TlsFlags) -> ClusterSecret | None:
    """None where no file is given. Raises ConfigError for one that is of no use."""
    path = given["cluster_secret_file"]
    return None if path is None else read_secret(path, SECRET_FLAG)


def check_secret(path: Path | None) -> Path | None:
    """The file for processes that are started elsewhere. Raises ConfigError for one that is of no use."""
    if path is None:
        return None
    read_secret(path, SECRET_FLAG)
    return path.absolute()


@dataclass(frozen=True, slots=True)
class Doors:
    """What a router's doors show and ask for."""

    http: TlsConfig | None
    grpc: TlsConfig | None
    access: AccessConfig


def doors(given: DoorFlags, host: str) -> Doors:
    """The doors of a router that listens on `host`. Raises ConfigError for flags that contradict each other."""
    _check(given)
    cluster, users = tls_config(given), _users_tls(given)
    if given["worker_port"] is None:
        access = AccessConfig(given["api_keys"], given["protect_metrics"], None, cluster)
        # A port that asks for certificates asks everybody.
        return Doors(users, users if given["tls_user_ca"] is not None else cluster, access)
    workers = ServerConfig(host=given["worker_host"] or host, port=given["worker_port"], tls=cluster)
    return Doors(users, users, AccessConfig(given["api_keys"], given["protect_metrics"], workers, cluster))


def _check(given: DoorFlags) -> None:
    if given["protect_metrics"] and given["api_keys"] is None:
        raise ConfigError("--protect-metrics: needs --api-keys beside it")
    if given["worker_host"] is not None and given["worker_port"] is None:
        raise ConfigError("--worker-host: needs --worker-port beside it")
    if (given["tls_user_cert"] is None) != (given["tls_user_key"] is None):
        raise ConfigError("--tls-user-cert, --tls-user-key: each needs the other beside it")
    if given["tls_user_ca"] is not None and given["tls_user_cert"] is None and given["tls_cert"] is None:
        raise ConfigError("--tls-user-ca: needs a certificate to show users, --tls-user-cert or --tls-cert")
    shared_with = "users and workers share the gRPC port; give workers one of their own with --worker-port"
    if given["worker_port"] is None:
        if given["tls_user_cert"] is not None:
            raise ConfigError(f"--tls-user-cert: {shared_with}")
        if given["tls_user_ca"] is not None and given["tls_client_ca"] is not None:
            raise ConfigError(f"--tls-user-ca, --tls-client-ca: {shared_with}")
        users_by = "--api-keys" if given["api_keys"] is not None else "--tls-user-ca"
        told_apart = given["api_keys"] is not None or given["tls_user_ca"] is not None
        if told_apart and given["tls_client_ca"] is None and given["cluster_secret_file"] is None:
            raise ConfigError(
                f"{users_by}: {shared_with}, or have them prove who they are: --tls-client-ca, {SECRET_FLAG}"
            )


def _users_tls(given: DoorFlags) -> TlsConfig | None:
    """What users are shown over HTTP and gRPC, and what they must show."""
    if given["tls_user_cert"] is not None:
        flags = ("--tls-user-cert", "--tls-user-key", "--tls-user-ca")
        return TlsConfig(
            cert=given["tls_user_cert"], key=given["tls_user_key"], client_ca=given["tls_user_ca"], flags=flags
        )
    if given["tls_cert"] is not None:
        flags = ("--tls-cert", "--tls-key", "--tls-user-ca")
        return TlsConfig(cert=given["tls_cert"], key=given["tls_key"], client_ca=given["tls_user_ca"], flags=flags)
    return None
