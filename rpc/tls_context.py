"""TLS of Python's own kind, for HTTP: the same files and the same rules as for gRPC (`rpc.tls`).

    server_context(files)   each handshake shows what is current; a refused one is a line in the log
    client_context(config)  for a client that lives shortly

TLS 1.2 and 1.3, suites with forward secrecy and authenticated encryption only. Does not know HTTP.
"""

from __future__ import annotations

import ssl

from contracts.errors import ConfigError
from observability.log import get_logger
from rpc.tls import Material, TlsConfig, TlsFiles

log = get_logger(__name__)
_SUITES = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; 1.3 has no others


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For a listening socket. Raises ConfigError for files that OpenSSL does not take."""
    state = [(files.current(), _context(files.config, files.current()))]

    def renew(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL's hook after a client's hello, whether it named a server or not."""
        del name, context
        seen, newest = state[0]
        material = files.current()
        if material is not seen:
            try:
                newest = _context(files.config, material)
            except ConfigError as error:
                log.error("renewed TLS files cannot be used; the old ones stay", reason=error)
            else:
                state[0] = (material, newest)
        connection.context = newest

    context = state[0][1]
    context.sni_callback = renew
    context.sslobject_class = _Watched
    return context


def client_context(config: TlsConfig) -> ssl.SSLContext:
    """For connections to whom `config.ca` vouches for. Raises ConfigError."""
    material = TlsFiles(config).current()
    if material.ca is None:
        raise ConfigError("--tls-ca: not given, so nobody can be checked")
    context = ssl.create_default_context(cadata=material.ca.decode("latin-1"))
    _harden(context)
    if config.cert is not None and config.key is not None:
        _show(context, config)
    return context


def _context(config: TlsConfig, material: Material) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _show(context, config)
    if material.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=material.client_ca.decode("latin-1"))
    return context


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_SUITES)


def _show(context: ssl.SSLContext, config: TlsConfig) -> None:
    assert config.cert is not None
    try:
        context.load_cert_chain(config.cert, config.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {config.cert}: OpenSSL does not take it: {error}") from error


class _Watched(ssl.SSLObject):
    """One connection, whose refusal is said: asyncio tells nobody."""

    def do_handshake(self) -> None:
        """ssl's."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.info("TLS handshake refused", reason=error)
            raise
