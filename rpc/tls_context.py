"""TLS of Python's own kind, for HTTP: the same files and the same rules as for gRPC (`rpc.tls`).

    server_context(files)   each connection is made with what is current; a refused one is a line in the log
    client_context(config)  for a client that lives shortly
    what_is_amiss(url, …)   words for a client's error that is about TLS

TLS 1.2 and 1.3, suites with forward secrecy and authenticated encryption only. Does not know HTTP.
"""

from __future__ import annotations

import ssl
from typing import TypeVar

from contracts.errors import ConfigError
from observability.log import get_logger
from observability.seldom import Seldom
from rpc.tls import Material, TlsConfig, TlsFiles

log = get_logger(__name__)
_SUITES = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; 1.3 has no others


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For a listening socket. Raises ConfigError for files that OpenSSL does not take."""
    material = files.current()
    context = _Renewed(ssl.PROTOCOL_TLS_SERVER)
    context.follow(files, material)
    return _configured(context, files.config, material)


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


def what_is_amiss(url: str, error: Exception) -> str:
    """What an HTTP client of `url` whose connection failed forgot of TLS, as words that follow the error; "" for other errors."""
    said = str(error)
    # A door with TLS does not talk to whoever brings none.
    if url.startswith("http://") and "disconnected without" in said:
        return "; where it speaks TLS, the address begins with https://"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return "; --tls-ca FILE.pem names who vouches for it"
    if "WRONG_VERSION_NUMBER" in said or "RECORD_LAYER_FAILURE" in said:
        return "; where it speaks no TLS, the address begins with http://"
    return ""


class _Renewed(ssl.SSLContext):
    """Makes each connection by a context with the newest files.

    A context of their own, and not OpenSSL's hook that changes a connection's: sessions belong to the context that a connection
    began with, so that whoever was let in once would come back without a certificate after his authority was dismissed.
    """

    _files: TlsFiles
    _watched: type[ssl.SSLObject]
    _made: tuple[Material, ssl.SSLContext]

    def follow(self, files: TlsFiles, material: Material) -> None:
        """From now on; `material` is what they hold now."""
        self._files, self._watched = files, _watched()
        self._made = material, self._make(material)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """ssl's, which event loops call for each connection that they accept."""
        return self._newest().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def _newest(self) -> ssl.SSLContext:
        material = self._files.current()
        if material is not self._made[0]:
            try:
                newest = self._make(material)
            except ConfigError as error:
                log.error("renewed TLS files cannot be used; the old ones stay", reason=error)
            else:
                self._made = (material, newest)
        return self._made[1]

    def _make(self, material: Material) -> ssl.SSLContext:
        made = _configured(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._files.config, material)
        made.sslobject_class = self._watched
        return made


_Context = TypeVar("_Context", bound=ssl.SSLContext)


def _configured(context: _Context, config: TlsConfig, material: Material) -> _Context:
    _harden(context)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _show(context, config)
    if material.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # each connection shows its certificate, which may have expired since the one before
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
        raise ConfigError(f"{config.flags[0]} {config.cert}: OpenSSL does not take it: {error}") from error


def _watched() -> type[ssl.SSLObject]:
    """Connections of one door, whose refusals are said: asyncio tells nobody."""
    seldom = Seldom()

    class Watched(ssl.SSLObject):
        def do_handshake(self) -> None:
            """ssl's."""
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                more = seldom.due()
                if more is not None:
                    log.info("TLS handshake refused", reason=error, more_before=more)
                raise

    return Watched
