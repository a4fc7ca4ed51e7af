"""Who a worker is, and its standing connections to decode workers: one Connect per pair and life, one connector chosen.

    get(peer, decode) ──▶ Connect (layouts, epochs) ──▶ best connector that both have and that reaches ──▶ Link
    drop(link)        ──▶ the next get asks anew, for instance after a transfer failed
    over(decode, …)   ──▶ this life has ended, as one of its answers showed: its link goes, its hand-offs are told at once

Owns the heartbeats that keep leases (`heartbeat.py`), and the farewells (Abort messages) that outlive their hand-off; `close`
waits for them. Does not know hand-off states.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from contracts.clock import Clock
from contracts.errors import DiptychError
from contracts.kv_layout import KVLayout
from contracts.ticket import AbortRequest, ConnectRequest
from contracts.worker import ConnectorAddress, WorkerRef
from kv_transfer.asking import NO_ANSWER, Asker
from kv_transfer.choose import reach
from kv_transfer.config import SenderConfig
from kv_transfer.connector import Connector
from kv_transfer.digests import Digester
from kv_transfer.endings import until_done
from kv_transfer.handoff import Observer, unobserved
from kv_transfer.heartbeat import Heartbeats
from kv_transfer.peer import HandoffPeer
from kv_transfer.staging import StagedConnector, StagedDigester, StagingArea

logger = logging.getLogger(__name__)
MAX_LINKS = 256  # each life of a decode worker has its own; to have forgotten one costs a Connect


@dataclass(frozen=True, slots=True)
class Side:
    """One worker's half of every pair: who it is, its KV memory's layout, and its connectors, which expose that memory.

    `observer` hears every step of its hand-offs, in order. `digester` reads that memory; None where integrity is off.
    `staging` is that memory where the engine's own is on a device, or blocks travel in a narrow form: see `staged`.
    `blank(block_id, num_tokens)` clears the cells of one of our blocks from that many on; None where they may stay as they are.
    """

    ref: WorkerRef
    layout: KVLayout
    connectors: Sequence[Connector]
    clock: Clock
    observer: Observer = unobserved
    digester: Digester | None = None
    staging: StagingArea | None = None
    blank: Callable[[int, int], Awaitable[None]] | None = None


def staged(side: Side, area: StagingArea, *, sends: bool) -> Side:
    """`side`, whose connectors expose `area`, for KV memory that they cannot move: what it sends is fetched from there.

    What it receives, a `StagedPool` brings there. `sends`: blocks that are digested are those of the device, not slots.
    """
    connectors = tuple(StagedConnector(connector, area) for connector in side.connectors)
    digester = StagedDigester(side.digester, area) if sends and side.digester is not None else side.digester
    return replace(side, connectors=connectors, digester=digester, staging=area, blank=area.blank if sends else None)


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """An agreed pair: `connector` reaches the decode worker's KV memory at `address`."""

    decode: WorkerRef
    connector: Connector
    address: ConnectorAddress

    @property
    def kind(self) -> str:
        """The connector's kind, for logs and measures."""
        return self.connector.capabilities.kind


class LinkListener(Protocol):
    """Who hears what becomes of asking decode workers."""

    def granted(self, waited_s: float) -> object:
        """A hand-off has room; it has asked for so many seconds, connecting included."""
        ...

    def untold(self) -> object:
        """A farewell was not heard: the decode worker keeps the blocks until their lease ends."""
        ...


class Links:
    """All links of one prefill worker. Used from one event loop."""

    def __init__(self, side: Side, config: SenderConfig | None = None) -> None:
        self.side = side
        self._config = config if config is not None else SenderConfig()
        self.heartbeats = Heartbeats(side.ref, side.clock, self._config)
        self._links: dict[WorkerRef, asyncio.Task[Link]] = {}
        self._farewells: set[asyncio.Task[None]] = set()
        self.listener: LinkListener | None = None

    async def get(self, peer: HandoffPeer, decode: WorkerRef) -> Link:
        """The link to this life of a decode worker, made if need be.

        Raises LayoutMismatch, StaleEpoch, TransferFailed (no connector reaches it), Unavailable (nobody answers) or
        TimeoutError; a failure is not remembered.
        """
        task = self._links.get(decode)
        if task is None:
            task = asyncio.ensure_future(self._connect(peer, decode))
            self._links[decode] = task
            made = [known for known, connecting in self._links.items() if connecting.done()]
            for oldest in made[: max(0, len(self._links) - MAX_LINKS)]:
                del self._links[oldest]
            task.add_done_callback(lambda ended: self._forget_failure(decode, ended))
        return await asyncio.shield(task)

    def drop(self, link: Link) -> None:
        """Forget a link that failed, so that the next `get` makes a new one."""
        task = self._links.get(link.decode)
        if task is not None and task.done() and task.result() is link:
            del self._links[link.decode]

    def over(self, decode: WorkerRef, cause: DiptychError) -> None:
        """This life of a decode worker has ended: nothing is reached through its link any more, nothing held by it is kept."""
        self._links.pop(decode, None)
        self.heartbeats.over(decode, cause)

    def tell(self, peer: HandoffPeer, farewell: AbortRequest) -> None:
        """Send an Abort in the background: the decode side's lease covers for it if it is lost."""
        task = asyncio.ensure_future(self._tell(peer, farewell))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def close(self) -> None:
        """End the heartbeats; wait for farewells and connection attempts, each bounded by the call timeout. Idempotent."""
        await self.heartbeats.close()
        for task in (*self._farewells, *self._links.values()):
            await until_done(task)
        self._links.clear()

    def _forget_failure(self, decode: WorkerRef, ended: asyncio.Task[Link]) -> None:
        failed = ended.cancelled() or ended.exception() is not None
        if failed and self._links.get(decode) is ended:
            del self._links[decode]

    async def _connect(self, peer: HandoffPeer, decode: WorkerRef) -> Link:
        request = ConnectRequest(self.side.ref, decode, self.side.layout)
        answer = await self._asker(decode).once(peer.connect(request))
        connector, address = await reach(self.side.connectors, answer.connectors, decode.worker_id)
        return Link(decode, connector, address)

    async def _tell(self, peer: HandoffPeer, farewell: AbortRequest) -> None:
        try:
            await self._asker(farewell.decode).once(peer.abort(farewell))
        except (DiptychError, TimeoutError) as error:
            if self.listener is not None and isinstance(error, NO_ANSWER):
                self.listener.untold()
            logger.info(
                "hand-off %s: %s was not told of the abort (%s); its lease will end by itself",
                farewell.handoff_id,
                farewell.decode.worker_id,
                error,
            )

    def _asker(self, decode: WorkerRef) -> Asker:
        return Asker(self.side.ref, decode, self.side.clock, self._config)
