"""Asking one process whether it is well, once, with as few imports as can be: a health check runs every few seconds.

    ask_grpc(address)   gRPC health checking says SERVING for the whole server
    ask_http(url)       GET /health is 200

Both return or raise Unavailable with the reason in words. Does not know what the answer is for.
"""

from __future__ import annotations

import http.client
import socket
import ssl
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
        said = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise Unavailable(f"{address}: {said}: it loads, drains, or its engine does not move")


def ask_http(url: str, timeout_s: float, tls: TlsConfig | None) -> None:
    """Raise Unavailable unless the router at this URL can serve a request; ConfigError for TLS files of no use."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"TARGET: {url}: {error}") from error
    context = None if tls is None else _context(tls)
    connection = http.client.HTTPConnection(host, port or (80 if tls is None else 443), timeout=timeout_s)
    try:
        if tls is not None and context is not None:
            # http.client's own would check the certificate for the host of the URL only, which is often 127.0.0.1.
            raw = socket.create_connection((connection.host, connection.port), timeout_s)
            connection.sock = context.wrap_socket(raw, server_hostname=tls.server_name or host)
        connection.request("GET", f"{parts.path}/health", headers={"Connection": "close"})
        answer = connection.getresponse()
        said = answer.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, ssl.SSLError, http.client.HTTPException) as error:
        raise Unavailable(f"{url}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise Unavailable(f"{url}: HTTP {answer.status}: {said}")


def _context(tls: TlsConfig) -> ssl.SSLContext:
    from rpc.tls_context import client_context

    return client_context(tls)
