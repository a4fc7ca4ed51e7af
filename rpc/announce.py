"""How a worker makes itself known: one sign of life per interval to a router's embedded registry, and a farewell.

    silent ──ok──▶ known ──failure──▶ unheard (back-off, logged once) ──ok──▶ known (logged once) … ──leave──▶ gone
                     └─ soon(): the next word now, because it says something else than the last

A router that is away, restarts or forgets costs nothing here: the worker goes on and announces itself again. Refusals are
failures like any other. Does not know what load means or where it comes from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from contracts import wire_handoff
from contracts.clock import Clock
from contracts.errors import DiptychError, Unavailable
from contracts.pb.diptych.v1 import registry_pb2, registry_pb2_grpc
from contracts.worker import WorkerInfo, WorkerLoad, WorkerRef
from observability.log import get_logger
from rpc.channel import ChannelOpener, open_channel
from rpc.errors import from_rpc_error

log = get_logger(__name__)
# What a port for users says, and one of a worker: neither has anything to do with keys that a worker could be given.
_ANOTHER_DOOR = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
UNHEARD = "registry does not take us; going on and trying again"  # for whoever stops the router on purpose


class RegistryClient(Protocol):
    """One registry that workers announce themselves to."""

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        """Say that the worker lives; seconds for which it is believed. Raises DiptychError."""
        ...

    async def leave(self, ref: WorkerRef) -> int:
        """Say that the worker takes no new work; how many others of its pool do. Raises DiptychError."""
        ...

    async def close(self) -> None:
        """Let go of connections. Idempotent."""
        ...


class GrpcRegistryClient:
    """The registry embedded in the router at `address` (host:port). Owns one channel, which `opener` makes."""

    def __init__(self, address: str, timeout_s: float = 2.0, opener: ChannelOpener = open_channel) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = opener(address, None)
        self._stub = registry_pb2_grpc.RegistryStub(self._channel)

    async def announce(self, info: WorkerInfo, load: WorkerLoad) -> float:
        """See RegistryClient."""
        request = registry_pb2.AnnounceRequest(
            info=wire_handoff.worker_info_to_pb(info), load=wire_handoff.worker_load_to_pb(load)
        )
        try:
            answer = await self._stub.Announce(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error) from error
        return answer.ttl_s

    async def leave(self, ref: WorkerRef) -> int:
        """See RegistryClient."""
        request = registry_pb2.LeaveRequest(ref=wire_handoff.worker_ref_to_pb(ref))
        try:
            answer = await self._stub.Leave(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error) from error
        return answer.num_others

    def _refusal(self, error: grpc.aio.AioRpcError) -> DiptychError:
        if error.code() not in _ANOTHER_DOOR:
            return from_rpc_error(error, self._address)
        said = f"{self._address}: no workers are taken at this port ({error.details()})"
        return Unavailable(f"{said}; a router that has a --worker-port takes them there, and not at its users' port")

    async def close(self) -> None:
        """See RegistryClient."""
        await self._channel.close(None)


@dataclass(frozen=True, slots=True)
class AnnounceConfig:
    """Seconds. Failures are retried after `min_backoff_s`, doubling to `max_backoff_s`: a try costs what a sign of life does."""

    interval_s: float = 1.0
    min_backoff_s: float = 0.2
    max_backoff_s: float = 1.0


class Announcer:
    """Announces one worker to one registry. Owns the client, which `leave` closes."""

    def __init__(
        self,
        client: RegistryClient,
        info: WorkerInfo,
        load: Callable[[], WorkerLoad],
        clock: Clock,
        config: AnnounceConfig | None = None,
    ) -> None:
        self._client = client
        self._info = info
        self._load = load
        self._clock = clock
        self._config = config if config is not None else AnnounceConfig()
        self._problem: str | None = ""  # what the last word met: "" nothing said yet, None it was heard
        self._soon = asyncio.Event()

    async def run(self) -> None:
        """Announce until cancelled."""
        backoff_s = self._config.min_backoff_s
        while True:
            if await self.announce_once():
                backoff_s = self._config.min_backoff_s
                await self._pause(self._config.interval_s)
            else:
                await self._pause(backoff_s)
                backoff_s = min(2 * backoff_s, self._config.max_backoff_s)

    def soon(self) -> None:
        """Say the next word now: the state has changed."""
        self._soon.set()

    async def announce_once(self) -> bool:
        """One sign of life; whether it was heard. Logs when that, or the kind of its refusal, changes."""
        problem: str | None = None
        try:
            ttl_s = await self._client.announce(self._info, self._load())
        except DiptychError as error:
            problem = type(error).__name__
            if problem != self._problem:
                log.warning(UNHEARD, why=problem, reason=error)
        else:
            if self._problem is not None:
                log.info("announced", worker=self._info.ref.worker_id, epoch=self._info.ref.epoch, ttl_s=ttl_s)
        self._problem = problem
        return problem is None

    async def _pause(self, delay_s: float) -> None:
        """Until `delay_s` have passed or the next word is wanted `soon`, also if that was said while the last was on its way."""
        waits = (asyncio.ensure_future(self._clock.sleep(delay_s)), asyncio.ensure_future(self._soon.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._soon.clear()

    async def leave(self) -> int:
        """Say farewell, best effort: an unheard farewell only means that the registry waits for its ttl.

        Returns how many workers of this pool are left, 0 when nobody said.
        """
        try:
            return await self._client.leave(self._info.ref)
        except DiptychError as error:
            log.info("farewell not heard", reason=error)
            return 0
        finally:
            await self._client.close()
