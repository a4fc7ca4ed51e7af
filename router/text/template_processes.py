"""Renders chat templates beside the router: what a template computes and takes is bounded, and costs others nothing.

    conversation ──▶ an idle process, or a new one ──▶ text
                          │ refuses        ──▶ InvalidRequest, the process stays
                          ├ computes or takes too much, is silent ──▶ InvalidRequest, the process is gone
                          └ died, or somebody has stopped it      ──▶ another process, once

A template is a program of whoever made the model, and jinja2's sandbox bounds neither time nor memory. A rendering costs
about 0.1 ms more than in the router itself; processes are started when they are needed and stay. Does not know tokens.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

import psutil

from contracts.errors import InternalError, InvalidRequest, Unavailable
from observability.log import get_logger
from router.text.chat_template import (
    ChatTemplate,
    Conversation,
    TemplateRefusal,
    continued,
    refused,
    template_variables,
)
from router.text.template_child import LENGTH_BYTES

log = get_logger(__name__)
_LOOK_S = 0.5  # after which a process that has not answered is looked at


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What rendering one conversation may cost. `cpu_s` is time that is computed in, `wall_s` how long anybody waits for it
    when the machine is crowded; `text_chars` more than four times what was sent.
    """

    cpu_s: float = 1.0
    wall_s: float = 30.0
    memory_bytes: int = 512 * 2**20
    text_chars: int = 1024 * 1024
    max_processes: int = 2


class TemplateProcesses:
    """Owns the processes from their first use to `close`. Used on one event loop."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits if limits is not None else TemplateLimits()
        self._places = asyncio.Semaphore(self._limits.max_processes)
        self._idle: list[_Child] = []
        self._jobs: set[asyncio.Task[str]] = set()

    async def render(self, template: ChatTemplate, conversation: Conversation) -> str:
        """The prompt's text. Raises InvalidRequest with the template's own words, or the bound that it does not keep."""
        request = self._request(template, conversation)
        # A client that leaves in the middle does not cost the process: it is in step again when this rendering has ended.
        job = asyncio.ensure_future(self._run(request))
        self._jobs.add(job)
        job.add_done_callback(self._ended)
        try:
            return continued(conversation, await asyncio.shield(job))
        except TemplateRefusal as refusal:
            raise refused(conversation, str(refusal)) from refusal

    async def warm_up(self, template: ChatTemplate) -> None:
        """Start a process and let it compile the template, so that the first request does not wait for that."""
        try:
            await self.render(template, Conversation(()))
        except InvalidRequest as error:  # a template need not take an empty conversation
            log.debug("the chat template refuses nothing", reason=error)

    async def close(self) -> None:
        """End all processes, and what they are rendering. Idempotent."""
        for job in list(self._jobs):
            job.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs)
        idle, self._idle = self._idle, []
        for child in idle:
            await child.end()

    def _request(self, template: ChatTemplate, conversation: Conversation) -> bytes:
        try:
            variables = json.dumps(template_variables(conversation, template.special_tokens))
        except RecursionError as error:
            raise refused(conversation, "what it is given is nested too deeply") from error
        head = {
            "source": template.source if conversation.template is None else conversation.template,
            "max_chars": self._limits.text_chars + 4 * len(variables),
        }
        body = f'{json.dumps(head)[:-1]},"variables":{variables}}}'.encode()
        return len(body).to_bytes(LENGTH_BYTES, "big") + body

    async def _run(self, request: bytes) -> str:
        async with self._places:
            try:
                answer = await self._ask(request, self._idle.pop() if self._idle else await self._start())
            except _DiedError:  # whoever killed it, it need not have been for this request
                try:
                    answer = await self._ask(request, await self._start())
                except _DiedError as error:
                    raise TemplateRefusal(self._why_it_died(error.status)) from error
        if "refusal" in answer:
            raise TemplateRefusal(answer["refusal"])
        return answer["text"]

    async def _start(self) -> _Child:
        return await _Child.start(self._limits)

    async def _ask(self, request: bytes, child: _Child) -> dict[str, str]:
        """Raises TemplateRefusal at a limit of time, _DiedError when the process died of anything else."""
        in_step = False
        try:
            async with asyncio.timeout(self._limits.wall_s):
                answer = await child.ask(request)
            in_step = True
        except TimeoutError as error:
            raise TemplateRefusal(f"it does not end within {self._limits.wall_s:g} s") from error
        except (EOFError, OSError) as error:
            status = await child.end()
            log.warning("a process that renders chat templates died", status=status)
            if status != -signal.SIGPROF:
                raise _DiedError(status) from error
            said = f"it computes for more than {self._limits.cpu_s:g} s, which is the limit"
            raise TemplateRefusal(said) from error
        finally:
            if in_step:
                self._idle.append(child)
            else:
                await child.end()
        return answer

    def _why_it_died(self, status: int) -> str:
        return f"its rendering died (status {status}); {self._limits.memory_bytes // 2**20} MiB of memory are the limit"

    def _ended(self, job: asyncio.Task[str]) -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # whoever waited has it; if nobody does any more, it is nobody's


class _DiedError(Exception):
    """A process ended in the middle of a rendering."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Child:
    """One process and our end of the line to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, limits: TemplateLimits) -> _Child:
        """Raises Unavailable where the machine does not give another process."""
        command = [sys.executable, "-P", "-m", "router.text.template_child"]
        command += [str(limits.memory_bytes), str(limits.cpu_s)]
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            with theirs:
                process = _spawn(command, theirs)
        except OSError as error:
            writer.close()
            raise Unavailable(f"cannot start a process for chat templates: {error}") from error
        return cls(process, reader, writer)

    async def ask(self, request: bytes) -> dict[str, str]:
        """Raises EOFError or OSError when the process dies of it, or is ended because somebody has stopped it."""
        self._look_later()
        try:
            self._writer.write(request)
            await self._writer.drain()
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            answer = json.loads(await self._reader.readexactly(size))
        finally:
            self._looking.cancel()
        if not isinstance(answer, dict):
            raise InternalError("a process that renders chat templates speaks another language")
        return answer

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """One that is stopped uses no time of its own, so that its own bound never ends it; it would hold its place for long."""
        try:
            stopped = psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:  # its end of the line says so as well
            return
        if stopped:
            self._process.kill()
        else:
            self._look_later()

    async def end(self) -> int:
        """Kill it, if it lives; its exit status. Idempotent."""
        self._writer.close()
        if self._process.poll() is None:
            try:  # one that died just now is about to be seen
                return await asyncio.to_thread(self._process.wait, 0.2 if self._reader.at_eof() else 0.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return await asyncio.to_thread(self._process.wait)


def _spawn(command: list[str], line: socket.socket) -> subprocess.Popen[bytes]:
    """About 1 ms, and in this thread: one in another could outlive whoever waits for it."""
    return subprocess.Popen(command, stdin=line.fileno(), stdout=line.fileno())
