"""TCP ports that a supervisor keeps for its children, so that no one else takes them while a child (re)starts.

A kept socket is bound but does not listen; a child that binds with SO_REUSEADDR, as gRPC and uvicorn do, may listen on
the same port beside it (Linux), and the system gives the number to nobody else. Does not know who uses the port.
"""

from __future__ import annotations

import errno
import socket

from contracts.errors import ConfigError
from rpc.server import join_address

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class KeptPort:
    """A port that is ours until `release`."""

    def __init__(self, held: socket.socket, host: str) -> None:
        self._held = held
        self.host = host
        self.port: int = held.getsockname()[1]

    @property
    def local_address(self) -> str:
        """host:port for a client on this machine; a wildcard host becomes loopback."""
        return join_address(WILDCARDS.get(self.host, self.host), self.port)

    def release(self) -> None:
        """Give the port back. Idempotent."""
        self._held.close()


def keep_port(host: str, port: int, option: str) -> KeptPort:
    """Take `port`, or any free one for 0. Raises ConfigError that names `option` when it cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host: {host!r} is not an address of this machine ({error.strerror})") from error
    held = socket.socket(family, kind, proto)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError as error:
        held.close()
        raise ConfigError(_explain(error, host, port, option)) from error
    return KeptPort(held, host)


def _explain(error: OSError, host: str, port: int, option: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{option}: {port} is in use on {host}; choose another port, or 0 for any free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host: {host!r} is not an address of this machine"
    if error.errno == errno.EACCES:
        return f"{option}: {port} needs privileges; ports from 1024 to 65535 do not"
    return f"{option}: cannot listen on {host}:{port}: {error.strerror}"
