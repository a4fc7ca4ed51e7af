"""Both ends of a Prefill.Session without gRPC: a worker whose runs do what a test says, and a channel whose worker does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
from grpc.aio import Metadata

from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import prefill_pb2, types_pb2
from contracts.prefill import FirstTokens, HandedOff, PrefillEvent, Target
from contracts.request import GenerationRequest, TokenDelta
from contracts.sampling import SamplingParams
from contracts.wire_prefill import event_to_pb
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from observability.stages import HandoffStats, StageTimes

OURS = WorkerRef("p", 2)
OURS_PB = types_pb2.WorkerRef(worker_id="p", epoch=2)
D = types_pb2.WorkerRef(worker_id="d", epoch=1)


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), SamplingParams(max_tokens=2))


def target(handoff_id: str) -> Target:
    return Target(handoff_id, WorkerRef("d", 1), "d:1")


def tokens(name: str) -> FirstTokens:
    return FirstTokens(TokenDelta(name, 0, (5,)))


def handed_off(name: str) -> HandedOff:
    return HandedOff(name, HandoffStats("local"), StageTimes())


async def settle() -> None:
    """Until nothing moves any more."""
    for _ in range(30):
        await asyncio.sleep(0)


class Worker:
    """Its runs say what `say` is told, until None, which ends them, or an error, which they raise."""

    def __init__(self) -> None:
        self.ref = OURS
        self.drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.targets: dict[str, asyncio.Queue[Target | None]] = {}
        self.living: set[str] = set()
        self._said: dict[str, asyncio.Queue[PrefillEvent | Exception | None]] = {}

    def say(self, name: str, *events: PrefillEvent | Exception | None) -> None:
        for event in events:
            self._said.setdefault(name, asyncio.Queue()).put_nowait(event)

    async def run(
        self, asked: GenerationRequest, aim: Target, targets: asyncio.Queue[Target | None]
    ) -> AsyncGenerator[PrefillEvent, None]:
        del aim
        name = asked.request_id
        self.targets[name] = targets
        self.living.add(name)
        try:
            said = self._said.setdefault(name, asyncio.Queue())
            while (event := await said.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            await asyncio.sleep(0)  # giving back takes its time
            self.living.discard(name)


class Call:
    """One session as its worker sees it: `heard` is what it has read, `say` and `end` what it answers."""

    def __init__(self, commands: AsyncIterator[prefill_pb2.PrefillCommand], may_read: asyncio.Event) -> None:
        self.heard: list[prefill_pb2.PrefillCommand] = []
        self.cancelled = False
        self._commands = commands
        self._may_read = may_read
        self._said: asyncio.Queue[prefill_pb2.PrefillBatch | Exception | None] = asyncio.Queue()
        self._reading = asyncio.ensure_future(self._read())

    def say(self, name: str, *events: PrefillEvent | prefill_pb2.PrefillEnded) -> None:
        """In one batch."""
        batch = prefill_pb2.PrefillBatch(prefill=OURS_PB)
        for event in events:
            if isinstance(event, prefill_pb2.PrefillEnded):
                batch.events.add(request_id=name, ended=event)
            else:
                batch.events.append(event_to_pb(event, name))
        self._said.put_nowait(batch)

    def end(self, error: Exception | None = None) -> None:
        self._said.put_nowait(error)

    def cancel(self) -> None:
        """gRPC's."""
        self.cancelled = True
        self._reading.cancel()

    async def _read(self) -> None:
        while True:
            await self._may_read.wait()
            command = await anext(self._commands, None)
            if command is None:
                return
            self.heard.append(command)

    async def __aiter__(self) -> AsyncIterator[prefill_pb2.PrefillBatch]:
        while (said := await self._said.get()) is not None:
            if isinstance(said, Exception):
                raise said
            yield said


class Channel:
    """To a worker that is there; it reads while `may_read` is set."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.may_read = asyncio.Event()
        self.may_read.set()

    def get_state(self) -> grpc.ChannelConnectivity:
        """gRPC's."""
        return grpc.ChannelConnectivity.READY

    def stream_stream(self, method, **_):
        """gRPC's."""
        assert method == "/diptych.v1.Prefill/Session"

        def call(commands):
            self.calls.append(Call(commands, self.may_read))
            return self.calls[-1]

        return call


def broken(code: grpc.StatusCode, why: str = "for a reason") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, Metadata(), Metadata(), why)


def known() -> WorkerInfo:
    """The worker as a router knows it."""
    layout = KVLayout("m", "float32", 1, 1, 8, 16)
    return WorkerInfo(OURS, WorkerKind.PREFILL, "p:1", "m", layout, (), 64, 64)
