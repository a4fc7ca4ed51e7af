"""The gRPC server that each of our services stands in.

    build ──▶ bind ──▶ add servicers ──▶ start (NOT_SERVING) ──▶ set_serving(True) ⇄ set_serving(False) ──▶ stop(grace)

It brings health checking (for each service and for ""), reflection, keep-alives, limits of messages, connections and
patience, and one place where errors become statuses (`rpc.calls`). An answer stream is always closed in the task of its call,
so a servicer's `finally` runs before the call is over, also when the client leaves while a message is being sent. Does not know
what the services do.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from contracts.errors import ConfigError
from observability.log import get_logger
from rpc.calls import ErrorInterceptor
from rpc.channel import MAX_MESSAGE_BYTES
from rpc.health import Health
from rpc.tls import TlsConfig, TlsFiles, server_credentials

log = get_logger(__name__)
_PENDING_CALLS = 20_000
_WILDCARDS = ("0.0.0.0", "::", "[::]", "")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen and how others reach it. Port 0 takes any free port; `advertise` is "", host or host:port.

    A caller whose message does not come for `stall_s`, or that takes none of its stream for as long, loses the call. More
    connections than `max_connections` are closed at once, more streams than `max_streams` on one are refused, a caller must
    say hello within `hello_s`, and one that has made no call for `idle_s` loses the connection, whatever it pings. A message of
    a caller has at most `max_request_bytes`, or, if that is None, as many as any message.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 5.0
    stall_s: float = 60.0
    max_connections: int = 4096
    max_streams: int = 1000
    max_request_bytes: int | None = None
    hello_s: float = 20.0
    idle_s: float = 300.0
    tls: TlsConfig | None = None

    @property
    def options(self) -> list[tuple[str, int]]:
        """As gRPC's server arguments."""
        return [
            ("grpc.so_reuseport", 0),  # else a second server on a busy port takes half of its calls, silently
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            # Without it gRPC's own patience with a ping counts, not the line above: a minute.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            # Ours ping every few seconds and are never struck; a thousand strikes are a flood.
            ("grpc.http2.max_ping_strikes", 1000),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams),
            # From a thousand calls that wait to be accepted on, gRPC cancels some of them at random, whoever's they are: one
            # caller's flood ended the calls of others. They wait now, a moment; who may be served is decided behind it.
            ("grpc.server.max_pending_requests", _PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", 2 * _PENDING_CALLS),
            ("grpc.server_handshake_timeout_ms", round(self.hello_s * 1e3)),
            ("grpc.max_connection_idle_ms", round(self.idle_s * 1e3)),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_request_bytes or self.max_message_bytes),
        ]


class RpcServer:
    """One listening gRPC server. Owns the port and the health table; `stop` gives both back."""

    def __init__(
        self,
        config: ServerConfig,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`interceptors` see each call before its service does; the DiptychErrors of their handlers become statuses."""
        self._config = config
        self._names = ("", *service_names)
        chain = [ErrorInterceptor(config.stall_s), *interceptors]
        self.grpc_server = grpc.aio.server(interceptors=chain, options=config.options)
        self._health = Health(self._names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        reflected = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self.grpc_server)
        self._port = 0

    def bind(self) -> int:
        """Take the port, so that a busy one is known before a model is loaded; return it. ConfigError when it cannot be."""
        where = join_address(self._config.host, self._config.port)
        _check_free(self._config.host, self._config.port)
        try:
            self._port = self._add_port(where)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {where}: {error}") from error
        return self._port

    def _add_port(self, where: str) -> int:
        tls = self._config.tls
        if tls is None or not tls.listens:
            return self.grpc_server.add_insecure_port(where)
        return self.grpc_server.add_secure_port(where, server_credentials(TlsFiles(tls)))

    async def start(self) -> int:
        """Answer calls (binding first if need be); return the port. Health says NOT_SERVING until told otherwise."""
        if not self._port:
            self.bind()
        await self.set_serving(False)
        await self.grpc_server.start()
        return self._port

    @property
    def port(self) -> int:
        """The bound port; 0 before it is bound."""
        return self._port

    @property
    def serving(self) -> bool:
        """What health checks say."""
        return self._health.serving

    def advertised_address(self, toward: str = "") -> str:
        """host:port under which others reach this server.

        `--advertise` if given (its port may be left out); else the host it listens on; else, when that is a wildcard, the
        address of the interface that leads to `toward` (host:port of the router), or the machine's name.
        """
        given = self._config.advertise
        if given:
            return given if has_port(given) else join_address(given, self._port)
        if not is_wildcard(self._config.host):
            return join_address(self._config.host, self._port)
        return join_address(_outward_host(toward), self._port)

    async def set_serving(self, serving: bool) -> None:
        """What health checks say from now on, for every service."""
        self._health.say(serving)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let running ones end within `grace_s`, cancel the rest, give the port back. Idempotent."""
        self._health.stop()
        await self.grpc_server.stop(grace_s)


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    bare = host.strip("[]") or "0.0.0.0"
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether what listens on `host` does so at every address of the machine."""
    return host in _WILDCARDS


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


def has_port(address: str) -> bool:
    """Whether an address ends with a port: "h:1" and "[::1]:1" do, "h" and "::1" do not."""
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdigit() and (":" not in host or host.endswith("]"))


def _check_free(host: str, port: int) -> None:
    """gRPC says only "failed to bind"; a bind of our own has the system's reason. Raises ConfigError."""
    where = join_address(host, port)
    bare = host.strip("[]") or "0.0.0.0"
    try:
        family, kind, proto, _, place = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error


def _outward_host(toward: str) -> str:
    """The local address from which `toward` would be reached; connecting a UDP socket sends nothing."""
    host, _, port = toward.rpartition(":")
    if not host or not port.isdigit():
        return socket.gethostname()
    try:
        family, kind, proto, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        log.warning("no route to the router yet; announcing the machine's name", router=toward, reason=error)
        return socket.gethostname()
