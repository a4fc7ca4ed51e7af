"""A gRPC channel over TLS that outlives its certificates: a new connection is made with the files as they are then.

    READY ──▶ stays as it is, whatever happens to the files; its calls go on
    not READY and the files were renewed ──▶ another channel takes its place for what is called from now on

gRPC's own channels keep the certificates that they were made with, so that one that reconnects after those expired is refused
for ever. Does not know services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from rpc.channel import ChannelConfig, ChannelOpener, open_channel
from rpc.tls import Material, TlsConfig, TlsFiles, channel_credentials

_CLOSE_GRACE_S = 5.0


def opener_for(tls: TlsConfig | None) -> ChannelOpener:
    """How this process reaches others: over TLS when it has an authority to check them by. Raises ConfigError for its files."""
    if tls is None or not tls.connects:
        return open_channel
    files = TlsFiles(tls)

    def open_secure(address: str, config: ChannelConfig | None = None) -> grpc.aio.Channel:
        return SecureChannel(files, address, config if config is not None else ChannelConfig())

    return open_secure


class SecureChannel(grpc.aio.Channel):
    """See the module's docstring. Must be used in one event loop."""

    def __init__(self, files: TlsFiles, address: str, config: ChannelConfig) -> None:
        self._files = files
        self._address = address
        self._options: list[tuple[str, Any]] = [*config.options]
        if files.config.server_name:
            self._options.append(("grpc.ssl_target_name_override", files.config.server_name))
        self._material = files.current()
        self._inner = self._open(self._material)
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def current(self) -> grpc.aio.Channel:
        """The channel for a call that begins now."""
        material = self._files.current()
        if material is not self._material and not self._closed:
            if self._inner.get_state() is grpc.ChannelConnectivity.READY:
                return self._inner
            self._material, old = material, self._inner
            self._inner = self._open(material)
            closing = asyncio.ensure_future(old.close(_CLOSE_GRACE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return self._inner

    def _open(self, material: Material) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(self._address, channel_credentials(material), options=self._options)

    async def __aenter__(self) -> Self:
        """See grpc.aio.Channel."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See grpc.aio.Channel."""
        await self.close(None)

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        self._closed = True
        await self._inner.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        inner = self.current()
        try:
            await inner.wait_for_state_change(last_observed_state)
        except grpc.aio.UsageError:  # gRPC's word for a channel that was closed meanwhile
            if inner is self._inner:
                raise

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        while True:
            inner = self.current()
            try:
                return await inner.channel_ready()
            except grpc.aio.UsageError:
                if inner is self._inner:
                    raise

    def unary_unary(self, *args: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Callable(self, lambda channel: channel.unary_unary(*args, **named))

    def unary_stream(self, *args: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Callable(self, lambda channel: channel.unary_stream(*args, **named))

    def stream_unary(self, *args: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Callable(self, lambda channel: channel.stream_unary(*args, **named))

    def stream_stream(self, *args: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Callable(self, lambda channel: channel.stream_stream(*args, **named))


class _Callable:
    """One method of a stub, on whichever channel is current when it is called."""

    def __init__(self, channel: SecureChannel, make: Callable[[grpc.aio.Channel], Callable[..., Any]]) -> None:
        self._channel = channel
        self._make = make
        self._on: grpc.aio.Channel | None = None
        self._call: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        channel = self._channel.current()
        if self._call is None or channel is not self._on:
            self._on, self._call = channel, self._make(channel)
        return self._call(*args, **named)
