"""Who is at which address, what is under way between whom, and what breaks when one of them is gone."""

from __future__ import annotations

import asyncio
from typing import Protocol

import grpc

from contracts.clock import VirtualClock
from contracts.errors import DiptychError
from contracts.worker import ConnectorAddress
from tests.faults.process import Aborted, Process
from tests.faults.wire import Wire


class Breakable(Protocol):
    """A call."""

    source: Process
    target: Process | None

    def snap(self) -> None:
        """It ends as when the connection is lost."""
        ...


class Connection(Protocol):
    """A channel."""

    source: Process
    address: str

    def broke(self) -> None:
        """Its connection, if it had one."""
        ...


class Network:
    """Who is at which address, and every call under way."""

    def __init__(self, clock: VirtualClock, wire: Wire) -> None:
        self.clock = clock
        self.wire = wire
        self._at: dict[str, Process] = {}
        self.calls: dict[Breakable, None] = {}  # an ordered set: one seed, one history
        self._tasks: set[asyncio.Task] = set()
        self.channels: dict[Connection, None] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}  # hand-off or request id → the prompt that it is for
        self.keys: dict[int, tuple[str, ...]] = {}  # window key → the hand-off that it was granted to
        self.failing_writes = 0
        self.connectors: dict[ConnectorAddress, str] = {}  # whose memory it is

    def note(self, command) -> None:
        """Remember what the ids of a command stand for."""
        match command.WhichOneof("command"):
            case "run":
                prompt = tuple(command.run.request.prompt_token_ids)
                self.prompts[command.run.target.handoff_id] = prompt
                self.prompts[command.run.request.request_id] = prompt
            case "generate":
                asked = command.generate.request
                self.prompts[asked.request_id] = tuple(asked.prompt_token_ids)
            case "retarget":
                again = command.retarget
                self.prompts[again.target.handoff_id] = self.prompts[again.request_id]

    def join(self, process: Process) -> None:
        """It is reached at its address from now on."""
        self._at[process.address] = process

    def kill(self, process: Process) -> None:
        """It is gone: its calls, in and out, break."""
        process.alive = False
        del self._at[process.address]
        for call in [c for c in self.calls if process in (c.source, c.target)]:
            call.snap()
        for channel in [c for c in self.channels if process is c.source or process.address == c.address]:
            channel.broke()

    def cut(self, one: Process, other: Process) -> None:
        """The connection between two processes breaks, with every call on it."""
        for call in [c for c in self.calls if {c.source, c.target} == {one, other}]:
            call.snap()
        ends = {(one.name, other.address), (other.name, one.address)}
        for channel in [c for c in self.channels if (c.source.name, c.address) in ends]:
            channel.broke()

    def find(self, address: str) -> Process | None:
        return self._at.get(address)

    def spawn(self, work) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._heard)
        return task

    @staticmethod
    def _heard(ended: asyncio.Task) -> None:
        """A call's error is its caller's; any other is a fault of this file or of the world, which must not go unheard."""
        error = None if ended.cancelled() else ended.exception()
        if error is not None and not isinstance(error, (Aborted, grpc.aio.AioRpcError, DiptychError)):
            context = {"message": "a message's way failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    async def quiet(self) -> None:
        """Wait for what is still on its way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
