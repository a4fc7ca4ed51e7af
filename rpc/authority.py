"""A small certificate authority, for a cluster on one machine, for trying TLS out, and for tests of it.

    Authority.new()  ──issue(names)──▶ certificate and key, PEM      write(folder) ──▶ ca.pem

Real clusters have an authority already (cert-manager, a company's own). The authority's key is never written, so nobody can
issue more. Does not know what certificates are used for.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from contracts.errors import ConfigError

CA_FILE, CERT_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"
_SKEW = datetime.timedelta(minutes=5)  # machines whose clocks differ a little
_PRIVATE, _PUBLIC = 0o600, 0o644


@dataclass(frozen=True, slots=True)
class Period:
    """From when to when something is valid, UTC."""

    begin: datetime.datetime
    end: datetime.datetime

    @classmethod
    def of_days(cls, days: float) -> Self:
        """From now on."""
        now = datetime.datetime.now(datetime.UTC)
        return cls(now - _SKEW, now + datetime.timedelta(days=days))


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, PEM."""

    cert: bytes
    key: bytes


class Authority:
    """One key that signs, in memory only."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def new(cls, name: str, period: Period) -> Self:
        """An authority of its own, called `name` for people."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _named(name)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = _begun(subject, subject, key, period)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        subject_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        return cls(key, builder.add_extension(subject_key, critical=False).sign(key, hashes.SHA256()))

    @property
    def pem(self) -> bytes:
        """Its certificate, by which others check what it issued."""
        return self._certificate.public_bytes(Encoding.PEM)

    def issue(self, names: Sequence[str], period: Period) -> Issued:
        """A certificate for these DNS names and IP addresses, good for both ends of a connection."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _begun(_named(names[0]), self._certificate.subject, key, period)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(authority_key, critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Issued(certificate.public_bytes(Encoding.PEM), pem)


def write_identity(folder: Path, authority: Authority, issued: Issued) -> None:
    """ca.pem, cert.pem and key.pem in `folder`, which is made if need be; the key for its owner only. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, pem, mode in (
            (CA_FILE, authority.pem, _PUBLIC),
            (CERT_FILE, issued.cert, _PUBLIC),
            (KEY_FILE, issued.key, _PRIVATE),
        ):
            _put(folder / name, pem, mode)
    except OSError as error:
        raise ConfigError(f"cannot write certificates to {folder}: {error.strerror or error}") from error


def _put(path: Path, content: bytes, mode: int) -> None:
    """In one move, so that whoever reads it meanwhile has the old or the new; never readable by more than `mode`."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    fresh.replace(path)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, period: Period
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(period.begin)
        .not_valid_after(period.end)
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)
