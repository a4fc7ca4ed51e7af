"""What is wrong with a TLS file is said with its name, before anything listens; what is renewed is taken, if it is whole."""

import datetime
import logging
import ssl

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from contracts.errors import ConfigError
from observability.log import LineFormatter
from rpc.authority import CERT_FILE, KEY_FILE, Period
from rpc.server import RpcServer, ServerConfig
from rpc.tls import TlsConfig, TlsFiles, say_gaps
from rpc.tls_context import client_context, server_context
from tests.identities import EXPIRED, FUTURE, Identities


@pytest.fixture
def known(tmp_path) -> Identities:
    return Identities(tmp_path)


def complaint(config: TlsConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        TlsFiles(config)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_whole_files_are_taken(known):
    config = known.config("server", demand=True)
    material = TlsFiles(config).current()
    assert material.key.startswith(b"-----BEGIN PRIVATE KEY") and material.ca == material.client_ca
    assert material.not_after > datetime.datetime.now(datetime.UTC)
    assert config.key.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("which", ["cert", "key", "ca", "client_ca"])
def test_a_file_that_is_missing_unreadable_or_something_else_is_named(known, which):
    config = known.config("server", demand=True)
    path = getattr(config, which)
    config = TlsConfig(cert=config.cert, key=config.key, **({which: path} if "ca" in which else {}))
    flag = "--tls-" + which.replace("_", "-")
    path.write_text("hello")
    assert complaint(config) == f"{flag} {path}: has no PEM {'private key' if which == 'key' else 'certificate'}"
    path.unlink()
    assert complaint(config) == f"{flag} {path}: No such file or directory"
    path.mkdir()
    assert complaint(config) == f"{flag} {path}: Is a directory"


def test_a_key_of_another_certificate(known):
    config, other = known.config("server"), known.config("other")
    mixed = TlsConfig(cert=config.cert, key=other.key)
    assert complaint(mixed) == f"--tls-key {other.key}: does not belong to the certificate in {config.cert}"


def test_a_key_with_a_passphrase(known):
    config = known.config("server")
    key = ec.generate_private_key(ec.SECP256R1())
    config.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    assert complaint(config) == f"--tls-key {config.key}: is encrypted; give it without a passphrase"


@pytest.mark.parametrize(("period", "said"), [(EXPIRED, "expired on "), (FUTURE, "is not valid before ")])
def test_dates(known, period, said):
    config = known.config("server", period=period)
    assert complaint(config).startswith(f"--tls-cert {config.cert}: {said}")


def test_an_authority_that_is_over(known, tmp_path):
    good = known.config("server")
    old = Identities(tmp_path / "old", type(known.authority).new("old", EXPIRED)).config("x")
    assert complaint(TlsConfig(ca=old.ca)).startswith(f"--tls-ca {old.ca}: expired on ")
    old.ca.write_bytes(old.ca.read_bytes() + good.ca.read_bytes())  # of a bundle one is enough
    assert TlsFiles(TlsConfig(ca=old.ca)).current().ca


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cert": "c"}, "--tls-cert: needs --tls-key"),
        ({"key": "k"}, "--tls-key: needs --tls-cert"),
        ({"client_ca": "c"}, "--tls-client-ca: needs --tls-cert"),
        ({"server_name": "x"}, "--tls-server-name: needs --tls-ca"),
    ],
)
def test_flags_that_need_others(given, said):
    with pytest.raises(ConfigError, match=said):
        TlsConfig(**given)


WHOLE = {"cert": "c", "key": "k", "ca": "a", "client_ca": "a"}


@pytest.mark.parametrize(
    ("left_out", "proven", "missing"),
    [
        ((), False, []),
        (("client_ca",), True, []),
        (("client_ca",), False, ["--tls-client-ca"]),
        (("ca",), False, ["--tls-ca"]),
        (("ca", "client_ca"), False, ["--tls-ca", "--tls-client-ca"]),
        (("cert", "key", "client_ca"), True, ["--tls-cert"]),
    ],
)
def test_a_hop_that_is_left_open_is_spoken_of(caplog, left_out, proven, missing):
    say_gaps(None, proven)
    say_gaps(TlsConfig(**{name: value for name, value in WHOLE.items() if name not in left_out}), proven)
    said = [LineFormatter("x").format(record) for record in caplog.records]
    assert [line.split("missing=")[1] for line in said] == missing


async def test_a_server_does_not_bind_with_files_that_cannot_be_used(known):
    config = known.config("server")
    config.key.unlink()
    with pytest.raises(ConfigError, match="--tls-key"):
        RpcServer(ServerConfig(tls=config), ()).bind()


def test_what_is_renewed_is_taken_and_what_is_half_renewed_is_not(known, caplog):
    config = known.config("server")
    files = TlsFiles(config)
    before = files.current()
    assert files.current() is before
    other = known.issue("other")
    with caplog.at_level(logging.INFO):
        (other / CERT_FILE).replace(config.cert)  # the key does not follow yet
        assert files.current() is before
        assert files.current() is before
        (other / KEY_FILE).replace(config.key)
        after = files.current()
    assert after is not before and after.key != before.key
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("ERROR", "renewed TLS files cannot be used; the old ones stay"),
        ("INFO", "TLS files read again"),
    ]
    assert "PRIVATE" not in caplog.text


def test_what_is_renewed_too_early_is_taken_when_its_time_has_come(known, caplog):
    """The clock of who issues is ahead: the files do not change again before the old certificate is over."""
    now = [datetime.datetime.now(datetime.UTC)]
    config = known.config("server")
    files = TlsFiles(config, lambda: now[0])
    before = files.current()
    soon = Period(now[0] + datetime.timedelta(minutes=1), now[0] + datetime.timedelta(days=1))
    known.issue("server", period=soon)
    for _ in range(20):
        assert files.current() is before
        now[0] += datetime.timedelta(seconds=1)
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1
    now[0] = soon.begin + datetime.timedelta(seconds=1)
    after = files.current()
    assert after.cert == config.cert.read_bytes() != before.cert
    assert files.current() is after


def test_a_renewal_by_a_link_is_noticed_as_kubernetes_does_it(known, tmp_path):
    first, second = known.issue("first"), known.issue("second")
    (tmp_path / "now").symlink_to(first)
    config = TlsConfig(cert=tmp_path / "now" / CERT_FILE, key=tmp_path / "now" / KEY_FILE)
    files = TlsFiles(config)
    before = files.current()
    (tmp_path / "next").symlink_to(second)
    (tmp_path / "next").replace(tmp_path / "now")
    assert files.current().cert == (second / CERT_FILE).read_bytes() != before.cert


def test_old_protocols_and_weak_suites_are_not_spoken(known):
    config = known.config("server", demand=True)
    for context in (server_context(TlsFiles(config)), client_context(config)):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert all("ECDHE" in suite["name"] or suite["name"].startswith("TLS_") for suite in context.get_ciphers())
        assert not any(
            weak in suite["name"] for suite in context.get_ciphers() for weak in ("CBC", "SHA1", "RC4", "DES")
        )
