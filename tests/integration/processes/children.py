"""Real processes from the nursery: started in a few hundred milliseconds, signalled, waited for. Knows no connections."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import signal
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Self

from decode_service.config import DecodeConfig
from prefill_service.config import PrefillConfig
from router.config import RouterConfig

Config = PrefillConfig | DecodeConfig | RouterConfig
_KINDS = {PrefillConfig: "prefill", DecodeConfig: "decode", RouterConfig: "router"}
_SCRIPT = Path(__file__).with_name("nursery.py")


class Child:
    """One process. `code` is its exit code once `ended` is set, negative for the signal that killed it."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self.code: int | None = None
        self.ended = asyncio.Event()

    def signal(self, number: signal.Signals) -> None:
        """Send it; nothing happens to one that has ended."""
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stopped(self) -> bool:
        """Whether it is stopped by a signal, as /proc says."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Nursery:
    """Owns the parent process of all children; they are gone when `async with` is left."""

    def __init__(self, folder: Path, script: Path = _SCRIPT) -> None:
        self._folder = folder
        self._script = script
        self._parent: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting: deque[asyncio.Future[int]] = deque()
        self._children: dict[int, Child] = {}

    async def __aenter__(self) -> Self:
        argv = [sys.executable, "-P", str(self._script)]
        pipe = asyncio.subprocess.PIPE
        self._parent = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, cwd="/")
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._starting.append(ready)
        self._reading = asyncio.create_task(self._read(self._parent))
        try:
            await asyncio.wait_for(ready, 60)
        except BaseException:  # nobody will leave what was not entered
            with suppress(ProcessLookupError):
                self._parent.kill()
            await self._parent.wait()
            await self._reading
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._parent is not None
        assert self._parent.stdin is not None
        assert self._reading is not None
        self._parent.stdin.close()
        await asyncio.wait_for(self._parent.wait(), 30)
        await self._reading

    async def start(self, name: str, config: Config) -> Child:
        """Fork a process that serves this configuration; it is not ready yet."""
        assert self._parent is not None
        assert self._parent.stdin is not None
        log = self._folder / f"{name}.log"
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._starting.append(started)
        packed = base64.b64encode(pickle.dumps(config)).decode()
        order = {"start": _KINDS[type(config)], "config": packed, "log": str(log)}
        self._parent.stdin.write(json.dumps(order).encode() + b"\n")
        pid = await asyncio.wait_for(started, 10)
        child = self._children[pid] = Child(name, pid, log)
        return child

    async def _read(self, parent: asyncio.subprocess.Process) -> None:
        assert parent.stdout is not None
        async for line in parent.stdout:
            word = json.loads(line)
            if "ended" in word:
                child = self._children.pop(word["ended"])
                child.code = word["code"]
                child.ended.set()
            else:
                self._starting.popleft().set_result(word.get("started", word.get("ready")))
        code = await parent.wait()
        for waiting in self._starting:  # nobody else will say it
            if not waiting.done():
                waiting.set_exception(RuntimeError(f"the nursery ended with {code}; why is in its stderr"))
