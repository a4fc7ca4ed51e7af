"""Channels to other processes of ours: keep-alives that notice a dead peer, bounded connects, bounded messages.

Channels share no sub-channels, so one peer's back-off is never another's, and never go through an HTTP proxy: workers
talk to workers on a trusted network. Does not know services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.errors import DiptychError, WorkerLost
from contracts.upkeep import watched

MAX_MESSAGE_BYTES = 64 * 2**20
USE_EVERY_S = 60.0  # a fifth of a server's patience with who makes no calls


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """Seconds and bytes; a peer that stops answering is noticed within keepalive_s + keepalive_timeout_s."""

    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 5.0
    connect_timeout_s: float = 3.0
    max_backoff_s: float = 1.0
    max_message_bytes: int = MAX_MESSAGE_BYTES

    @property
    def options(self) -> list[tuple[str, int]]:
        """As gRPC's channel arguments."""
        return [
            ("grpc.keepalive_time_ms", round(self.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            # Without it gRPC's own patience with a ping counts, not the line above: a minute.
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # Its name says otherwise, but it is how long one attempt may take: a short one never reaches a busy peer.
            ("grpc.min_reconnect_backoff_ms", round(self.connect_timeout_s * 1e3)),
            ("grpc.max_reconnect_backoff_ms", round(self.max_backoff_s * 1e3)),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),  # the router alone decides what is retried
        ]


def open_channel(address: str, config: ChannelConfig | None = None) -> grpc.aio.Channel:
    """A channel to host:port. It connects with its first call; the caller closes it."""
    config = config if config is not None else ChannelConfig()
    return grpc.aio.insecure_channel(address, options=config.options)


# `open_channel`, or another way to reach host:port.
ChannelOpener = Callable[[str, ChannelConfig | None], grpc.aio.Channel]


async def wait_connected(channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
    """Return when the channel is connected; WorkerLost naming `address` when it is not within `timeout_s`, or was closed."""
    try:
        async with asyncio.timeout(timeout_s):  # wait_for loses a cancellation that comes in the turn of the connect
            await channel.channel_ready()
    except TimeoutError as error:
        raise WorkerLost(f"{address}: cannot connect within {timeout_s:g} s") from error
    except grpc.aio.UsageError as error:  # gRPC's word for a channel that was closed meanwhile
        raise WorkerLost(f"{address}: the connection was closed") from error


async def watch_connection(
    channel: grpc.aio.Channel, on_broken: Callable[[], object], use_every_s: float = USE_EVERY_S
) -> None:
    """Keep the channel connected, and call `on_broken` each time that an established connection ends, until cancelled.

    A server closes what nobody has used for a while (`rpc.server`), which looks as if it were gone: so it is used now and then.
    """
    using = watched("connection in use", _use(channel, use_every_s), lambda: None)
    try:
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.SHUTDOWN:
            await channel.wait_for_state_change(state)
            before, state = state, channel.get_state(try_to_connect=True)
            if before is grpc.ChannelConnectivity.READY:
                on_broken()
    finally:
        using.cancel()


async def _use(channel: grpc.aio.Channel, every_s: float) -> None:
    """Ask for the server's health again and again, whatever it answers."""
    stub = health_pb2_grpc.HealthStub(channel)
    while True:
        await asyncio.sleep(every_s)
        if channel.get_state() is grpc.ChannelConnectivity.READY:
            with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, DiptychError):
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=every_s)
