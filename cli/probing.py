"""Asking one process whether it is well, once, with as few imports as can be: a health check runs every few seconds.

    ask_grpc(address)   gRPC health checking says SERVING for the whole server
    ask_http(url)       GET /health is 200

Both return or raise Unavailable with the reason in words. Does not know what the answer is for.
"""

from __future__ import annotations

import http.client
import queue
import socket
import ssl
import threading
from urllib.parse import urlsplit

from contracts.errors import ConfigError, Unavailable
from rpc.tls import TlsConfig, TlsFiles, channel_credentials

_MOST_BYTES = 2000  # of what a router says is missing


def ask_grpc(address: str, timeout_s: float, tls: TlsConfig | None) -> None:
    """Raise Unavailable unless the server at host:port says SERVING in time; ConfigError for TLS files of no use."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        channel = grpc.insecure_channel(address, options)
    else:
        if tls.server_name:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
        channel = grpc.secure_channel(address, channel_credentials(TlsFiles(tls).current()), options)
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise Unavailable(f"{address}: {error.code().name}: {error.details()}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        names = {number: name for name, number in health_pb2.HealthCheckResponse.ServingStatus.items()}
        said = names.get(answer.status, f"status {answer.status}")  # anybody may answer at this port
        raise Unavailable(f"{address}: {said}: it loads, drains, or its engine does not move")


def ask_http(url: str, timeout_s: float, tls: TlsConfig | None) -> None:
    """Raise Unavailable unless the router at this URL can serve a request; ConfigError for an address or TLS files of no use."""
    host, port, path = _parts(url)
    context = None if tls is None else _context(tls)
    connection = http.client.HTTPConnection(host, port or (80 if tls is None else 443), timeout=timeout_s)
    answers: queue.SimpleQueue[tuple[int, str] | Unavailable] = queue.SimpleQueue()

    def ask() -> None:
        try:
            if tls is not None and context is not None:
                # http.client's own would check the certificate for the host of the URL only, which is often 127.0.0.1.
                raw = socket.create_connection((connection.host, connection.port), timeout_s)
                connection.sock = context.wrap_socket(raw, server_hostname=tls.server_name or host)
            connection.request("GET", f"{path}/health", headers={"Connection": "close"})
            answer = connection.getresponse()
            answers.put((answer.status, answer.read(_MOST_BYTES).decode(errors="replace")))
        # ValueError: a name that no certificate can have.
        except (OSError, ValueError, http.client.HTTPException) as error:
            answers.put(Unavailable(f"{url}: {type(error).__name__}: {error}"))
        finally:
            connection.close()

    # A socket's timeout is for each byte that comes, and the look-up of a name has none: the whole of it has, here.
    threading.Thread(target=ask, name="diptych-health", daemon=True).start()
    try:
        got = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise Unavailable(f"{url}: no whole answer within {timeout_s:g} s") from None
    if isinstance(got, Unavailable):
        raise got
    status, said = got
    if status != http.HTTPStatus.OK:
        raise Unavailable(f"{url}: HTTP {status}: {said}")


def _parts(url: str) -> tuple[str, int | None, str]:
    """Host, port and path of an address that can be asked; ConfigError for any other."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError as error:
        raise ConfigError(f"TARGET: {url}: {error}") from error
    if not host or port == 0 or not url.isprintable() or not parts.path.isascii() or parts.query or parts.fragment:
        raise ConfigError(f"TARGET: got {url}, must be http(s)://HOST[:PORT], with a port from 1 to 65535")
    return host, port, parts.path


def _context(tls: TlsConfig) -> ssl.SSLContext:
    from rpc.tls_context import client_context

    try:
        tls.server_name.encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"--tls-server-name: {tls.server_name}: {error}") from error
    return client_context(tls)
