"""TLS for whoever listens and whoever connects: certificates from files, which may be renewed while the process runs.

    TlsConfig ──TlsFiles()──▶ Material ──files changed──▶ the new Material; unusable ones: the old, complained of once
                    │             ├─ server_credentials(files)   each handshake shows what is current
                    │             └─ opener_for(config)          each new connection is made with what is current

What is wrong with a file is said with its name before anything listens. A connection that stands keeps what it was made with.
TLS 1.2 and 1.3; gRPC brings its own list of cipher suites, all with forward secrecy. Does not know services.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from contracts.errors import ConfigError
from observability.log import get_logger
from rpc.files import FileState, file_state

log = get_logger(__name__)
_Signature = tuple[FileState, ...]
# At files that could not be used: they may be valid from now on, or readable.
_LOOK_AGAIN = datetime.timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files of one process; what is not given is not done.

    `cert` (its chain after it) and `key` are shown to whoever connects, and to whoever is reached. With `client_ca` whoever
    connects must show a certificate of one of its authorities. With `ca` whoever is reached must, and must bear the name by
    which it was reached, or `server_name` where that is given: workers are reached at addresses, which certificates seldom have.
    `flags` are those that named `cert`, `key` and `client_ca`, for who has to mend them.
    """

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    ca: Path | None = None
    server_name: str = ""
    flags: tuple[str, str, str] = field(default=("--tls-cert", "--tls-key", "--tls-client-ca"), compare=False)

    def __post_init__(self) -> None:
        """Raise ConfigError naming the flag that is missing beside another."""
        if (self.cert is None) != (self.key is None):
            given, missing = self.flags[:2] if self.key is None else self.flags[1::-1]
            raise ConfigError(f"{given}: needs {missing} beside it")
        if self.client_ca is not None and self.cert is None:
            cert, key, client_ca = self.flags
            raise ConfigError(f"{client_ca}: needs {cert} and {key} beside it; without them nothing here is TLS")
        if self.server_name and self.ca is None:
            raise ConfigError("--tls-server-name: needs --tls-ca beside it; without it nobody's name is checked")

    @property
    def listens(self) -> bool:
        """Whether who connects to this process talks TLS."""
        return self.cert is not None

    @property
    def connects(self) -> bool:
        """Whether this process talks TLS to whom it connects to."""
        return self.ca is not None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that is read."""
        return tuple(path for path in (self.cert, self.key, self.client_ca, self.ca) if path is not None)


@dataclass(frozen=True, slots=True)
class Material:
    """What the files held when they were read together: PEM bytes, checked. `not_after` is when `cert` expires, UTC."""

    cert: bytes | None
    key: bytes | None
    client_ca: bytes | None
    ca: bytes | None
    not_after: datetime.datetime | None


class TlsFiles:
    """The files of one TlsConfig. `current` may be called from any thread."""

    def __init__(self, config: TlsConfig, now: Callable[[], datetime.datetime] | None = None) -> None:
        """Raises ConfigError naming the file that cannot be used. `now` is the time in UTC."""
        self.config = config
        self._now = now if now is not None else _utc_now
        self._state = (_signature(config), load(config, self._now()))  # one value, so that no thread sees half of it
        # When the files as they are could not be used, and why.
        self._failed: tuple[datetime.datetime, str] | None = None

    def current(self) -> Material:
        """What the files hold; the last that was whole while somebody is renewing them."""
        seen, material = self._state
        signature = _signature(self.config)
        if signature == seen and (self._failed is None or abs(self._now() - self._failed[0]) < _LOOK_AGAIN):
            return material
        try:
            material = load(self.config, self._now())
        except ConfigError as error:
            if self._failed is None or self._failed[1] != error.message:
                log.error("renewed TLS files cannot be used; the old ones stay", reason=error)
            self._failed = self._now(), error.message
        else:
            self._failed = None
            expires = "" if material.not_after is None else material.not_after.isoformat()
            log.info("TLS files read again", certificate=str(self.config.cert), expires=expires)
        self._state = (signature, material)
        return material


def say_gaps(config: TlsConfig | None, proven: bool) -> None:
    """Say which hops of a process with some TLS are without it, or ask nobody for a certificate: seldom anybody means that.

    `proven`: whoever connects proves with the cluster's secret who it is.
    """
    if config is None:
        return
    cert_flag, _, client_ca_flag = config.flags
    if not config.connects:
        log.warning("other processes of the cluster are reached without TLS", missing="--tls-ca")
    if not config.listens:
        log.warning("whoever connects to this process does so without TLS", missing=cert_flag)
    elif config.client_ca is None and not proven:
        log.warning("whoever connects to this process need not show a certificate", missing=client_ca_flag)


def load(config: TlsConfig, now: datetime.datetime) -> Material:
    """Read and check the files. Raises ConfigError that names the file and says what is wrong with it."""
    cert = key = client_ca = ca = None
    not_after: datetime.datetime | None = None
    cert_flag, key_flag, client_ca_flag = config.flags
    if config.cert is not None and config.key is not None:
        cert, key = _read(config.cert, cert_flag), _read(config.key, key_flag)
        leaf = _certificates(cert, f"{cert_flag} {config.cert}")[0]
        _check_dates(leaf, f"{cert_flag} {config.cert}", now)
        _check_pair(leaf, key, config)
        not_after = leaf.not_valid_after_utc
    if config.client_ca is not None:
        client_ca = _authorities(config.client_ca, client_ca_flag, now)
    if config.ca is not None:
        ca = _authorities(config.ca, "--tls-ca", now)
    return Material(cert, key, client_ca, ca, not_after)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For a gRPC port. gRPC asks at each handshake what to show and whom to believe; a refused one it logs on stderr itself."""

    def configuration(material: Material) -> grpc.ServerCertificateConfiguration:
        assert material.key is not None and material.cert is not None
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.client_ca)

    shown = [files.current()]

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        material = files.current()
        if material is shown[0]:
            return None  # gRPC's word for: as before
        shown[0] = material
        return configuration(material)

    demand = files.config.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(
        configuration(shown[0]),
        fetch,  # type: ignore[arg-type]  # the stubs do not know that None is an answer
        require_client_authentication=demand,
    )


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """For a gRPC channel."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from error


def _certificates(pem: bytes, what: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{what}: has no PEM certificate") from error


def _check_dates(certificate: x509.Certificate, what: str, now: datetime.datetime) -> None:
    if now >= certificate.not_valid_after_utc:
        raise ConfigError(f"{what}: expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC")
    if now < certificate.not_valid_before_utc:
        raise ConfigError(f"{what}: is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M:%S} UTC")


def _check_pair(leaf: x509.Certificate, key: bytes, config: TlsConfig) -> None:
    what = f"{config.flags[1]} {config.key}"
    try:
        ours, theirs = load_pem_private_key(key, None).public_key(), leaf.public_key()
    except TypeError as error:  # cryptography's word for a key that wants a passphrase
        raise ConfigError(f"{what}: is encrypted; give it without a passphrase") from error
    except ValueError as error:
        raise ConfigError(f"{what}: has no PEM private key") from error
    except UnsupportedAlgorithm as error:
        raise ConfigError(f"{what}: is of a kind that is not known here") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if ours.public_bytes(*form) != theirs.public_bytes(*form):
        raise ConfigError(f"{what}: does not belong to the certificate in {config.cert}")


def _authorities(path: Path, flag: str, now: datetime.datetime) -> bytes:
    """Of a bundle, one authority that is valid is enough."""
    pem = _read(path, flag)
    found = _certificates(pem, f"{flag} {path}")
    if not any(ca.not_valid_before_utc <= now < ca.not_valid_after_utc for ca in found):
        _check_dates(found[0], f"{flag} {path}", now)
    return pem


def _signature(config: TlsConfig) -> _Signature:
    """What changes when a file does, also when another is put in its place, as Kubernetes does by a link."""
    return tuple(file_state(path) for path in config.paths)


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
