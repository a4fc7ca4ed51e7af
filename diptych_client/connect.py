"""How the router is reached: address, TLS, API key. Does not know what is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

MAX_MESSAGE_BYTES = 64 * 2**20  # log-probabilities of a long prompt are more than gRPC's 4 MiB
Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes. `ca` None trusts the system's; `cert` and `key` are our own where the server asks for them.

    `server_name` is the name to look for in the server's certificate where it is not that of the address.
    """

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    server_name: str = ""

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """As gRPC takes them."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def channel_options(tls: Tls | None) -> list[tuple[str, str | int]]:
    """A silent router is noticed after 15 seconds, one that was away soon after it is back; one connection carries any number
    of calls.
    """
    options: list[tuple[str, str | int]] = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),  # else gRPC waits a minute for a ping
        ("grpc.http2.max_pings_without_data", 0),  # else it gives up pinging where nothing else is said, as in a queue
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),  # else two minutes
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def call_metadata(api_key: str | None, extra: Metadata) -> tuple[tuple[str, str], ...]:
    """The key as `authorization: Bearer …`, and what the caller adds, such as traceparent or x-session-id."""
    own = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
    return (*own, *extra)
