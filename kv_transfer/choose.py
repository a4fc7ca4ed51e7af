"""Which connector carries a pair's KV: the best that both ends have and that reaches, said aloud in the log.

    make_connectors(kinds)      what this machine can do; a kind that was asked for by name and cannot work is a ConfigError
    candidates(ours, theirs)    what both have, best first: a pure function of data
    reach(ours, theirs)         the first candidate that connects; each that does not is logged with its reason

`auto` never degrades silently: every kind that is passed over is named with why; also one that would work, but is slower here
than what remains (`nixl` without RDMA: bench/results/transfer.md). Does not know layouts or hand-offs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.errors import ConfigError, TransferFailed
from contracts.secret import ClusterSecret
from contracts.worker import ConnectorAddress
from kv_transfer.connector import Connector
from kv_transfer.nixl import NixlConnector
from kv_transfer.nixl_agent import has_rdma
from kv_transfer.nixl_agent import why_not as why_no_nixl
from kv_transfer.nixl_end import KIND as NIXL
from kv_transfer.shm import KIND as SHM
from kv_transfer.shm import ShmConnector, why_not
from kv_transfer.tcp import KIND as TCP
from kv_transfer.tcp import TcpConnector

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Where the `tcp` connector listens, and under which host and port others reach it (None: those it listens at); `nixl` is at
    the next port.

    `secret` is what both ends of every connector's session prove to each other that they know; None proves nothing.
    """

    bind_host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str | None = None
    advertise_port: int | None = None
    secret: ClusterSecret | None = None


def _never() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of connector: why it cannot work here (None if it can), and how to make it.

    `slower` is why `auto` does better without it on this machine; None where it is worth having.
    """

    kind: str
    why_not: Callable[[], str | None]
    make: Callable[[NetworkConfig], Connector]
    slower: Callable[[], str | None] = _never


def _tcp(network: NetworkConfig) -> Connector:
    advertised = network.advertise_host, network.advertise_port
    return TcpConnector(network.bind_host, network.port, advertised, secret=network.secret)


def _nixl(network: NetworkConfig) -> Connector:
    """Its control connections are taken at the port after tcp's, so that a worker may have both."""
    advertised = network.advertise_host, _next(network.advertise_port)
    return NixlConnector((network.bind_host, _next(network.port) or 0), advertised, secret=network.secret)


def _next(port: int | None) -> int | None:
    return (port + 1) % 65_536 if port else None


def _without_rdma(there: Callable[[], bool] = has_rdma) -> str | None:
    return None if there() else "without RDMA shm and tcp are faster; name it to have it"


BACKENDS: tuple[Backend, ...] = (
    Backend(SHM, why_not, lambda network: ShmConnector(secret=network.secret)),
    Backend(NIXL, why_no_nixl, _nixl, _without_rdma),
    Backend(TCP, _never, _tcp),
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
    automatic = tuple(kinds) == (AUTO,)
    for kind in known if automatic else dict.fromkeys(kinds):
        slower = known[kind].slower() if automatic else None
        if slower is not None:
            logger.info("connector %s is not taken: %s", kind, slower)
            continue
        reason = known[kind].why_not()
        if reason is None:
            made.append(known[kind].make(network))
        elif automatic:
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
