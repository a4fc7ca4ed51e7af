"""Which connector carries a pair's KV: the best that both ends have and that reaches, said aloud in the log.

    make_connectors(kinds)      what this machine can do; a kind that was asked for by name and cannot work is a ConfigError
    candidates(ours, theirs)    what both have, best first: a pure function of data
    reach(ours, theirs)         the first candidate that connects; each that does not is logged with its reason

`auto` never degrades silently: every kind that is passed over is named with why. Does not know layouts or hand-offs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.errors import ConfigError, TransferFailed
from contracts.secret import ClusterSecret
from contracts.worker import ConnectorAddress
from kv_transfer.connector import Connector
from kv_transfer.shm import KIND as SHM
from kv_transfer.shm import ShmConnector, why_not
from kv_transfer.tcp import KIND as TCP
from kv_transfer.tcp import TcpConnector

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Where the `tcp` connector listens, and under which host and port others reach it (None: those it listens at).

    `secret` is what both ends of every connector's session prove to each other that they know; None proves nothing.
    """

    bind_host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    advertise_port: int | None = None
    secret: ClusterSecret | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of connector: why it cannot work here (None if it can), and how to make it."""

    kind: str
    why_not: Callable[[], str | None]
    make: Callable[[NetworkConfig], Connector]


def _tcp(network: NetworkConfig) -> Connector:
    advertised = network.advertise_host, network.advertise_port
    return TcpConnector(network.bind_host, network.port, advertised, secret=network.secret)


BACKENDS: tuple[Backend, ...] = (
    Backend(SHM, why_not, lambda network: ShmConnector(secret=network.secret)),
    Backend(TCP, lambda: None, _tcp),
)


def make_connectors(
    kinds: Sequence[str], network: NetworkConfig, backends: Sequence[Backend] = BACKENDS
) -> tuple[Connector, ...]:
    """Connectors of these kinds, best first; ("auto",) means every one that works here.

    Raises ConfigError for a kind that is unknown, or named but not possible on this machine.
    """
    known = {backend.kind: backend for backend in backends}
    if tuple(kinds) != (AUTO,):
        for kind in kinds:
            if kind not in known:
                raise ConfigError(f"connector: got {kind!r}, must be one of {', '.join((AUTO, *known))}")
        if not kinds:
            raise ConfigError(f"connector: got none, must be one of {', '.join((AUTO, *known))}")
    made: list[Connector] = []
    for kind in known if tuple(kinds) == (AUTO,) else dict.fromkeys(kinds):
        reason = known[kind].why_not()
        if reason is None:
            made.append(known[kind].make(network))
        elif tuple(kinds) == (AUTO,):
            logger.warning("connector %s cannot be used on this machine: %s", kind, reason)
        else:
            raise ConfigError(f"connector: {kind} cannot be used on this machine: {reason}")
    return tuple(sorted(made, key=lambda c: -c.capabilities.preference))


def candidates(
    ours: Sequence[Connector], theirs: Sequence[ConnectorAddress]
) -> tuple[tuple[Connector, ConnectorAddress], ...]:
    """The kinds that both ends have, our most preferred first."""
    by_kind = {address.kind: address for address in theirs}
    ranked = sorted(ours, key=lambda c: -c.capabilities.preference)
    return tuple((c, by_kind[c.capabilities.kind]) for c in ranked if c.capabilities.kind in by_kind)


async def reach(
    ours: Sequence[Connector], theirs: Sequence[ConnectorAddress], name: str
) -> tuple[Connector, ConnectorAddress]:
    """The best connector that really reaches `name` (for the log); TransferFailed with every reason when none does."""
    reasons: list[str] = []
    for connector, address in candidates(ours, theirs):
        kind = connector.capabilities.kind
        try:
            await connector.connect(address)
        except TransferFailed as error:
            reasons.append(error.message)
            logger.warning("connector %s does not reach %s: %s", kind, name, error)
            continue
        logger.info("KV for %s goes through %s%s", name, kind, f" ({'; '.join(reasons)})" if reasons else "")
        return connector, address
    have = ", ".join(c.capabilities.kind for c in ours) or "none"
    offered = ", ".join(a.kind for a in theirs) or "none"
    raise TransferFailed(
        f"no connector reaches {name} (ours: {have}; theirs: {offered}{'; ' if reasons else ''}{'; '.join(reasons)})"
    )
