"""Flags about the registry that several routers share, and the configuration they describe. Does not know the commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import click

from cli.options import Decorated, option
from contracts.errors import ConfigError
from registry.config import PASSWORD_VARIABLE, RedisConfig, parse_redis_url, with_credentials

SECTION = "Cluster"


class RegistryFlags(TypedDict):
    """What click hands over."""

    registry: str | None
    registry_password_file: Path | None


REGISTRY_OPTIONS: tuple[Callable[[Decorated], Decorated], ...] = (
    option(
        "--registry",
        section=SECTION,
        metavar="URL",
        help="Redis in which workers make themselves known to every router that looks there: redis://HOST:PORT/DB, or rediss:// "
        "over TLS (?ssl_ca_certs=FILE for an authority of your own). One database serves one deployment. "
        "[default: workers announce themselves to routers]",
    ),
    option(
        "--registry-password-file",
        section=SECTION,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help=f"File with the password of --registry, so that it is on no command line; or set {PASSWORD_VARIABLE}.",
    ),
)


def redis_config(given: RegistryFlags) -> RedisConfig | None:
    """None where no registry is given. Raises ConfigError that names the flag and hides the password."""
    if given["registry"] is None:
        if given["registry_password_file"] is not None:
            raise ConfigError("--registry-password-file: needs --registry beside it")
        return None
    return RedisConfig(with_credentials(parse_redis_url(given["registry"]), given["registry_password_file"]))
