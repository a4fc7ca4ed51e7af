"""The two pools as this router sees them: a connection to every known worker, and what the router has given each.

    registry: JOINED ──▶ peer, connected in advance, suspected when the connection breaks
              LEFT   ──▶ peer takes nothing new, is closed when the last claim on it is given back
              LOST   ──▶ peer closed; everything that it carried hears of it at once

Does not know policies or requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import grpc

from contracts.errors import DiptychError, NotOfThisCluster, Unavailable
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from observability.log import get_logger
from router.policies import Candidate
from router.serving.inbox import Inbox, Turns
from router.serving.legs import DecodeSession, PrefillLeg, PrefillLine
from router.workers.breakers import Breakers
from router.workers.registry import Change, ChangeKind, Registry
from router.workers.tally import Tally
from rpc.channel import ChannelConfig, ChannelOpener, open_channel, watch_connection
from rpc.same_cluster import Vet, check_same_cluster

log = get_logger(__name__)


@dataclass(slots=True)
class _Peer:
    """One life of one worker: its channel, what goes over it in either pool, and the claims on it."""

    info: WorkerInfo
    channel: grpc.aio.Channel
    watch: asyncio.Task[None]
    session: DecodeSession
    line: PrefillLine
    tally: Tally
    leaving: bool = False


class Claim:
    """Says that one request burdens a worker, until `release`; by `num_tokens` until `computed`. Both are idempotent.

    It has a context of `num_kv_tokens` there, as far as that matters to choose among workers of its pool.

    `on_stall`, if given, hears once that the worker does not move and another would take the request.
    """

    def __init__(
        self,
        pools: Pools,
        ref: WorkerRef,
        num_tokens: int,
        on_stall: Callable[[DiptychError], None] | None = None,
        num_kv_tokens: int = 0,
    ) -> None:
        self._pools = pools
        self._ref = ref
        self._num_tokens = num_tokens
        self._num_kv_tokens = num_kv_tokens
        self._on_stall = on_stall
        self._held = True
        self.trial = pools.breakers.begin(ref)  # what the worker's breaker hears of this request
        pools.burden(ref, 1, num_tokens, num_kv_tokens)
        pools.claims.setdefault(ref, set()).add(self)

    def stalled(self, error: DiptychError) -> bool:
        """Tell whoever listens, the first time; whether anybody was told."""
        on_stall, self._on_stall = self._on_stall, None
        if on_stall is not None:
            on_stall(error)
        return on_stall is not None

    def computed(self) -> None:
        """The worker has made something: the prompt's tokens are no work any more."""
        self.trial.worked()
        if self._num_tokens:
            num_tokens, self._num_tokens = self._num_tokens, 0
            self._pools.burden(self._ref, 0, -num_tokens)

    def release(self) -> None:
        """The request burdens the worker no more."""
        if self._held:
            self._held = False
            self.trial.end()
            num_tokens, self._num_tokens = self._num_tokens, 0
            self._pools.burden(self._ref, -1, -num_tokens, -self._num_kv_tokens)
            claims = self._pools.claims[self._ref]
            claims.discard(self)
            if not claims:
                del self._pools.claims[self._ref]


