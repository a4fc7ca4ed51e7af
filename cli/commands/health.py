"""`diptych health`: is it well? For the health checks of compose and Kubernetes: the exit code is the answer.

A worker says no while it loads, while its engine has work and does not move, and once it drains; a router says no at its HTTP
address while no request could be served. So what is asked is never merely whether a port is open. Does not know why.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, Unpack

import click

from cli.options import ADDRESS, POSITIVE_SECONDS, SectionedCommand, apply, option
from cli.probing import ask_grpc, ask_http
from contracts.errors import ConfigError
from rpc.tls import TlsConfig

_FILE = click.Path(dir_okay=False, path_type=Path)
_HTTP = ("http://", "https://")
_SECURITY = "Security"  # the title that it has in other commands, whose imports would take longer than the question


class HealthFlags(TypedDict):
    """What click hands over."""

    target: str
    timeout: float
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_server_name: str


class TargetType(click.ParamType[str]):
    """HOST:PORT of a gRPC server, or the http(s):// URL of a router."""

    name = "target"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The target as it was given, without a slash at its end."""
        text = str(value).strip()
        if not text.isprintable():
            self.fail(f"{value!r} has characters that no address has", param, ctx)
        if not text.startswith(_HTTP):
            return ADDRESS.convert(text, param, ctx)
        if not text.partition("://")[2].strip("/"):
            self.fail(f"{value!r} names no host", param, ctx)
        return text.rstrip("/")


OPTIONS = (
    option(
        "--timeout",
        section="Options",
        type=POSITIVE_SECONDS,
        default=3.0,
        metavar="SECONDS",
        help="Who has not answered by then is not well.",
    ),
    option(
        "--tls-ca",
        section=_SECURITY,
        type=_FILE,
        metavar="FILE.pem",
        help="Talk TLS, and believe who this authority vouches for.",
    ),
    option(
        "--tls-cert",
        section=_SECURITY,
        type=_FILE,
        metavar="FILE.pem",
        help="Certificate to show, where one is asked for.",
    ),
    option("--tls-key", section=_SECURITY, type=_FILE, metavar="FILE.pem", help="Its private key."),
    option(
        "--tls-server-name",
        section=_SECURITY,
        default="",
        show_default=False,
        metavar="NAME",
        help="Name that must stand in the certificate that is shown. [default: the host of TARGET]",
    ),
)


@click.command("health", cls=SectionedCommand)
@click.argument("target", type=TargetType(), metavar="TARGET")
def health(**given: Unpack[HealthFlags]) -> None:
    """Ask a process whether it is well; the exit code is 0 if so.

    TARGET is HOST:PORT of a worker or router (gRPC health checking), or a router's URL such as http://127.0.0.1:8000,
    which is well when it can serve a request.
    """
    target, timeout_s = given["target"], given["timeout"]
    tls = _tls(given)
    if target.startswith("https://") != (tls is not None) and target.startswith(_HTTP):
        raise ConfigError(f"TARGET: got {target}, must begin with https:// where --tls-ca is given, and only there")
    ask = ask_http if target.startswith(_HTTP) else ask_grpc
    ask(target, timeout_s, tls)
    click.echo(f"{target} is well")


apply(OPTIONS, health)


def _tls(given: HealthFlags) -> TlsConfig | None:
    config = TlsConfig(
        ca=given["tls_ca"], cert=given["tls_cert"], key=given["tls_key"], server_name=given["tls_server_name"]
    )
    if config == TlsConfig():
        return None
    if config.ca is None:
        raise ConfigError("--tls-cert: needs --tls-ca beside it; without it nothing here is TLS")
    return config
