"""A worker's way to announce itself through Redis: its life begins there, its words are judged there and told to all routers.

    begin ──▶ announce … announce ──▶ leave ──▶ close

It has the form of `rpc.announce.RegistryClient`. While Redis is away every word fails at once; a Redis that forgot everything
learns of the worker again by its next word. Does not know how a word comes about.
"""

from __future__ import annotations

from contracts.clock import Clock
from contracts.errors import ConfigError, DiptychError, InvalidRequest, StaleEpoch, Unavailable, WorkerIdTaken
from contracts.worker import WorkerInfo, WorkerLoad, WorkerRef
from observability.log import get_logger
from registry import keys, scripts, wire
from registry.config import LeaseConfig
from registry.link import RedisLink, refusal
from registry.pipeline import Reply

log = get_logger(__name__)
_RETRY_S = 0.2


class RedisRegistryClient:
    """Words of workers into the registry behind `link`, which the caller owns unless it is handed over with `owns_link`."""

    def __init__(self, link: RedisLink, lease: LeaseConfig, *, owns_link: bool = False) -> None:
        self._link = link
        self._lease = lease
        self._owns_link = owns_link
        self._kinds: dict[WorkerRef, str] = {}

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        """Say that the worker lives; seconds for which it is believed.

        Raises StaleEpoch, WorkerIdTaken, LayoutMismatch, InvalidRequest, or Unavailable when Redis is away or refuses.
        """
        word = wire.word_to_bytes(info, load)
        worker_id = info.ref.worker_id
        names = (keys.worker(worker_id), keys.epoch(worker_id), keys.suspect(worker_id), keys.WORKERS, keys.LAYOUT)
        kind, state, ttl_ms = info.kind.value, load.state.value, round(self._lease.ttl_s * 1e3)
        args = (worker_id, info.ref.epoch, info.address, kind, state, wire.layout_to_bytes(info), ttl_ms, word)
        reply = await self._link.script(
            scripts.ANNOUNCE, names, (*args, keys.WORKER, self._link.channel(keys.ANNOUNCED))
        )
        self._kinds = {info.ref: kind}
        match reply:
            case [b"ok"]:
                return self._lease.ttl_s
            case [b"stale", bytes(expected)]:
                raise StaleEpoch(worker_id, int(expected), info.ref.epoch)
            case [b"taken", bytes(holder)]:
                raise WorkerIdTaken(worker_id, holder.decode(errors="replace"), info.address)
            case [b"unlike", bytes(common)]:
                raise await self._unlike(common, info)
        raise _not_understood(self._link, reply)

    async def leave(self, ref: WorkerRef) -> int:
        """Say that the worker takes no new work; how many others of its pool do. Raises Unavailable."""
        names = (keys.worker(ref.worker_id), keys.WORKERS)
        word, tombstone_ms = wire.farewell_to_bytes(ref), round(self._lease.tombstone_s * 1e3)
        channel, kind = self._link.channel(keys.LEFT), self._kinds.get(ref, "")
        args = (ref.worker_id, ref.epoch, tombstone_ms, word, keys.WORKER, channel, kind)
        reply = await self._link.script(scripts.LEAVE, names, args)
        if not isinstance(reply, int):
            raise _not_understood(self._link, reply)
        return reply

    async def close(self) -> None:
        """Let go of the link, if it is this client's own. Idempotent."""
        if self._owns_link:
            await self._link.close()

    async def _unlike(self, common: bytes, info: WorkerInfo) -> DiptychError:
        """How the worker differs from the others; a record that says nothing readable is taken away."""
        try:
            wire.check_layout(common, info)
        except InvalidRequest as error:
            log.warning("what the workers have in common is damaged; taking it away", reason=error)
            await self._link.run("DEL", keys.LAYOUT)
        except DiptychError as error:
            return error
        return Unavailable("what the workers of this registry have in common was not readable; it will be, by and by")


async def begin_life(link: RedisLink, worker_id: str, clock: Clock) -> WorkerRef:
    """A life of this worker that was never begun before; waits while Redis is away, and says so.

    Raises ConfigError for a name that the registry would not take, and where Redis does not take our credentials.
    """
    try:
        wire.check_worker_id(worker_id)
    except InvalidRequest as error:
        raise ConfigError(error.message) from error
    said = ""
    while True:
        try:
            reply = await link.script(scripts.BEGIN, (keys.epoch(worker_id),))
        except Unavailable as error:
            if link.refused:
                raise refusal(link) from error
            if not said:
                log.warning("waiting for the registry: this worker's life begins there", reason=error)
            said = error.message
            await clock.sleep(_RETRY_S)
            continue
        if not isinstance(reply, int):
            raise _not_understood(link, reply)
        return WorkerRef(worker_id, reply)


def _not_understood(link: RedisLink, reply: Reply) -> Unavailable:
    return Unavailable(f"{link.config.address}: an answer that is not understood: {reply!r:.80}")