class Pools:
    """Owns the channels and sessions to all workers of the registry; `close` gives them back. `claims` are who has what,
    `loads` what each worker had announced when it was a candidate last.
    """

    def __init__(
        self,
        registry: Registry,
        breakers: Breakers,
        config: ChannelConfig,
        opener: ChannelOpener = open_channel,
        vet: Vet = check_same_cluster,
    ) -> None:
        """`opener` makes the channel to each worker, `vet` finds out whether it is of this cluster."""
        self._vet = vet
        self.breakers = breakers
        registry.subscribe(breakers.on_change)
        self._registry = registry
        self._config = config
        self._opener = opener
        self._peers: dict[WorkerRef, _Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._turns = Turns()
        self.claims: dict[WorkerRef, set[Claim]] = {}
        self.loads: dict[WorkerRef, WorkerLoad] = {}
        registry.subscribe(self._on_change, partial(_hear, self._peers))

    def candidates(self, kind: WorkerKind) -> tuple[Candidate, ...]:
        """The workers of a pool that take work now."""
        found = []
        for worker in self._registry.ready(kind):
            peer = self._peers.get(worker.info.ref)
            if peer is not None and not peer.leaving:
                doubtful = not self.breakers.offers(worker.info.ref)
                found.append(peer.tally.candidate(worker, doubtful=doubtful))
                self.loads[worker.info.ref] = worker.load
        return tuple(found)

    def absent_s(self, kind: WorkerKind) -> float:
        """For how many seconds no worker of this pool has been known, be it starting or suspect; infinite if none ever was."""
        return self._registry.absent_s(kind)

    def has_left(self, ref: WorkerRef) -> bool:
        """Whether this worker said farewell: what is lost with it is lost as announced."""
        peer = self._peers.get(ref)
        return peer is not None and peer.leaving

    def session(self, ref: WorkerRef) -> DecodeSession:
        """The session to a decode worker. Raises Unavailable when it has gone."""
        return self._peer(ref).session

    def find_session(self, ref: WorkerRef) -> DecodeSession | None:
        """The session, or None when the worker has gone."""
        peer = self._peers.get(ref)
        return None if peer is None else peer.session

    def prefill_leg(self, ref: WorkerRef, inbox: Inbox) -> PrefillLeg:
        """A new, not started request on the session to a prefill worker. Raises Unavailable when it has gone."""
        return self._peer(ref).line.leg(inbox)

    def connected(self, ref: WorkerRef) -> bool:
        """Whether a connection to it stands now."""
        peer = self._peers.get(ref)
        return peer is not None and peer.channel.get_state() is grpc.ChannelConnectivity.READY

    def suspect(self, ref: WorkerRef) -> None:
        """A connection to it broke: it gets no more work until it announces itself again."""
        self._registry.suspect(ref)

    def burden(self, ref: WorkerRef, num_requests: int, num_tokens: int, num_kv_tokens: int = 0) -> None:
        """Count what a claim adds or takes; a worker that has gone is not counted."""
        peer = self._peers.get(ref)
        if peer is None:
            return
        peer.tally.add(num_requests, num_tokens, num_kv_tokens)
        if peer.leaving and peer.tally.num_inflight == 0:
            self._drop(ref, "left")

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        for ref in list(self._peers):
            self._drop(ref, "the router stops")
        await asyncio.gather(*self._closing)

    def _peer(self, ref: WorkerRef) -> _Peer:
        peer = self._peers.get(ref)
        if peer is None:
            raise Unavailable(f"worker {ref.worker_id}, epoch {ref.epoch}: not known any more")
        return peer

    def _on_change(self, change: Change) -> None:
        ref = change.info.ref
        match change.kind:
            case ChangeKind.JOINED:
                self._add(change.info)
            case ChangeKind.LOST:
                self._drop(ref, "lost")
            case ChangeKind.LEFT:
                peer = self._peers.get(ref)
                if peer is not None:
                    peer.leaving = True
                    self.burden(ref, 0, 0)

    def _add(self, info: WorkerInfo) -> None:
        channel = self._opener(info.address, self._config)
        watch = asyncio.ensure_future(_watch(channel, info, self._registry, self._vet))
        timeout_s, turns = self._config.connect_timeout_s, self._turns
        session = DecodeSession(info, channel, timeout_s, lambda lost: self.suspect(lost.ref), turns)
        line = PrefillLine(info, channel, timeout_s)
        self._peers[info.ref] = _Peer(info, channel, watch, session, line, Tally(info))

    def _drop(self, ref: WorkerRef, reason: str) -> None:
        peer = self._peers.pop(ref, None)
        if peer is None:
            return
        self.loads.pop(ref, None)
        peer.watch.cancel()
        peer.session.close(reason)
        peer.line.close(reason)
        closing = asyncio.ensure_future(peer.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _hear(peers: Mapping[WorkerRef, _Peer], ref: WorkerRef, load: WorkerLoad) -> None:
    """A worker's word, for the books of it."""
    if ref in peers:
        peers[ref].tally.heard(load)


async def _watch(channel: grpc.aio.Channel, info: WorkerInfo, registry: Registry, vet: Vet) -> None:
    """Keep the worker connected; suspect it when its connection breaks, and for good when it is not of this cluster."""
    watching = asyncio.ensure_future(watch_connection(channel, lambda: registry.suspect(info.ref)))
    try:
        await vet(channel, info.address)
        await watching
    except NotOfThisCluster as error:
        log.warning("a worker that is not of this cluster gets nothing", worker_id=info.ref.worker_id, reason=error)
        registry.suspect(info.ref, for_good=True)
    finally:
        watching.cancel()
