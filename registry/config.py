"""Where a Redis is and how long it may take; the only place of `registry` that reads the environment.

    redis://[user:password@]host[:port][/db]      rediss:// is the same over TLS

A password is never part of a message, a repr or a log line. Does not know what is kept in Redis.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from contracts.errors import ConfigError, shown

USERNAME_VARIABLE = "DIPTYCH_REDIS_USERNAME"
PASSWORD_VARIABLE = "DIPTYCH_REDIS_PASSWORD"
ENVIRONMENT = {
    USERNAME_VARIABLE: "user name for the Redis of --registry, where its URL has none",
    PASSWORD_VARIABLE: "password for the Redis of --registry, where neither its URL nor --registry-password-file has one",
}
SECRETS = frozenset({PASSWORD_VARIABLE})
_PORT = 6379
_TLS_FILES = {"ssl_ca_certs": "ca_file", "ssl_certfile": "cert_file", "ssl_keyfile": "key_file"}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One database of one Redis server. Files are for TLS: whom to trust, and who we are; None: the system's, nobody."""

    host: str
    port: int = _PORT
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def __str__(self) -> str:
        """For messages: the URL without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.db}"

    @property
    def url(self) -> str:
        """For another process of ours: everything but the password, which goes to it through its environment."""
        scheme, _, rest = str(self).partition("://")
        user = "" if self.username is None else f"{quote(self.username, safe='')}@"
        files = {"ssl_ca_certs": self.ca_file, "ssl_certfile": self.cert_file, "ssl_keyfile": self.key_file}
        query = urlencode({key: value for key, value in files.items() if value is not None})
        return f"{scheme}://{user}{rest}" + (f"?{query}" if query else "")

    @property
    def secrets(self) -> dict[str, str]:
        """Environment variables for that process."""
        return {} if self.password is None else {PASSWORD_VARIABLE: self.password}


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """How one process talks to one Redis; seconds.

    A command has `command_timeout_s`, a connection `connect_timeout_s` to be made. The link looks every `check_s` whether
    Redis answers; while it does not, after `min_backoff_s`, doubling up to `max_backoff_s`.
    """

    address: RedisAddress
    connect_timeout_s: float = 1.0
    command_timeout_s: float = 0.5
    check_s: float = 0.5
    min_backoff_s: float = 0.1
    max_backoff_s: float = 1.0


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """How long words are believed, in seconds: an announcement `ttl_s`; a farewell `tombstone_s`, in which no late word of the
    life that left brings it back.
    """

    ttl_s: float = 5.0

    @property
    def tombstone_s(self) -> float:
        """Longer than a word can be on its way."""
        return 2 * self.ttl_s


def parse_redis_url(url: str, flag: str = "--registry") -> RedisAddress:
    """The address that a URL names. Raises ConfigError naming the flag, and what is wrong, but never a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _bad(flag, url, "must be redis://host:port/db, with a port from 1 to 65535") from error
    if parts.scheme not in ("redis", "rediss"):
        raise _bad(flag, url, "must begin with redis:// or rediss://")
    if not parts.hostname or parts.fragment or port == 0:
        raise _bad(flag, url, "must be redis://host:port/db")
    files = _tls_files(parts, flag, url)
    return RedisAddress(
        host=unquote(parts.hostname),
        port=_PORT if port is None else port,
        db=_database(parts.path, flag, url),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=parts.scheme == "rediss",
        ca_file=files.get("ca_file"),
        cert_file=files.get("cert_file"),
        key_file=files.get("key_file"),
    )


def with_credentials(
    address: RedisAddress, password_file: Path | None, environment: Mapping[str, str] | None = None
) -> RedisAddress:
    """The address with credentials from a file or the environment where it has none of its own.

    Raises ConfigError for a file that cannot be read, naming it.
    """
    variables = os.environ if environment is None else environment  # noqa: TID251
    username = address.username or variables.get(USERNAME_VARIABLE) or None
    password = address.password
    if password is None and password_file is not None:
        password = _read_password(password_file)
    if password is None:
        password = variables.get(PASSWORD_VARIABLE) or None
    return replace(address, username=username, password=password)


def without_password(url: str) -> str:
    """A URL, or what was meant to be one, as it may be shown."""
    scheme, separator, rest = url.rpartition("@")
    if not separator:
        return url
    return f"{scheme[: scheme.find('//') + 2]}***@{rest}"


def _database(path: str, flag: str, url: str) -> int:
    name = path.removeprefix("/")
    if not name:
        return 0
    if not (name.isascii() and name.isdigit()):
        raise _bad(flag, url, f"database {shown(name)} must be a number, as in redis://host:port/0")
    return int(name)


def _tls_files(parts: SplitResult, flag: str, url: str) -> dict[str, str]:
    files = {}
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key not in _TLS_FILES or parts.scheme != "rediss":
            raise _bad(flag, url, f"{shown(key)} is not known; rediss:// takes {', '.join(_TLS_FILES)}", query=False)
        if not Path(value).is_file():
            raise ConfigError(f"{flag}: {key}: no such file: {shown(value)}")
        files[_TLS_FILES[key]] = value
    if ("key_file" in files) != ("cert_file" in files):
        raise _bad(flag, url, "ssl_certfile and ssl_keyfile belong together")
    return files


def _read_password(path: Path) -> str:
    try:
        password = path.read_text(encoding="utf-8").strip("\r\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "must be UTF-8"
        raise ConfigError(f"--registry-password-file: {path}: {reason}") from error
    if not password:
        raise ConfigError(f"--registry-password-file: {path}: is empty")
    return password


def _bad(flag: str, url: str, said: str, *, query: bool = True) -> ConfigError:
    where = url if query else url.partition("?")[0]
    return ConfigError(f"{flag}: got {shown(without_password(where))}: {said}")
