"""How the connectors over sockets (`tcp`, `nixl`) meet: the address that a target gives out, and a source's way to it.

    target: reached_at ─▶ ConnectorAddress ─▶ split_address (`lines.py`) ─▶ source: open_session ─▶ a greeted, proven socket

Does not know what is said on a session after the greeting.
"""

from __future__ import annotations

import socket

from contracts.secret import ProofKey
from contracts.worker import ConnectorAddress
from kv_transfer.lines import join_address
from kv_transfer.tcp_wire import greet

_CONNECT_TIMEOUT_S = 5.0

Advertised = tuple[str | None, int | None]


def reached_at(kind: str, bound: tuple[str, int], advertised: Advertised) -> ConnectorAddress:
    """Where others reach what listens at `bound`; a part of `advertised` that is not None replaces the one bound to."""
    return join_address(kind, advertised[0] or bound[0], advertised[1] or bound[1])


def open_session(where: tuple[str, int], key: ProofKey | None, stall_s: float) -> socket.socket:
    """A connection to a target that has greeted us, with proofs where there is a `key`. OSError where there can be none.

    What is done with it may be silent for `stall_s` at most.
    """
    made = socket.create_connection(where, timeout=_CONNECT_TIMEOUT_S)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.settimeout(stall_s)
        greet(made, key, min(stall_s, _CONNECT_TIMEOUT_S))
    except BaseException:
        made.close()
        raise
    return made
